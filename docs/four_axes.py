"""Draws docs/four-axes.svg: python docs/four_axes.py

Law: the numbers of the ranks come from Mesh; nothing is numbered by hand.
"""

from collections.abc import Iterator
from pathlib import Path

from fourfold.words.mesh import AXES, Mesh

MESH = Mesh(pp=2, dp=2, cp=2, tp=2)
WIDTH, HEIGHT = 960, 372
PANEL, TOP, SIDE = 236, 60, 112
TITLES = {"pp": "layers", "dp": "samples", "cp": "tokens of a sample", "tp": "weights of a layer"}
SENT = {
    "pp": "activations, their gradients",
    "dp": "gradients of the weights",
    "cp": "keys, values; gradients",
    "tp": "activations, in every layer",
}
STYLE = """<style>
text{font-family:system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
.h{font-size:15px;font-weight:600;fill:#24292f} .s{font-size:13px;fill:#57606a} .m{text-anchor:middle}
.w{font-size:13px;font-weight:600;fill:#fff}
.c0{fill:#3b6ea5} .c1{fill:#9a6616}
@media (prefers-color-scheme: dark){.h{fill:#e6edf3} .s{fill:#9da7b1}}
</style>"""


def draw() -> str:
    label = "What each of the four axes divides and sends, and the sixteen ranks of a mesh with two ranks on each axis"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">'
    return "\n".join([head, STYLE, *_panels(), *_ranks(), "</svg>"]) + "\n"


def _panels() -> Iterator[str]:
    """One for each axis: what its two indices hold."""
    for number, axis in enumerate(AXES):
        x = 24 + number * PANEL
        yield _text(x, 24, "h", f"{axis} divides")
        yield _text(x, 44, "s", TITLES[axis])
        for part in range(4):
            index = part // 2
            if axis in ("pp", "dp"):  # layers and samples lie one below the other
                yield _rect(x, TOP + part * SIDE / 4, SIDE, SIDE / 4 - 3, index)
            else:
                yield _rect(x + part * SIDE / 4, TOP, SIDE / 4 - 3, SIDE - 3, index)
        yield _text(x, TOP + SIDE + 18, "s", "sends")
        yield _text(x, TOP + SIDE + 36, "s", SENT[axis])


def _ranks() -> Iterator[str]:
    """The ranks of the mesh: a row for each index on pp, coloured by it."""
    yield _text(24, 242, "h", "pp 2 × dp 2 × cp 2 × tp 2 = 16 ranks")
    for rank in range(MESH.size):
        at = MESH.coordinates(rank)
        x = 92 + at["dp"] * 430 + at["cp"] * 206 + at["tp"] * 98
        y = 276 + at["pp"] * 46
        yield _rect(x, y, 92, 36, at["pp"])
        yield _text(x + 46, y + 23, "w m", f"rank {rank}")
        if at["pp"] == 0:
            yield _text(x + 46, 266, "s m", f"dp {at['dp']} cp {at['cp']} tp {at['tp']}")
        if rank == MESH.peers(rank, "dp", "cp", "tp")[0]:
            yield _text(24, y + 23, "s", f"pp {at['pp']}")


def _rect(x: float, y: float, width: float, height: float, index: int) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="1" class="c{index}"/>'


def _text(x: float, y: float, kind: str, text: str) -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}">{text}</text>'


if __name__ == "__main__":
    Path(__file__).with_name("four-axes.svg").write_text(draw())
