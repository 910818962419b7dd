"""HTML page: the frame of every page, its cards and tables, and the script that shows values under the pointer.

card  a part of the page: a heading, and a drawing or a table
Law: everything that comes from a run is escaped, and characters that XML does not allow are written out. The page loads
nothing and is well-formed XML; its script reads nothing but a drawing's own attributes, and writes texts, never markup.
"""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from fourfold.report.style import CSS
from fourfold.words.terminal_text import escape_controls

# ---- page ------------------------------------------------------------------------------------------------------------


def render_page(title: str, subtitle: str, body: str, *, head: str = "") -> str:
    """A page. `body` and `head` are HTML, the others texts."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        f"<title>{render_text(title)} · Fourfold</title><style>{CSS}</style>{head}</head>\n"
        f'<body><main><h1>{render_text(title)}</h1><p class="under">{render_text(subtitle)}</p>{body}</main>'
        f"<script>{SCRIPT}</script></body></html>\n"
    )


def render_card(content: str, *, wide: bool = False) -> str:
    """A card with this HTML; "" without any."""
    return f'<section class="card{" wide" if wide else ""}">{content}</section>' if content else ""


def render_values(title: str, values: Mapping[str, Any], *, tag: str = "h2") -> str:
    """A heading, and a table of names and values."""
    return f"<{tag}>{escape(title)}</{tag}>{render_table_of_values(values)}"


def render_table_of_values(values: Mapping[str, Any]) -> str:
    """A table of names and values."""
    rows = (
        f"<tr><th>{render_text(name)}</th><td>{render_text(format_value(value))}</td></tr>"
        for name, value in values.items()
    )
    return f'<table class="words">{"".join(rows)}</table>'


def format_value(value: Any) -> str:
    """A value of a plan or a setting: 3, true, none."""
    if isinstance(value, dict):
        return ", ".join(f"{name} = {format_value(each)}" for name, each in value.items()) or "none"
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


# ---- table -----------------------------------------------------------------------------------------------------------


MAX_ROWS = 20  # the rows shown without a click
UNKNOWN = "–"


def render_text(text: str) -> str:
    """A text as HTML."""
    return escape(escape_controls(text))


def render_row(texts: Sequence[str], tag: str = "td") -> str:
    """A row."""
    return f"<tr>{''.join(_render_cell(text, tag) for text in texts)}</tr>"


def _render_cell(text: str, tag: str) -> str:
    class_attribute = ' class="unknown"' if text == UNKNOWN else ""
    return f"<{tag}{class_attribute}>{render_text(text)}</{tag}>"


def render_table(columns: Sequence[str], rows: Sequence[str], *, style: str) -> str:
    """A table of rows; all but the last MAX_ROWS are folded away."""
    earlier, shown = rows[:-MAX_ROWS], rows[-MAX_ROWS:]
    table = _render_rows(columns, shown, style)
    if not earlier:
        return table
    return (
        f"<details><summary>{len(earlier):,} earlier</summary>{_render_rows(columns, earlier, style)}</details>{table}"
    )


def _render_rows(columns: Sequence[str], rows: Sequence[str], style: str) -> str:
    return f'<div class="scroll"><table class="listed {style}">{render_row(columns, "th")}{"".join(rows)}</table></div>'


# ---- values under the pointer ----------------------------------------------------------------------------------------


# In a comment of both languages: the page is HTML and XML.
SCRIPT = """/*<![CDATA[*/
(function () {
"use strict";
var NS = "http://www.w3.org/2000/svg", tip = null, shown = null, at = 0, pointer = null;
function charted(node) { return node && node.closest ? node.closest("svg[data-series]") : null; }
function parse(svg) {
  if (!svg.chart) {
    var f = svg.getAttribute("data-frame").split(" ").map(Number);
    svg.chart = {x: svg.getAttribute("data-x"), series: JSON.parse(svg.getAttribute("data-series")),
      left: f[0], right: f[1], top: f[2], bottom: f[3], x0: f[4], x1: f[5], y0: f[6], y1: f[7]};
    var xs = {};
    svg.chart.series.forEach(function (s) { s.points.forEach(function (p) { xs[p[0]] = p[0]; }); });
    svg.chart.xs = Object.values(xs).sort(function (a, b) { return a - b; });
  }
  return svg.chart;
}
function number(v) {
  var size = Math.abs(v);
  return size !== 0 && (size < 1e-4 || size >= 1e9) ? v.toExponential(3)
    : v.toLocaleString("en-US", {maximumSignificantDigits: size >= 1e5 ? 9 : 5});
}
function nearest(points, x) {
  var low = 0, high = points.length - 1;
  while (high - low > 1) {
    var middle = (low + high) >> 1;
    if (points[middle][0] < x) { low = middle; } else { high = middle; }
  }
  return Math.abs(points[low][0] - x) <= Math.abs(points[high][0] - x) ? points[low] : points[high];
}
function clear() {
  if (shown) { shown.querySelectorAll(".cursor").forEach(function (n) { n.remove(); }); }
  if (tip) { tip.remove(); }
  tip = shown = null;
}
function add(parent, tag, text, style) {
  var node = document.createElement(tag);
  node.textContent = text;
  if (style) { node.className = style; }
  parent.appendChild(node);
  return node;
}
function draw(svg, tag, values) {
  var node = document.createElementNS(NS, tag);
  Object.keys(values).forEach(function (k) { node.setAttribute(k, values[k]); });
  svg.appendChild(node);
}
function show(svg, x) {
  clear();
  var c = parse(svg), width = (c.x1 - c.x0) || 1, height = (c.y1 - c.y0) || 1;
  var first = nearest(c.xs.map(function (v) { return [v]; }), x)[0], near = 0.012 * width;
  at = first; shown = svg;
  tip = document.createElement("div");
  tip.className = "tip"; tip.setAttribute("role", "status");
  add(tip, "b", c.x + " " + number(first));
  var px = c.left + (first - c.x0) / width * (c.right - c.left);
  draw(svg, "line", {"class": "cursor", x1: px, x2: px, y1: c.top, y2: c.bottom});
  c.series.forEach(function (s) {
    var p = nearest(s.points, first);
    if (Math.abs(p[0] - first) > near) { return; }
    var row = add(tip, "div", ""), name = add(row, "span", "");
    add(name, "span", "", "swatch c" + s.colour);
    name.appendChild(document.createTextNode(s.name));
    add(row, "span", number(p[1]));
    draw(svg, "circle", {"class": "cursor dot c" + s.colour, r: 4,
      cx: c.left + (p[0] - c.x0) / width * (c.right - c.left),
      cy: c.bottom - (p[1] - c.y0) / height * (c.bottom - c.top)});
  });
  document.body.appendChild(tip);
  var box = svg.getBoundingClientRect(), own = tip.getBoundingClientRect();
  var page = box.left + px / svg.viewBox.baseVal.width * box.width;
  var left = page + 14 + own.width > document.documentElement.clientWidth ? page - 14 - own.width : page + 14;
  tip.style.left = Math.max(4, left) + "px";
  tip.style.top = Math.max(4, box.top + c.top / svg.viewBox.baseVal.height * box.height) + "px";
}
function point(event) {
  var svg = charted(event.target);
  if (!svg) { clear(); pointer = null; return; }
  pointer = {clientX: event.clientX, clientY: event.clientY};
  var c = parse(svg), box = svg.getBoundingClientRect();
  var px = (event.clientX - box.left) / box.width * svg.viewBox.baseVal.width;
  show(svg, c.x0 + (px - c.left) / (c.right - c.left) * ((c.x1 - c.x0) || 1));
}
document.addEventListener("pointermove", point);
document.addEventListener("pointerdown", point);
document.addEventListener("pointerleave", clear);
document.addEventListener("scroll", clear, true);
document.addEventListener("focusout", clear);
document.addEventListener("replaced", function () {
  if (!shown || shown.isConnected) { return; }
  clear();
  if (pointer) { point(Object.assign({target: document.elementFromPoint(pointer.clientX, pointer.clientY)}, pointer)); }
});
document.addEventListener("keydown", function (event) {
  var svg = charted(event.target), step = {ArrowLeft: -1, ArrowRight: 1}[event.key];
  if (event.key === "Escape") { clear(); }
  if (!svg || !step) { return; }
  var xs = parse(svg).xs, index = shown === svg ? xs.indexOf(at) + step : (step > 0 ? 0 : xs.length - 1);
  show(svg, xs[Math.max(0, Math.min(xs.length - 1, index))]);
  event.preventDefault();
});
})();
/*]]>*/"""
