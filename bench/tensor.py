"""The tensor axis: its all-reduce of activations against gloo's.

    python -m bench.tensor [--sizes 65536 1048576 2097152 4194304] [--turns 15] [--ranks 2]

float32, one thread per rank. The ways take turns in one run, each with some sums in a row; a ratio is taken inside each
turn, then the median over turns. "from the buffer" sums what was computed where peers read it. "half of turns" is the
middle half of the ratios.
Law: all ways give the same sums, else nothing is printed.
"""

import argparse
import statistics
import sys
from collections.abc import Sequence

from bench.data_parallel import middle_half
from bench.measurement import describe_machine, format_table
from bench.process_world import World
from bench.tensor_worker import BUFFER, GLOO, SHARED

WAYS = (SHARED, BUFFER, GLOO)
TARGETS = {2**16: 0.05, 2**20: 0.12, 2**21: 0.12, 2**22: 0.12}
"""By bytes: the ratio to gloo's time that two ranks should reach."""


def run_turn(world: World, num_bytes: int, first: int, *, ranks: int) -> dict[str, float]:
    """Seconds of the slowest rank for one sum, by way; each turn begins with a different way."""
    seconds: dict[str, float] = {}
    times = max(4, min(20, 2**24 // num_bytes))
    for way in [*WAYS, *WAYS][first % len(WAYS) :][: len(WAYS)]:
        replies = world.request({"way": way, "bytes": num_bytes, "times": times})
        if any(reply["sum"] != ranks * (ranks + 1) / 2 for reply in replies):
            raise SystemExit(f"{way}: sums {[reply['sum'] for reply in replies]}")
        seconds[way] = max(reply["seconds"] for reply in replies)
    return seconds


def format_rows(num_bytes: int, turns: Sequence[dict[str, float]], *, ranks: int) -> list[list[str]]:
    rows = []
    for way in WAYS:
        ratios = [turn[way] / turn[GLOO] for turn in turns]
        target = TARGETS.get(num_bytes) if ranks == 2 and way != GLOO else None
        reached = (
            "" if target is None else f"{target:.2f}, {'met' if statistics.median(ratios) <= target else 'missed'}"
        )
        microseconds = 1e6 * statistics.median(turn[way] for turn in turns)
        ratio = f"{statistics.median(ratios):.3f}"
        rows.append([f"{num_bytes / 1024:,.0f} KiB", way, f"{microseconds:.0f}", ratio, middle_half(ratios), reached])
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(TARGETS), help="bytes of a tensor")
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--limit", type=int, default=600, help="seconds")
    setting = parser.parse_args(arguments)
    print(describe_machine())
    titles = ["all-reduce of", "", "us", "/ gloo", "(half of turns)", "target"]
    rows = []
    with World(
        "tensor", "-", num_ranks=setting.ranks, limit_seconds=setting.limit, module="bench.tensor_worker"
    ) as world:
        for num_bytes in setting.sizes:
            run_turn(world, num_bytes, 0, ranks=setting.ranks)  # untimed: memory is reserved and touched
            turns = [run_turn(world, num_bytes, number, ranks=setting.ranks) for number in range(setting.turns)]
            print(f"\r{num_bytes} bytes: {len(turns)} turns", end="", file=sys.stderr, flush=True)
            rows += format_rows(num_bytes, turns, ranks=setting.ranks)
    print(file=sys.stderr)
    print(format_table([titles, *rows]), flush=True)


if __name__ == "__main__":
    main()
