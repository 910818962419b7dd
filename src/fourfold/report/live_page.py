"""Live page: the page of a run that is training; its script asks for what has changed and puts it in place.

Law: the page sends requests only to the server that it came from; they take at most a twentieth of a processor.
"""

import base64
import hashlib

from fourfold.report.hover import SCRIPT as HOVER_SCRIPT
from fourfold.report.html_page import render_page
from fourfold.report.live_run import View

# What was asked for last is compared as text: a part that has not changed keeps its place, its hover and its focus.
SCRIPT = """/*<![CDATA[*/
(function () {
"use strict";
var version = "", known = {}, timer = 0, parser = document.createElement("template");
function element(html) {
  parser.innerHTML = html;
  return parser.content.firstElementChild;
}
function place(parts) {
  var cards = document.getElementById("cards"), names = Object.keys(parts), last = null;
  Object.keys(known).forEach(function (name) {
    if (!(name in parts)) { known[name].node.remove(); delete known[name]; }
  });
  names.forEach(function (name) {
    var old = known[name];
    if (!old || old.html !== parts[name]) {
      var node = element(parts[name]), focused = old && old.node.contains(document.activeElement);
      if (old) {
        var open = old.node.querySelectorAll("details");
        node.querySelectorAll("details").forEach(function (each, i) { if (open[i]) { each.open = open[i].open; } });
        old.node.replaceWith(node);
        if (focused && node.querySelector("svg[tabindex]")) { node.querySelector("svg[tabindex]").focus(); }
      }
      known[name] = old = {html: parts[name], node: node};
    }
    if (name === "figures") {
      if (old.node.parentNode !== cards.parentNode) { cards.parentNode.insertBefore(old.node, cards); }
      return;
    }
    var next = last ? last.nextElementSibling : cards.firstElementChild;
    if (next !== old.node) { cards.insertBefore(old.node, next); }
    last = old.node;
  });
}
function apply(data) {
  document.getElementById("status").innerHTML = data.status;
  document.title = data.title;
  document.querySelector(".under").textContent = data.subtitle;
  if (data.version !== version) {
    place(data.parts);
    version = data.version;
    document.dispatchEvent(new Event("replaced"));
  }
}
function lost(isLost) { document.getElementById("lost").hidden = !isLost; }
async function poll() {
  clearTimeout(timer);
  timer = 0;
  var began = performance.now(), wait = 3000;
  try {
    var answer = await fetch("data?since=" + encodeURIComponent(version), {cache: "no-store"});
    if (!answer.ok) { throw new Error(answer.status); }
    var data = await answer.json();
    apply(data);
    lost(false);
    wait = Math.max(1000, 20 * (performance.now() - began));
    if (document.hidden || data.state === "finished" || data.state === "stopped") { wait = Math.max(wait, 5000); }
  } catch (error) { lost(true); }
  timer = setTimeout(poll, wait);
}
document.addEventListener("visibilitychange", function () { if (!document.hidden && timer) { poll(); } });
poll();
})();
/*]]>*/"""
STYLE = """
.state { display: flex; flex-wrap: wrap; gap: 4px 24px; margin: 0 0 8px; font-variant-numeric: tabular-nums }
.state b { font-weight: 600; overflow-wrap: anywhere; margin-right: auto }
.state b::before { content: ""; display: inline-block; width: 10px; height: 10px; border-radius: 50%;
  margin-right: 8px; background: var(--measure) }
.state span { color: var(--muted) }
.running b::before, .finished b::before { background: var(--update) }
.quiet b::before { background: var(--reduce) }
.stalled b::before, .stopped b::before { background: var(--fault) }
.bar { height: 6px; border-radius: 3px; background: var(--grid); overflow: hidden; margin-bottom: 22px }
.bar div { height: 100%; background: var(--forward) }
#lost { color: var(--fault); font-weight: 600 }
"""


def _hash_source(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


# Of both scripts: nothing that a run's files hold could run, even if it were not escaped.
SECURITY_POLICY = "; ".join([
    "default-src 'none'",
    f"script-src {_hash_source(HOVER_SCRIPT)} {_hash_source(SCRIPT)}",
    "style-src 'unsafe-inline'",
    "connect-src 'self'",
    "base-uri 'none'",
    "form-action 'none'",
    "frame-ancestors 'none'",
])  # fmt: skip


def page_title(name: str, state: str) -> str:
    """The title of the browser's tab."""
    return f"{name} · {state}"


def render_live_page(name: str, view: View) -> str:
    """The page, with the status that the run has now; its script asks for the rest."""
    body = (
        f'<div id="status">{view.status}</div>'
        '<p id="lost" hidden="">No answer: fourfold watch has ended.</p>'
        "<noscript><p>This page needs JavaScript; fourfold report writes one that does not.</p></noscript>"
        f'<div class="cards" id="cards"></div><script>{SCRIPT}</script>'
    )
    return render_page(name, view.subtitle, body, head=f"<style>{STYLE}</style>")
