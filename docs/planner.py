"""Draws docs/planner.svg: python docs/planner.py

One step of a run, as it was predicted before it and as it was measured: `docs/planner_step.json`, which
`python docs/planner.py runs/NAME` writes anew from a run's prediction.json and trace.json.

Law: every block is an action of the file; nothing is drawn by hand.
"""

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fourfold.plan.rank_program import lane_of
from fourfold.plan.simulate import Timeline
from fourfold.planner.predict.prediction import decode_prediction, timeline_by_rank
from fourfold.trace.step_comparison import measured_timeline, median_step
from fourfold.trace.trace_file import decode_trace
from fourfold.words.trace_events import COMPUTE_LANE, SEND_LANE

STEP = Path(__file__).with_name("planner_step.json")
PREDICTED, MEASURED = "predicted", "measured"
WIDTH, LEFT, RIGHT, TOP = 960, 150, 24, 64
ROW, BLOCK, GAP = 26, 18, 18
LETTER = 6.6
STYLE = """<style>
text{font-family:system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
.h{font-size:15px;font-weight:600;fill:#24292f} .s{font-size:13px;fill:#57606a} .e{text-anchor:end}
.m{text-anchor:middle}
.i{font-size:11px;font-weight:600;fill:#fff;text-anchor:middle}
.F{fill:#4a65ac} .B{fill:#432c76} .R{fill:#c27a02} .U{fill:#32662d} .M{fill:#7a868f} .G{fill:#6b0537}
.grid{stroke:#d0d7de}
@media (prefers-color-scheme: dark){.h{fill:#e6edf3} .s{fill:#9da7b1} .grid{stroke:#30363d}
.F{fill:#7fa4e6} .B{fill:#9d8fe0}
.R{fill:#b78809} .U{fill:#5a9a4f} .M{fill:#98a3ae} .G{fill:#f3c4ff} .i{fill:#10141a}}
</style>"""
KINDS = {"F": "forward", "B": "backward", "R": "sum of gradients", "M": "loss, norm", "U": "update"}
COLOURS = {"I": "B", "W": "B"}  # by a verb's letter, where it has the colour of another


def draw() -> str:
    step = json.loads(STEP.read_text(encoding="utf-8"))
    rows = [(when, lane, blocks) for when in (PREDICTED, MEASURED) for lane, blocks in step[when]["lanes"].items()]
    end = max(stop for _, _, blocks in rows for _, _, stop in blocks)
    scale = (WIDTH - LEFT - RIGHT) / end
    height = TOP + ROW * len(rows) + GAP + 34
    label = f"One step on {step['ranks']} ranks, predicted and measured, action by action"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{label}">'
    return "\n".join([head, STYLE, *_legend(step), *_axis(end, scale, height), *_rows(rows, scale), "</svg>"]) + "\n"


def _legend(step: dict[str, Any]) -> Iterator[str]:
    milliseconds = f"predicted {step[PREDICTED]['ms']:.1f} ms, measured {step[MEASURED]['ms']:.1f} ms"
    yield _text(LEFT, 20, "h", f"{step['title']}: {milliseconds}")
    names = {
        name[0] for when in (PREDICTED, MEASURED) for blocks in step[when]["lanes"].values() for name, _, _ in blocks
    }
    x = LEFT
    for letter, name in KINDS.items():
        if letter in names:
            yield f'<rect x="{x:.1f}" y="34" width="11" height="11" rx="2" class="{letter}"/>'
            yield _text(x + 17, 44, "s", name)
            x += LETTER * len(name) + 45


def _rows(rows: list[tuple[str, str, list[Any]]], scale: float) -> Iterator[str]:
    for number, (when, lane, blocks) in enumerate(rows):
        y = TOP + ROW * number + (GAP if when == MEASURED else 0)
        yield _text(LEFT - 10, y + 13, "s e", f"{when}, {lane}")
        for name, start, stop in blocks:
            wide = max((stop - start) * scale, 1.0)
            x = LEFT + start * scale
            colour = COLOURS.get(name[0], name[0])
            yield f'<rect x="{x:.1f}" y="{y}" width="{wide:.1f}" height="{BLOCK}" rx="2" class="{colour}"/>'
            if wide > LETTER * len(name) + 6:
                yield _text(x + wide / 2, y + 13, "i", name)


def _axis(end: float, scale: float, height: float) -> Iterator[str]:
    y = height - 18
    power = 10 ** math.floor(math.log10(end / 8))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor * 8 >= end)
    for number in range(int(end / step) + 1):
        tick, text = number * step, f"{number * step:g}"
        x = LEFT + tick * scale
        yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 8}" y2="{y - 14}" class="grid"/>'
        yield _text(x, y, "s m", text if tick else "0 ms")


def _text(x: float, y: float, style: str, text: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{style}">{text}</text>'


def record(run: Path) -> None:
    """Write the step of a run, that of median length; messages between stages are left out: waits are the gaps."""
    recorded = decode_prediction((run / "prediction.json").read_bytes())
    trace = decode_trace((run / "trace.json").read_bytes())
    predicted = timeline_by_rank(recorded.prediction)
    measured = measured_timeline(trace, median_step(trace))
    step = {
        "title": "One step of lm on two ranks",
        "ranks": recorded.prediction.plan.mesh.size,
        PREDICTED: _lanes(predicted),
        MEASURED: _lanes({rank: measured[rank] for rank in predicted}),
    }
    STEP.write_text(json.dumps(step, indent=1) + "\n", encoding="utf-8")


def _lanes(timeline: Timeline) -> dict[str, Any]:
    lanes: dict[str, list[Any]] = {}
    for rank, actions in timeline.items():
        for timed in actions:
            if timed.end > timed.start and lane_of(timed.action) != SEND_LANE:
                row = [str(timed.action), round(timed.start * 1e3, 3), round(timed.end * 1e3, 3)]
                lane = lane_of(timed.action)
                name = f"rank {rank}" if lane == COMPUTE_LANE else f"rank {rank}, {lane}"
                lanes.setdefault(name, []).append(row)
    return {"ms": max(stop for blocks in lanes.values() for _, _, stop in blocks), "lanes": lanes}


if __name__ == "__main__":
    if len(sys.argv) > 1:
        record(Path(sys.argv[1]))
    STEP.with_name("planner.svg").write_text(draw(), encoding="utf-8")
