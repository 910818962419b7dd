"""Draws docs/tensor-axis.svg: python docs/tensor_axis.py

Law: the shards come from the rules of the built-in language model; nothing is drawn by hand.
"""

from collections.abc import Iterator
from pathlib import Path

import torch

from fourfold.axes.tensor.attach.module_specs import module_specs, tied_names
from fourfold.axes.tensor.rules.layout import tensor_layout
from fourfold.plan.param_spec import TensorShard
from fourfold.tasks import lm

RANKS = 2
WIDTH, HEIGHT, TOP = 960, 290, 82
GAP, SUM_GAP = 52, 122
# Pixels per output and per input feature.
TALL, WIDE = 0.5, 0.85
LAYERS = {
    "embedding": "embedding",
    "blocks.0.attention.qkv": "q, k, v",
    "blocks.0.attention.out": "out",
    "blocks.0.mlp.gate_up": "gate, up",
    "blocks.0.mlp.down": "down",
    "head": "head",
}
# After these layers outputs are summed, and before the next one its gradients are.
LEAVES = ("embedding", "blocks.0.attention.out", "blocks.0.mlp.down")
STYLE = """<style>
text{font-family:system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
.h{font-size:15px;font-weight:600;fill:#24292f} .s{font-size:13px;fill:#57606a} .m{text-anchor:middle}
.c0{fill:#3b6ea5} .c1{fill:#c98a2b}
.go{fill:none;stroke:#8c959f;stroke-width:1.5} .tip{fill:#8c959f}
@media (prefers-color-scheme: dark){.h{fill:#e6edf3} .s{fill:#9da7b1}}
</style>"""


def draw() -> str:
    label = "Which rows and columns of each weight of a language model two tensor ranks hold, and where they add"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">'
    tip = (
        '<defs><marker id="tip" viewBox="0 0 6 6" refX="5" refY="3" markerWidth="6" markerHeight="6" orient="auto">'
        '<path d="M0 0 6 3 0 6z" class="tip"/></marker></defs>'
    )
    return "\n".join([head, STYLE, tip, *_legend(), *_layers(), "</svg>"]) + "\n"


def _legend() -> Iterator[str]:
    for rank in range(RANKS):
        yield _rect(24 + 122 * rank, 14, 12, 12, rank)
        yield _text(42 + 122 * rank, 25, "s", f"tensor rank {rank}")
    yield _text(278, 25, "s", "weights: one row for each output feature, one column for each input feature")


def _layers() -> Iterator[str]:
    with torch.device("meta"):
        model = lm.LanguageModel(width=64, layers=1, heads=4, kv_heads=2)
    layout = tensor_layout(module_specs(model), tied_names(model), lm.TENSOR_RULES, RANKS)
    x = 24.0
    for name, title in LAYERS.items():
        shards = layout.shards[f"{name}.weight"]
        yield _text(x, TOP - 24, "h", title)
        yield _text(x, TOP - 7, "s", str(layout.styles[name]))
        yield from _weight(x, shards)
        x += shards[0].shape[1] * WIDE
        if name in LEAVES:
            yield from _sums(x)
        x += SUM_GAP if name in LEAVES else GAP


def _weight(x: float, shards: tuple[TensorShard, ...]) -> Iterator[str]:
    """The pieces of all ranks, where they lie in the weight."""
    for rank, shard in enumerate(shards):
        for (row, column), (rows, columns) in shard.boxes:
            corner = x + column * WIDE, TOP + row * TALL
            yield _rect(*corner, max(columns * WIDE - 1, 1), max(rows * TALL - 1, 1), rank)


def _sums(x: float) -> Iterator[str]:
    """The all-reduce of the outputs in forward, and that of their gradients in backward, from `x` on."""
    left, right = x + 12, x + SUM_GAP - 14
    for phase, y, (start, stop) in (("forward", TOP + 40, (left, right)), ("backward", TOP + 100, (right, left))):
        yield f'<path d="M{start:g} {y}H{stop:g}" class="go" marker-end="url(#tip)"/>'
        yield _text((left + right) / 2, y - 8, "s m", "all-reduce")
        yield _text((left + right) / 2, y + 18, "s m", f"in {phase}")


def _rect(x: float, y: float, width: float, height: float, rank: int) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="1" class="c{rank}"/>'


def _text(x: float, y: float, kind: str, text: str) -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}">{text}</text>'


if __name__ == "__main__":
    Path(__file__).with_name("tensor-axis.svg").write_text(draw())
