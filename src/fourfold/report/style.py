"""Style: the colours of the page, once for light and once for dark, and its style sheet.

Law: no drawing names a colour. What is drawn together differs by at least 0.09 in OKLab, in normal, deutan and protan
vision, also from the card below it; a curve has a contrast of at least 3 to the card, and the name on a block at least
4.5 to the block.
"""


# ---- colours ---------------------------------------------------------------------------------------------------------

# What a step's drawing shows; curves use them too.
DRAWN = ("forward", "backward", "reduce", "unshard", "update", "measure", "wait", "data")
CURVES = ("forward", "reduce", "update", "unshard", "backward", "measure")
"""By the number of a curve's colour."""

LIGHT = {
    "paper": "#f6f7f9", "card": "#ffffff", "ink": "#1c2228", "muted": "#5f6973", "grid": "#e4e8ec", "edge": "#dde2e7",
    "forward": "#4a65ac", "backward": "#432c76", "reduce": "#c27a02", "unshard": "#6b0537", "update": "#32662d",
    "measure": "#7a868f", "wait": "#d3d9df", "data": "#0092d1", "fault": "#b8324f",
    "on-forward": "#ffffff", "on-backward": "#ffffff", "on-reduce": "#14181c", "on-unshard": "#ffffff",
    "on-update": "#ffffff", "on-measure": "#0d1013", "on-wait": "#444c55", "on-data": "#10141a",
}  # fmt: skip
DARK = {
    "paper": "#14181c", "card": "#1c2127", "ink": "#e6eaee", "muted": "#98a3ae", "grid": "#2b323a", "edge": "#2f3740",
    "forward": "#7fa4e6", "backward": "#7767c0", "reduce": "#b78809", "unshard": "#f3c4ff", "update": "#8bc59a",
    "measure": "#7b857e", "wait": "#3b444e", "data": "#0f8cff", "fault": "#e8698a",
    "on-forward": "#10141a", "on-backward": "#ffffff", "on-reduce": "#10141a", "on-unshard": "#10141a",
    "on-update": "#10141a", "on-measure": "#0a0d10", "on-wait": "#c3ccd5", "on-data": "#10141a",
}  # fmt: skip


def _css_variables(colours: dict[str, str]) -> str:
    """The declarations of the colours."""
    return " ".join(f"--{name}: {colour};" for name, colour in colours.items())


def _css_classes() -> str:
    """A class for each colour of blocks, of the names on them, and of curves."""
    blocks = [f".{name} {{ fill: var(--{name}); background: var(--{name}) }}" for name in DRAWN]
    names = [f"svg .on-{name} {{ fill: var(--on-{name}) }}" for name in DRAWN]
    curves = [
        f".line.c{number}, .faint.c{number} {{ stroke: var(--{name}) }} "
        f".dot.c{number} {{ fill: var(--{name}) }} .swatch.c{number} {{ color: var(--{name}) }}"
        for number, name in enumerate(CURVES)
    ]
    return "\n".join([*blocks, *names, *curves])


# ---- style sheet -----------------------------------------------------------------------------------------------------


_LAYOUT = """
* { box-sizing: border-box }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif }
main { max-width: 1160px; margin: 0 auto; padding: 36px 20px 60px }
h1 { font-size: 28px; line-height: 1.2; margin: 0 0 4px; overflow-wrap: anywhere }
h2 { font-size: 17px; margin: 0 0 10px }
h3 { font-size: 14px; margin: 18px 0 6px }
p { margin: 0 0 10px }
.under { color: var(--muted); margin-bottom: 22px; overflow-wrap: anywhere }
.cards { display: grid; gap: 16px; grid-template-columns: repeat(2, minmax(0, 1fr)) }
.figures { display: grid; gap: 12px; margin-bottom: 16px;
  grid-template-columns: repeat(var(--columns), minmax(0, 1fr)) }
@media (max-width: 980px) { .figures { grid-template-columns: repeat(auto-fit, minmax(128px, 1fr)) } }
.card, .figures > div { background: var(--card); border: 1px solid var(--edge); border-radius: 10px; min-width: 0 }
.card { padding: 18px 20px }
.figures > div { padding: 12px }
.figures b { display: block; white-space: nowrap; font-size: 20px; line-height: 1.25;
  font-variant-numeric: tabular-nums }
.figures span { display: block; line-height: 1.35; overflow-wrap: anywhere }
.figures span, .note { color: var(--muted); font-size: 13px }
.scroll + .note { margin-top: 12px }
.note:last-child { margin-bottom: 0 }
.wide { grid-column: 1 / -1 }
.scroll { overflow-x: auto }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: 14px }
th { color: var(--muted); font-weight: 500; text-align: right; vertical-align: bottom }
th, td { padding: 4px 10px; border-bottom: 1px solid var(--grid); text-align: right }
th:first-child, td:first-child, .words th, .words td { text-align: left }
.compared td:first-child { white-space: nowrap }
.words td { overflow-wrap: anywhere }
.words th { width: 40%; vertical-align: top }
tr:last-child > * { border-bottom: 0 }
.runs th, .runs td { min-width: 96px; max-width: 260px; overflow-wrap: anywhere; vertical-align: top }
.runs th:first-child, .runs td:first-child { color: var(--muted); min-width: 130px }
.runs th:first-child, .runs td:first-child { position: sticky; left: 0; background: var(--card) }
.finals td:not(:first-child) { white-space: nowrap }
.runs .best { font-weight: 700 }
.runs .best::after { content: " ★"; color: var(--update) }
.runs td:not(.best):not(:first-child)::after, .runs th:not(:first-child)::after { content: " ★"; visibility: hidden }
.listed th, .listed td { white-space: nowrap; vertical-align: top }
.listed td:last-child { text-align: left; white-space: normal; overflow-wrap: anywhere; padding-left: 20px; width: 70% }
.listed .unknown { color: var(--muted) }
.memory th, .memory td, .memory td:last-child { width: auto; text-align: right; white-space: nowrap }
.plans th:last-child, table.leads th, table.leads td { text-align: left }
.plans th:last-child { padding-left: 20px }
.reasons th { width: 24% }
.memory th:first-child, .memory td:first-child { text-align: left }
.data-waits th:nth-child(-n+2), .data-waits td:nth-child(-n+2) { text-align: left }
.data-waits th:last-child { text-align: left; padding-left: 20px }
.data-waits td:last-child { width: 40% }
.faults th:nth-child(-n+2), .faults td:nth-child(-n+2), .faults th:nth-child(4), .faults td:nth-child(4) {
  text-align: left }
.saved th:first-child, .saved td:first-child { text-align: right }
.stack { display: grid; gap: 16px; align-content: start; min-width: 0 }
.total > * { font-weight: 600 }
details summary { cursor: pointer; color: var(--muted); margin: 12px 0 8px }
.card > details:first-child > summary { margin-top: 0 }
.card > details:last-child:not([open]) > summary { margin-bottom: 0 }
.key { display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin: 0 5px 0 14px }
.key:first-child { margin-left: 0 }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: 0; font-size: 13px }
figure { margin: 0 0 10px }
figure:last-child { margin-bottom: 0 }
figcaption { display: flex; flex-wrap: wrap; gap: 2px 16px; justify-content: flex-end; font-size: 13px;
  color: var(--muted); margin-bottom: -4px }
figcaption span { overflow-wrap: anywhere }
figcaption svg { display: inline-block; width: 20px; height: 12px; margin-right: 6px; vertical-align: -1px }
"""
_DRAWINGS = """
svg { width: 100%; height: auto; display: block }
svg[data-series] { touch-action: pan-y; cursor: crosshair; border-radius: 4px }
svg[data-series]:focus-visible { outline: 2px solid var(--forward); outline-offset: 4px }
svg text { font-size: 12px; fill: var(--muted) }
svg .name { font-weight: 600 }
svg .figure { fill: var(--ink) }
svg .end { text-anchor: end }
svg .middle { text-anchor: middle }
svg .inside { text-anchor: middle; font-weight: 600; font-size: 11px; pointer-events: none }
svg .grid { stroke: var(--grid) }
svg .axis { stroke: var(--muted) }
svg .line { fill: none; stroke-width: 2; stroke-linejoin: round }
svg .faint { fill: none; stroke-width: 1; opacity: 0.4 }
svg .dashed { stroke-dasharray: 6 4 }
svg .dot { stroke: var(--card); stroke-width: 1.5 }
svg .mark, svg .peg, svg .tick { fill: none; stroke-width: 1.5 }
svg .rule { fill: none; stroke-width: 1.25; stroke-dasharray: 4 3 }
svg .peg { stroke-width: 2 }
svg .cursor { stroke: var(--muted); stroke-width: 1; pointer-events: none }
svg .mark { stroke: var(--ink) }
.rest { fill: var(--edge); background: var(--edge) }
.tick { stroke: var(--update) } .rule, .peg { stroke: var(--fault) }
.swatch { display: inline-block; width: 9px; height: 9px; border-radius: 50%; background: currentColor;
  margin-right: 6px }
.tip { position: fixed; z-index: 9; pointer-events: none; background: var(--card); color: var(--ink);
  border: 1px solid var(--edge); border-radius: 8px; padding: 6px 10px; font-size: 13px; line-height: 1.45;
  font-variant-numeric: tabular-nums; box-shadow: 0 4px 16px rgb(0 0 0 / 0.18); max-width: 320px }
.tip b { display: block; font-weight: 600 }
.tip div { display: flex; gap: 14px; justify-content: space-between }
.tip div span:first-child { overflow-wrap: anywhere }
.tip div span:last-child { font-weight: 600; white-space: nowrap }
"""
_NARROW = """
@media (max-width: 760px) {
  main { padding: 24px 14px 40px }
  .cards { grid-template-columns: minmax(0, 1fr) }
  .card { padding: 16px 14px }
  .scroll svg { min-width: 760px }
  figcaption { margin-bottom: 4px }
  svg { overflow: visible }
  svg text { font-size: 18px }
  .bars text { font-size: 16px }
  .scroll svg text { font-size: 12px }
  .listed tr { display: flex; flex-wrap: wrap; column-gap: 16px; padding: 8px 0; border-bottom: 1px solid var(--grid) }
  .listed tr:first-child, .listed .unknown { display: none }
  .listed tr:last-child { border-bottom: 0 }
  .listed td, .listed td:last-child { border: 0; padding: 1px 0; width: auto }
  .listed td:last-child { flex: 1 0 100% }
  .memory tr, .memory tr:first-child, .plans tr, .plans tr:first-child { display: table-row }
  .plans td:last-child { white-space: nowrap }
  .plans th, .plans td, .plans td:last-child,
  .memory th, .memory td, .memory td:last-child { padding: 4px; border-bottom: 1px solid var(--grid); font-size: 13px }
  .memory th { white-space: normal }
  .faults td:nth-child(2) { font-weight: 600 }
  .faults td:nth-child(3)::before, .saved td:first-child::before { content: "step " }
  .faults td:nth-child(5)::before { content: "back after " }
  .saved td:nth-child(3)::before { content: "pause " }
}
"""
CSS = (
    f"\n:root {{ color-scheme: light dark; {_css_variables(LIGHT)} }}\n"
    f"@media (prefers-color-scheme: dark) {{ :root {{ {_css_variables(DARK)} }} }}"
    f"{_LAYOUT}{_DRAWINGS}{_css_classes()}{_NARROW}"
)
