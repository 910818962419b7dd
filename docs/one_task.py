"""Draws docs/one-task.svg: python docs/one_task.py

Law: which rank has which tokens and shards comes from the plan of each panel; nothing is drawn by hand.
"""

from collections.abc import Iterator
from pathlib import Path

from fourfold.orders.sample_order import shard_range
from fourfold.plan.lowering import planned_layouts
from fourfold.plan.plan import Plan
from fourfold.words.layout import SPLIT

PLANS = ("dp=4", "dp=4 zero=3", "cp=4", "dp=2 cp=2 zero=1")
SAMPLES, TOKENS, RANKS, CELL, PART = 4, 8, 4, 20, 11
LEFT, PANEL, TOP = 196, 196, 56
WIDTH, HEIGHT = LEFT + PANEL * len(PLANS), 306
LABEL = "One task, and four plans that distribute it over four ranks: samples, tokens, weights, optimizer states"
STYLE = """<style>
text{font-family:system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
.h{font-size:15px;font-weight:600;fill:#24292f} .s{font-size:13px;fill:#57606a}
.p{font-family:ui-monospace,SFMono-Regular,Menlo,"DejaVu Sans Mono",monospace}
.p{font-size:14px;font-weight:600;fill:#24292f}
.c0{fill:#3b6ea5} .c1{fill:#4f8a5b} .c2{fill:#c98a2b} .c3{fill:#8a68cc}
.none{fill:none;stroke:#8c959f;stroke-opacity:.5} .rule{stroke:#8c959f;stroke-opacity:.35}
@media (prefers-color-scheme: dark){.h,.p{fill:#e6edf3} .s{fill:#9da7b1}}
</style>"""


def draw() -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{LABEL}">'
    panels = [line for index, text in enumerate(PLANS) for line in _panel(text, LEFT + PANEL * index)]
    return "\n".join([head, STYLE, *_task(), *panels, "</svg>"]) + "\n"


def _task() -> Iterator[str]:
    yield _text(0, 28, "h", "one task, four plans")
    yield _text(0, TOP + 16, "h", "a global batch")
    yield _text(0, TOP + 38, "s", "samples ↓   tokens →")
    yield _text(0, TOP + 58, "s", "color: the rank that")
    yield _text(0, TOP + 76, "s", "trains on them")
    y = TOP + CELL * SAMPLES + 50
    yield _text(0, y, "h", "each rank keeps")
    yield _text(0, y + 22, "s", "weights and optimizer")
    yield _text(0, y + 40, "s", "states: full copy")
    yield _text(0, y + 58, "s", "or shard")
    yield f'<path class="rule" d="M{LEFT - 18} 14V{HEIGHT - 14}"/>'


def _panel(text: str, x: int) -> Iterator[str]:
    """A plan: the tokens of a batch in the colours of the ranks that train on them, then what each rank keeps."""
    plan = Plan.from_dict({key: int(value) for key, value in (word.split("=") for word in text.split())})
    yield _text(x, 28, "p", text)
    for rank in range(RANKS):
        for sample, token in _tokens(plan, rank):
            yield _rect(x + token * CELL, TOP + sample * CELL, CELL - 1, CELL - 1, f"c{rank}")
    layouts = planned_layouts(plan)
    y = TOP + CELL * SAMPLES + 26
    yield _text(x + 52, y, "s", "weights")
    yield _text(x + 112, y, "s", "states")
    for rank in range(RANKS):
        row = y + 12 + 28 * rank
        yield _text(x, row + 12, "s", f"rank {rank}")
        for left, layout in ((x + 52, layouts.weight), (x + 112, layouts.state)):
            for part in range(RANKS):
                has_it = layout != SPLIT or part == rank
                yield _rect(left + part * (PART + 1), row, PART, 15, f"c{rank}" if has_it else "none")


def _tokens(plan: Plan, rank: int) -> Iterator[tuple[int, int]]:
    """The samples and tokens that a rank trains on."""
    place = plan.mesh.coordinates(rank)
    ranges = plan.context_spec.token_ranges(TOKENS)[place["cp"]] if plan.cp > 1 else ((0, TOKENS),)
    for sample in range(*shard_range(0, SAMPLES, plan.dp, place["dp"])):
        for part in ranges:
            yield from ((sample, token) for token in range(*part))


def _rect(x: int, y: int, width: int, height: int, kind: str) -> str:
    return f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}"/>'


def _text(x: int, y: int, kind: str, text: str) -> str:
    return f'<text class="{kind}" x="{x}" y="{y}">{text}</text>'


if __name__ == "__main__":
    Path(__file__).with_name("one-task.svg").write_text(draw(), encoding="utf-8")
