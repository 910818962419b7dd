"""Draws docs/pipeline-axis.svg: python docs/pipeline_axis.py

Law: the stages are those of the built-in language model, the times those of the simulated schedule; nothing is placed
by hand.
"""

from collections.abc import Iterator
from pathlib import Path

import torch

from fourfold.axes.pipeline.rules.division import StageSpec
from fourfold.axes.pipeline.rules.schedules import compute_actions
from fourfold.axes.pipeline.rules.spec import EQUAL_COSTS
from fourfold.axes.pipeline.work.chain import map_stages
from fourfold.plan.simulate import Timeline, simulate
from fourfold.tasks import lm
from fourfold.words.mesh import Mesh
from fourfold.words.program import Verb

STAGES, MICROBATCHES, LAYERS = 4, 6, 8
WIDTH, HEIGHT, LEFT = 960, 330, 92
# The boxes of the stages, then the rows of the timeline.
BOX_TOP, BOX, GAP = 44, 192, 48
ROWS_TOP, ROW = 172, 32
SIZES = {"width": 64, "heads": 4, "kv_heads": 2}
STYLE = """<style>
text{font-family:system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
.h{font-size:15px;font-weight:600;fill:#24292f} .s{font-size:13px;fill:#57606a} .m{text-anchor:middle}
.w{font-size:12px;font-weight:600;fill:#fff}
.f{fill:#3b6ea5} .b{fill:#9a6616} .i{fill:none;stroke:#8c959f;stroke-dasharray:3 3} .box{fill:none;stroke:#8c959f}
.go{fill:none;stroke-width:1.5} .gf{stroke:#3b6ea5} .gb{stroke:#c98a2b} .tf{fill:#3b6ea5} .tb{fill:#c98a2b}
@media (prefers-color-scheme: dark){.h{fill:#e6edf3} .s{fill:#9da7b1} .gf{stroke:#7fb0e6} .tf{fill:#7fb0e6}}
</style>"""


def draw() -> str:
    label = (
        "A model divided into four stages that pass activations on and gradients back, and when each stage computes "
        "the forward and the backward of six microbatches with 1F1B"
    )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">'
    tips = "".join(
        f'<marker id="t{kind}" viewBox="0 0 6 6" refX="5" refY="3" markerWidth="6" markerHeight="6" orient="auto">'
        f'<path d="M0 0 6 3 0 6z" class="t{kind}"/></marker>'
        for kind in "fb"
    )
    return "\n".join([head, STYLE, f"<defs>{tips}</defs>", *_stages(), *_timeline(), "</svg>"]) + "\n"


def _stages() -> Iterator[str]:
    """What each stage has of the model, and what neighbours send each other."""
    with torch.device("meta"):
        model = lm.LanguageModel(layers=LAYERS, **SIZES)
    found = map_stages(model, StageSpec(num_stages=STAGES, num_places=STAGES))
    ends = {0: found.chain.before, STAGES - 1: found.chain.behind}
    yield _text(24, 24, "h", "the model, in stages")
    for stage, blocks in enumerate(found.blocks):
        x = 24 + stage * (BOX + GAP)
        shown = f"blocks {blocks.start} to {blocks.stop - 1}"
        own = [*ends[0], shown] if stage == 0 else [shown, *ends.get(stage, ())]
        yield _rect(x, BOX_TOP, BOX, 62, "box")
        yield _text(x + BOX / 2, BOX_TOP + 25, "h m", f"stage {stage}")
        yield _text(x + BOX / 2, BOX_TOP + 47, "s m", ", ".join(own))
        if stage < STAGES - 1:
            yield _arrow(x + BOX + 6, x + BOX + GAP - 6, BOX_TOP + 22, "f")
            yield _arrow(x + BOX + GAP - 6, x + BOX + 6, BOX_TOP + 42, "b")
    for x, kind, text in ((240, "f", "activations"), (370, "b", "gradients of activations")):
        yield _arrow(x, x + 26, 19, kind)
        yield _text(x + 34, 24, "s", text)


def _timeline() -> Iterator[str]:
    """A row for each stage: forwards, backwards, and the time between them in which it waits."""
    timeline = _simulated()
    unit = (WIDTH - 24 - LEFT) / max(times[-1].end for times in timeline.values())
    y = ROWS_TOP - 20
    yield _text(24, y, "h", f"a step with {MICROBATCHES} microbatches, 1F1B")
    for x, kind, text in ((330, "f", "forward"), (424, "b", "backward"), (530, "i", "waits: the bubble")):
        yield _rect(x, y - 12, 14, 14, kind)
        yield _text(x + 21, y, "s", text)
    for stage, times in timeline.items():
        top, at = ROWS_TOP + stage * ROW, 0.0
        yield _text(24, top + 19, "s", f"stage {stage}")
        for action, start, end in times:
            if start > at:
                yield _rect(LEFT + at * unit, top + 3, (start - at) * unit - 2, ROW - 12, "i")
            kind = "f" if action.verb is Verb.FORWARD else "b"
            yield _rect(LEFT + start * unit, top, (end - start) * unit - 2, ROW - 5, kind)
            yield _text(LEFT + (start + end) / 2 * unit - 1, top + 18, "w m", str(action.index))
            at = end
    yield _text(LEFT, ROWS_TOP + STAGES * ROW + 16, "s", "time →  a number is that of the microbatch")


def _simulated() -> Timeline:
    lists = compute_actions("1f1b", pp=STAGES, microbatches=MICROBATCHES)
    program = {stage: tuple(actions) for stage, actions in enumerate(lists)}
    return simulate(program, lambda _, action: EQUAL_COSTS.of(action), mesh=Mesh(pp=STAGES))


def _arrow(start: float, stop: float, y: float, kind: str) -> str:
    return f'<path d="M{start:g} {y:g}H{stop:g}" class="go g{kind}" marker-end="url(#t{kind})"/>'


def _rect(x: float, y: float, width: float, height: float, kind: str) -> str:
    return f'<rect x="{x:.4g}" y="{y:g}" width="{width:.4g}" height="{height:g}" rx="2" class="{kind}"/>'


def _text(x: float, y: float, kind: str, text: str) -> str:
    return f'<text x="{x:.4g}" y="{y:g}" class="{kind}">{text}</text>'


if __name__ == "__main__":
    Path(__file__).with_name("pipeline-axis.svg").write_text(draw())
