"""Draws docs/context-axis.svg: python docs/context_axis.py

Law: token ranges, tiles and work come from `fourfold.axes.context.rules.layout`; nothing is drawn by hand.
"""

from collections.abc import Iterator
from pathlib import Path

from fourfold.axes.context.rules.layout import ContextSpec, Tile, TokenRanges, scores_per_index, tiles

RANKS, CHUNKS, CELL = 4, 8, 20
WIDTH, HEIGHT = 960, 396
TOP, HOP, GLYPH = 92, 92, 44
STYLE = """<style>
text{font-family:system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
.t{font-size:14px;fill:#24292f} .h{font-size:15px;font-weight:600;fill:#24292f} .s{font-size:13px;fill:#57606a}
.r{font-variant-numeric:tabular-nums;text-anchor:end} .m{text-anchor:middle}
.c0{fill:#3b6ea5} .c1{fill:#4f8a5b} .c2{fill:#c98a2b} .c3{fill:#8a68cc}
.none{fill:none;stroke:#8c959f;stroke-opacity:.35} .go{fill:none;stroke:#8c959f;stroke-width:1.5} .tip{fill:#8c959f}
@media (prefers-color-scheme: dark){.t,.h{fill:#e6edf3} .s{fill:#9da7b1}}
</style>"""


def draw() -> str:
    label = "Which tokens four ranks keep in plain and in zigzag order, how much each computes, and how K and V travel"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">'
    tip = (
        '<defs><marker id="tip" viewBox="0 0 6 6" refX="5" refY="3" markerWidth="6" markerHeight="6" orient="auto">'
        '<path d="M0 0 6 3 0 6z" class="tip"/></marker></defs>'
    )
    parts = [*_order("plain", 24), *_order("zigzag", 264), *_travel(528)]
    return "\n".join([head, STYLE, tip, *parts, "</svg>"]) + "\n"


def _order(ring: str, x: int) -> Iterator[str]:
    """Causal scores, queries by keys, in the colour of the rank that computes them; below, the work of each rank."""
    ranges = ContextSpec(RANKS, ring).token_ranges(CHUNKS)
    owner = {token: rank for rank, parts in enumerate(ranges) for part in parts for token in range(*part)}
    left = x + 36
    yield _text(left, 34, "h", f"{ring} order")
    yield _text(left, 58, "s", "keys →")
    yield _text(x, TOP + 12, "s", "queries ↓", turn=True)
    yield _rect(left, TOP, CHUNKS * CELL, CHUNKS * CELL, "none")
    for token in range(CHUNKS):
        at = token * CELL
        yield _rect(left + at, TOP - 18, CELL - 1, 8, f"c{owner[token]}")
        yield _rect(left - 14, TOP + at, 8, CELL - 1, f"c{owner[token]}")
        for key in range(CHUNKS):
            corner = left + key * CELL, TOP + at
            if key < token:
                yield _rect(*corner, CELL - 1, CELL - 1, f"c{owner[token]}")
            elif key == token:
                yield _half(*corner, CELL - 1, f"c{owner[token]}")
    # A long sequence, where a block on the diagonal is half the work of a full one.
    num_scores = scores_per_index(ContextSpec(RANKS, ring), CHUNKS * 1024, causal=True)
    mean = sum(num_scores) / RANKS
    for rank, scores in enumerate(num_scores):
        y = TOP + CHUNKS * CELL + 24 + 18 * rank
        yield _text(left + 44, y + 11, "s r", f"rank {rank}")
        yield _rect(left + 52, y + 1, round(48 * scores / mean), 11, f"c{rank}")
        yield _text(left + 58 + round(48 * scores / mean), y + 11, "s", f"{scores / mean:.2f}")
    yield _text(left, HEIGHT - 14, "s", "work of attention, even = 1")


def _travel(x: int) -> Iterator[str]:
    """The keys and values that a rank holds after each hop, and the half of the scores that it computes with them."""
    ranges = ContextSpec(RANKS).token_ranges(CHUNKS)
    yield _text(x, 34, "h", "K and V travel, zigzag order")
    for hop in range(RANKS):
        yield _text(x + 76 + hop * HOP + GLYPH // 2, 58, "s m", f"hop {hop}" if hop else "own")
    step = 64
    for rank in range(RANKS):
        y = TOP - 18 + rank * step
        yield _text(x, y + 27, "t", f"rank {rank}")
        for hop in range(RANKS):
            left = x + 76 + hop * HOP
            owner = (rank - hop) % RANKS  # K and V travel to higher ranks
            yield from _glyph(left, y, ranges[rank], ranges[owner], owner)
            if hop + 1 < RANKS:
                start = left + GLYPH + 5, y + GLYPH - 6
                if rank + 1 < RANKS:
                    yield _arrow(*start, left + HOP - 5, y + step + 6)
                else:
                    # The ring closes: the arrow leaves below the last rank and comes in above the first.
                    yield f'<path d="M{start[0]} {start[1]}l14 12" class="go"/>'
                    yield _arrow(left + HOP - 19, TOP - 18 - 6, left + HOP - 5, TOP - 18 + 6)
    y = HEIGHT - 54
    yield _text(x, y, "s", "A square: this rank's queries (down) by the keys that are here")
    yield _text(x, y + 20, "s", "(across), in their owner's colour. Filled is what is computed:")
    yield _text(x, y + 40, "s", "half a square at every hop, on every rank.")


def _glyph(x: int, y: int, queries: TokenRanges, keys: TokenRanges, owner: int) -> Iterator[str]:
    yield _rect(x, y, GLYPH, GLYPH, "none")
    unit = GLYPH // 2
    for tile in tiles(queries, keys, causal=True):
        yield from _tile(x, y, unit, tile, owner)


def _tile(x: int, y: int, unit: int, tile: Tile, owner: int) -> Iterator[str]:
    (top, bottom), (left, right) = tile.queries, tile.keys
    corner, colour = (x + left * unit, y + top * unit), f"c{owner}"
    if tile.causal:
        yield _half(*corner, (bottom - top) * unit, colour)
    else:
        yield _rect(*corner, (right - left) * unit, (bottom - top) * unit, colour)


def _text(x: int, y: int, kind: str, text: str, *, turn: bool = False) -> str:
    turned = f' transform="rotate(-90 {x + 12} {y})" text-anchor="end"' if turn else ""
    return f'<text x="{x + 12 if turn else x}" y="{y}" class="{kind}"{turned}>{text}</text>'


def _rect(x: int, y: int, width: int, height: int, kind: str) -> str:
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" class="{kind}"/>'


def _half(x: int, y: int, size: int, kind: str) -> str:
    return f'<path d="M{x} {y}l{size} {size}h-{size}z" class="{kind}"/>'


def _arrow(x1: int, y1: int, x2: int, y2: int) -> str:
    return f'<path d="M{x1} {y1}L{x2} {y2}" class="go" marker-end="url(#tip)"/>'


if __name__ == "__main__":
    Path(__file__).with_name("context-axis.svg").write_text(draw())
