"""Style: the report's style sheet, light and dark.

Law: no drawing names a colour; each is defined here, once for light and once for dark.
"""

CSS = """
:root {
  color-scheme: light dark;
  --paper: #f6f7f9; --card: #ffffff; --ink: #1c2228; --muted: #66707b; --grid: #e4e8ec; --edge: #dde2e7;
  --forward: #2f76b5; --backward: #7653b8; --reduce: #c2620a; --update: #2b8454; --measure: #5d6873;
  --wait: #d3d9df; --wait-ink: #444c55; --data: #a8841a; --c3: #b8324f; --c5: #1c8a94; --inside: #ffffff;
  --unshard: #6e0f4a;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #14181c; --card: #1c2127; --ink: #e6eaee; --muted: #98a3ae; --grid: #2b323a; --edge: #2f3740;
    --forward: #5b9fdc; --backward: #a184e0; --reduce: #e58a3c; --update: #4fb07c; --measure: #8d99a5;
    --wait: #3b444e; --wait-ink: #c3ccd5; --data: #d0ab45; --c3: #e8698a; --c5: #4cb9c4; --inside: #10141a;
    --unshard: #efbeeb;
  }
}
* { box-sizing: border-box }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif }
main { max-width: 1160px; margin: 0 auto; padding: 36px 20px 60px }
h1 { font-size: 28px; line-height: 1.2; margin: 0 0 4px; overflow-wrap: anywhere }
h2 { font-size: 17px; margin: 0 0 10px }
p { margin: 0 0 10px }
.under { color: var(--muted); margin-bottom: 22px }
.cards { display: grid; gap: 16px; grid-template-columns: repeat(2, minmax(0, 1fr)) }
.figures { display: grid; gap: 12px; grid-template-columns: repeat(auto-fit, minmax(128px, 1fr)); margin-bottom: 16px }
.card, .figures > div { background: var(--card); border: 1px solid var(--edge); border-radius: 10px; min-width: 0 }
.card { padding: 18px 20px }
.figures > div { padding: 12px }
.figures b { display: block; white-space: nowrap; font-size: 20px; line-height: 1.25;
  font-variant-numeric: tabular-nums }
.figures span, .note { color: var(--muted); font-size: 13px }
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
.listed th, .listed td { white-space: nowrap; vertical-align: top }
.listed td:last-child { text-align: left; white-space: normal; overflow-wrap: anywhere; padding-left: 20px; width: 70% }
.listed .unknown { color: var(--muted) }
.faults th:nth-child(-n+2), .faults td:nth-child(-n+2), .faults th:nth-child(4), .faults td:nth-child(4) {
  text-align: left }
.saved th:first-child, .saved td:first-child { text-align: right }
.stack { display: grid; gap: 16px; align-content: start; min-width: 0 }
.total > * { font-weight: 600 }
details summary { cursor: pointer; color: var(--muted); margin: 12px 0 8px }
.key { display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin: 0 5px 0 14px }
.key:first-child { margin-left: 0 }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: 0; font-size: 13px }
svg { width: 100%; height: auto; display: block }
svg text { font-size: 12px; fill: var(--muted) }
svg .name { font-weight: 600 }
svg .figure { fill: var(--ink) }
svg .end { text-anchor: end }
svg .middle { text-anchor: middle }
svg .inside { text-anchor: middle; fill: var(--inside); font-weight: 600; font-size: 11px; pointer-events: none }
svg .inside.on-wait { fill: var(--wait-ink) }
svg .grid { stroke: var(--grid) }
svg .axis { stroke: var(--muted) }
svg .line { fill: none; stroke-width: 2; stroke-linejoin: round }
svg .faint { fill: none; stroke-width: 1; opacity: 0.32 }
svg .dot { stroke: var(--card); stroke-width: 1.5 }
svg .mark, svg .peg, svg .tick { fill: none; stroke-width: 1.5 }
svg .rule { fill: none; stroke-width: 1.25; stroke-dasharray: 4 3 }
svg .peg { stroke-width: 2 }
.forward { fill: var(--forward); background: var(--forward) }
.backward { fill: var(--backward); background: var(--backward) }
.reduce { fill: var(--reduce); background: var(--reduce) }
.unshard { fill: var(--unshard); background: var(--unshard) }
.update { fill: var(--update); background: var(--update) }
.measure { fill: var(--measure); background: var(--measure) }
.wait { fill: var(--wait); background: var(--wait) }
.data { fill: var(--data); background: var(--data) }
.rest { fill: var(--edge); background: var(--edge) }
svg .mark { stroke: var(--reduce) }
.tick.c2 { stroke: var(--update) } .rule.c3, .peg.c3 { stroke: var(--c3) }
.line.c0, .faint.c0 { stroke: var(--forward) } .dot.c0 { fill: var(--forward) }
.line.c1, .faint.c1 { stroke: var(--reduce) } .dot.c1 { fill: var(--reduce) }
.line.c2, .faint.c2 { stroke: var(--update) } .dot.c2 { fill: var(--update) }
.line.c3, .faint.c3 { stroke: var(--c3) } .dot.c3 { fill: var(--c3) }
.line.c4, .faint.c4 { stroke: var(--backward) } .dot.c4 { fill: var(--backward) }
.line.c5, .faint.c5 { stroke: var(--c5) } .dot.c5 { fill: var(--c5) }
@media (max-width: 760px) {
  .cards { grid-template-columns: minmax(0, 1fr) }
  .scroll svg { min-width: 760px }
  svg { overflow: visible }
  svg text { font-size: 14px }
  .scroll svg text { font-size: 12px }
  .listed tr { display: flex; flex-wrap: wrap; column-gap: 16px; padding: 8px 0; border-bottom: 1px solid var(--grid) }
  .listed tr:first-child, .listed .unknown { display: none }
  .listed tr:last-child { border-bottom: 0 }
  .listed td, .listed td:last-child { border: 0; padding: 1px 0; width: auto }
  .listed td:last-child { flex: 1 0 100% }
  .faults td:nth-child(2) { font-weight: 600 }
  .faults td:nth-child(3)::before, .saved td:first-child::before { content: "step " }
  .faults td:nth-child(5)::before { content: "back after " }
  .saved td:nth-child(3)::before { content: "pause " }
}
"""
