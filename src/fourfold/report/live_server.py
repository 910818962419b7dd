"""Live server: serves the page of a run that is training to this machine; its script asks for what has changed.

token  a random word in the address: other users and other pages of this machine do not know it
Law: it answers GET of the page and of its data, on the loopback interface, to requests that name this machine and have
the token; all others are refused, and learn nothing of the run. It only reads. The page sends requests only to the
server that it came from; they take at most a twentieth of a processor.
"""

import base64
import hashlib
import hmac
import json
import re
import secrets
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs

from fourfold.report.html_page import SCRIPT as HOVER_SCRIPT
from fourfold.report.html_page import render_page
from fourfold.report.live_run import LiveRun, View

# ---- the page --------------------------------------------------------------------------------------------------------


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


def _page_title(name: str, state: str) -> str:
    """The title of the browser's tab."""
    return f"{name} · {state}"


def _render_live_page(name: str, view: View) -> str:
    """The page, with the status that the run has now; its script asks for the rest."""
    body = (
        f'<div id="status">{view.status}</div>'
        '<p id="lost" hidden="">No answer: fourfold watch has ended.</p>'
        "<noscript><p>This page needs JavaScript; fourfold report writes one that does not.</p></noscript>"
        f'<div class="cards" id="cards"></div><script>{SCRIPT}</script>'
    )
    return render_page(name, view.subtitle, body, head=f"<style>{STYLE}</style>")


# ---- the server ------------------------------------------------------------------------------------------------------


ADDRESS = "127.0.0.1"
# A page of another site may let its own name lead to this machine (DNS rebinding); its requests carry that name. Any
# port: an SSH tunnel may have another one at its other end.
OWN_NAMES = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:[0-9]{1,5})?", re.IGNORECASE | re.ASCII)
REQUEST_SECONDS = 10
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": SECURITY_POLICY,
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class LiveServer(ThreadingHTTPServer):
    """Serves one run until `shutdown`, or until an exception ends `serve_forever`."""

    daemon_threads = True

    def __init__(self, run: LiveRun, *, port: int = 0) -> None:
        """`port` 0 takes a free one. Raises OSError if the port cannot be had."""
        self.run, self.token = run, secrets.token_urlsafe(16)
        super().__init__((ADDRESS, port), _Handler)

    @property
    def url(self) -> str:
        """The address of the page."""
        return f"http://{ADDRESS}:{self.server_address[1]}/{self.token}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that has gone away is no error; any other is shown, and the server goes on."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: LiveServer  # type: ignore[assignment]
    timeout = REQUEST_SECONDS
    error_content_type = "text/plain; charset=utf-8"
    error_message_format = "%(code)d %(message)s\n"

    def do_GET(self) -> None:
        if not self._names_this_machine():
            self.send_error(403, "Forbidden")
            return
        # Nothing of the address is parsed before the token is checked: a parser may raise for what a stranger sends.
        address, _, query = self.path.partition("?")
        path = f"/{self.server.token}/"
        folder, name = address[: len(path)], address[len(path) :]
        if not hmac.compare_digest(folder.encode(), path.encode()) or name not in ("", "data"):
            self.send_error(404, "Not Found")
            return
        run = self.server.run
        if name == "data":
            (since,) = parse_qs(query).get("since", [""])[-1:]
            view = run.view(since)
            content = {**view._asdict(), "title": _page_title(run.name, view.state)}
            self._send(json.dumps(content), "application/json")
        else:
            self._send(_render_live_page(run.name, run.view()), "text/html; charset=utf-8")

    def _refuse_method(self) -> None:
        self.send_error(405, "Method Not Allowed")

    do_HEAD = do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = _refuse_method

    def _names_this_machine(self) -> bool:
        """Whether the request has one Host header, with a name of this machine."""
        hosts = self.headers.get_all("Host", [])
        return len(hosts) == 1 and OWN_NAMES.fullmatch(hosts[0].strip()) is not None

    def _send(self, text: str, kind: str) -> None:
        content = text.encode("utf-8", errors="replace")
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def end_headers(self) -> None:
        for name, value in HEADERS.items():
            self.send_header(name, value)
        super().end_headers()

    def version_string(self) -> str:
        return "fourfold"

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the terminal shows the address, and not every request."""
