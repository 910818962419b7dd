"""Draws docs/feed-order.svg: python docs/feed_order.py

Law: the orders, the batches and the ranks' parts are those of `plan/`; nothing is drawn by hand.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from fourfold.orders.sample_order import GlobalOrder, SampleOrder, order_rows, shard_range
from fourfold.orders.windowed_order import WindowedOrder

NUM_SHARDS, SHARD_SIZE, WINDOW, BATCH, RANKS = 6, 8, 2, 12, 2
NUM_SAMPLES = NUM_SHARDS * SHARD_SIZE
SEED, EPOCH, DAMAGED = 0, 0, 27
WIDTH, HEIGHT, LEFT, STEP, CELL = 980, 396, 128, 17, 14
STORAGE, GLOBAL, WINDOWED, PARTS, READS, STEPS = 34, 94, 154, 236, 300, 330
STYLE = """<style>
text{font-family:system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
.h{font-size:14px;font-weight:600;fill:#24292f} .s{font-size:12.5px;fill:#57606a} .m{text-anchor:middle}
.c0{fill:#2f5f95} .c1{fill:#6f9bc8} .c2{fill:#2f7f6a} .c3{fill:#7db8a4} .c4{fill:#b87522} .c5{fill:#dfb069}
.bad{fill:none;stroke:#b3372e;stroke-width:1.6}
.line{fill:none;stroke:#8c959f;stroke-width:1.3} .cut{stroke-dasharray:4 3}
.read{fill:#8c959f;fill-opacity:.32}
.step{fill:#2f5f95;fill-opacity:.85} .wait{fill:none;stroke:#b87522;stroke-width:1.5}
.in{font-size:12.5px;font-weight:600;fill:#fff;text-anchor:middle} .on{font-size:12.5px;fill:#57606a;text-anchor:middle}
@media (prefers-color-scheme: dark){.h{fill:#e6edf3} .s,.on{fill:#9da7b1}}
</style>"""


def draw() -> str:
    label = "Samples of six files, shuffled over all files or in windows of two, and their batches on two data ranks"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">'
    return "\n".join([head, STYLE, *_storage(), *_orders(), *_parts(), *_times(), "</svg>"]) + "\n"


def _storage() -> Iterator[str]:
    yield _text(16, STORAGE + 12, "h", "storage")
    yield from _cells(STORAGE, range(NUM_SAMPLES))
    for shard in range(NUM_SHARDS):
        yield _text(_x(shard * SHARD_SIZE + SHARD_SIZE / 2), STORAGE - 8, "s m", f"shard {shard}")


def _windowed() -> WindowedOrder:
    return WindowedOrder([SHARD_SIZE] * NUM_SHARDS, WINDOW)


def _ids(order: SampleOrder) -> list[int]:
    return order_rows(order, SEED, EPOCH, 0, NUM_SAMPLES).tolist()


def _orders() -> Iterator[str]:
    yield _text(16, GLOBAL + 12, "h", "global")
    yield from _cells(GLOBAL, _ids(GlobalOrder(NUM_SAMPLES)))
    yield _text(LEFT, GLOBAL - 8, "s", "every sample may come at any position")
    yield _text(16, WINDOWED + 12, "h", "windowed")
    yield from _cells(WINDOWED, _ids(_windowed()))
    size = WINDOW * SHARD_SIZE
    for start in range(0, NUM_SAMPLES, size):
        shards = " and ".join(map(str, _windowed().shards_of(SEED, EPOCH, start, start + size)))
        yield _text(_x(start + size / 2), WINDOWED - 8, "s m", f"window of shards {shards}")
        if start:
            yield f'<path d="M{_x(start) - 1.5:g} {WINDOWED - 20}v38" class="line cut"/>'


def _parts() -> Iterator[str]:
    """The batches of the windowed order, and which part of each a rank reads."""
    yield _text(16, PARTS + 12, "h", "batches")
    yield from _cells(PARTS, _ids(_windowed()), damaged=DAMAGED)
    for start in range(0, NUM_SAMPLES, BATCH):
        yield f'<path d="M{_x(start)} {PARTS - 22}v-5H{_x(start + BATCH) - 3}v5" class="line"/>'
        for rank in range(RANKS):
            first, last = shard_range(start, start + BATCH, RANKS, rank)
            yield _text(_x((first + last) / 2), PARTS - 8, "s m", f"rank {rank}")
    place = _ids(_windowed()).index(DAMAGED)
    yield _text(_x(place) - 4, PARTS + 32, "s", "damaged: left out, not replaced")


def _times() -> Iterator[str]:
    """Reads ahead of the steps; the first step waits."""
    yield _text(16, READS + 16, "h", "one rank")
    wait, read, step = 108, 108, 176
    for number in range(NUM_SAMPLES // BATCH):
        begin = LEFT + number * (read + 6)
        yield f'<rect x="{begin}" y="{READS}" width="{read}" height="24" rx="2" class="read"/>'
        yield _text(begin + read / 2, READS + 16, "on", f"read batch {number}")
        begin = LEFT + wait + number * (step + 3)
        yield f'<rect x="{begin}" y="{STEPS}" width="{step}" height="24" rx="2" class="step"/>'
        yield _text(begin + step / 2, STEPS + 16, "in", f"step {number}")
    yield f'<rect x="{LEFT + 1}" y="{STEPS + 1}" width="{wait - 5}" height="22" rx="2" class="wait"/>'
    yield _text(LEFT + wait / 2 - 2, STEPS + 16, "on", "data_seconds")
    x = LEFT + wait + 2 * (step + 3) - 1.5
    yield f'<path d="M{x} {STEPS - 4}v42" class="line"/>'
    state = f"state here: seed, epoch, position {2 * BATCH}. It continues on any number of ranks"
    yield _text(x, STEPS + 54, "s m", state)


def _cells(y: float, samples: Sequence[int], damaged: int | None = None) -> Iterator[str]:
    for place, sample in enumerate(samples):
        x = _x(place)
        if sample == damaged:
            yield f'<rect x="{x + 1}" y="{y + 1}" width="{CELL - 2}" height="{CELL - 2}" rx="2" class="bad"/>'
            yield f'<path d="M{x + 4} {y + 4}l6 6m0 -6l-6 6" class="bad"/>'
        else:
            shard = int(sample) // SHARD_SIZE
            yield f'<rect x="{x}" y="{y}" width="{CELL}" height="{CELL}" rx="2" class="c{shard}"/>'


def _x(place: float) -> float:
    return LEFT + place * STEP


def _text(x: float, y: float, kind: str, text: str) -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}">{text}</text>'


if __name__ == "__main__":
    Path(__file__).with_name("feed-order.svg").write_text(draw())
