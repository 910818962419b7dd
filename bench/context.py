"""The context axis: attention around a ring, by all-gather, by exchanging heads (Ulysses), and in one process.

    python -m bench.context [--lengths 1024 4096 16384] [--turns 3] [--ranks 2] [--bidirectional]

Forward and backward of one layer, float32, one thread per rank. The layouts take turns in one run; a ratio is taken
inside each turn, then the median over turns. "processor" is the CPU time of the slowest rank, which other load hardly
changes. "waited" is the waiting time of the rank that waited least; other ranks wait longer if speeds are unequal.
"hidden" is the fraction of an exchange, timed with nothing to compute, that no rank waited for.
Law: all layouts give the same sums, else nothing is printed.
"""

import argparse
import math
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from bench.context_worker import ALONE
from bench.measurement import describe_machine, format_table
from bench.process_world import World

LAYOUTS = ("zigzag shared", "plain shared", "gather shared", "ulysses shared", "zigzag gloo", "gather gloo", ALONE)
BASE_LAYOUT = "gather shared"
OVERLAPPING = ("zigzag shared", "zigzag gloo")


class LengthResults:
    """Measurements at one length, by layout."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {layout: [] for layout in LAYOUTS}
        self.cpu_seconds: dict[str, list[float]] = {layout: [] for layout in LAYOUTS}
        self.waiting_seconds: dict[str, list[float]] = {layout: [] for layout in LAYOUTS}
        self.exchange_seconds: dict[str, list[float]] = {layout: [] for layout in OVERLAPPING}

    def ratio(self, layout: str, base: str) -> float:
        return statistics.median(a / b for a, b in zip(self.seconds[layout], self.seconds[base], strict=True))

    def overlap_ratio(self, layout: str) -> str:
        if layout not in self.exchange_seconds:
            return ""
        shares = [
            1 - waited / alone
            for waited, alone in zip(self.waiting_seconds[layout], self.exchange_seconds[layout], strict=True)
        ]
        return f"{max(0.0, statistics.median(shares)):.2f}"


def run_turn(world: World, length: LengthResults, job: dict[str, Any], first: int, expected: list[list[float]]) -> None:
    """Run every layout once; each turn begins with a different one."""
    for layout in [*LAYOUTS, *LAYOUTS][first % len(LAYOUTS) :][: len(LAYOUTS)]:
        if layout in OVERLAPPING:
            alone = world.request({**job, "layout": layout, "exchange": True})
            length.exchange_seconds[layout].append(max(reply["seconds"] for reply in alone))
        replies = world.request({**job, "layout": layout})
        length.seconds[layout].append(max(reply["seconds"] for reply in replies))
        length.cpu_seconds[layout].append(max(reply["processor"] for reply in replies))
        length.waiting_seconds[layout].append(min(reply["waited"] for reply in replies))
        expected.append([sum(reply[name] for reply in replies) for name in "oqkv"])
        if not all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(expected[0], expected[-1], strict=True)):
            raise SystemExit(f"{layout}: sums {expected[-1]} differ from those of the first layout, {expected[0]}")


def format_rows(length: int, found: LengthResults) -> list[list[str]]:
    return [
        [
            f"{length:,}",
            layout,
            f"{statistics.median(found.seconds[layout]) * 1000:.1f}",
            f"{found.ratio(layout, BASE_LAYOUT):.3f}",
            f"{found.ratio(layout, ALONE):.3f}",
            f"{statistics.median(found.cpu_seconds[layout]) * 1000:.1f}",
            f"{statistics.median(found.waiting_seconds[layout]) * 1000:.1f}",
            found.overlap_ratio(layout),
        ]
        for layout in LAYOUTS
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--size", type=int, default=64, help="of a head")
    parser.add_argument("--bidirectional", action="store_true")
    parser.add_argument("--limit", type=int, default=1800, help="seconds")
    setting = parser.parse_args(arguments)
    print(describe_machine())
    titles = ["length", "layout", "ms", "/ gather", "/ one process", "processor, ms", "waited, ms", "hidden"]
    with World(
        "sequence", "-", num_ranks=setting.ranks, limit_seconds=setting.limit, module="bench.context_worker"
    ) as world:
        for length in setting.lengths:
            job = {
                "length": length,
                "heads": setting.heads,
                "size": setting.size,
                "causal": not setting.bidirectional,
            }
            run_turn(world, LengthResults(), job, 0, [])  # untimed: memory is reserved and touched
            found = LengthResults()
            for number in range(setting.turns):
                run_turn(world, found, job, number, [])
                print(f"\r{length}: turn {number + 1} of {setting.turns}", end="", file=sys.stderr, flush=True)
            print(file=sys.stderr)
            print(format_table([titles, *format_rows(length, found)]), flush=True)


if __name__ == "__main__":
    main()
