"""Chunks of row products: the sum of one chunk travels while the next chunk is computed.

    python -m bench.tensor_chunks [--rate 1gbit|none] [--rows 512 2048] [--turns 9]

Two ranks on two hosts (network namespaces with links of a limited rate; needs root), one thread each, float32. A
product [rows, features] · [features, out] is summed whole and in chunks, which take turns in one run; a ratio is taken
inside each turn, then the median over turns. "half of turns" is the middle half of the ratios.
Law: all numbers of chunks give the same sum, else nothing is printed.
"""

import argparse
import statistics
from collections.abc import Sequence

from bench.data_parallel import middle_half
from bench.measurement import describe_machine, format_table
from bench.process_world import World
from bench.tensor_worker import GLOO
from fourfold.testing.network_namespaces import Hosts

CHUNKS = (1, 2, 4, 8)
FEATURES, OUT = 2048, 1024  # of one of two ranks


def run_turn(world: World, rows: int, first: int) -> dict[int, float]:
    """Seconds of the slowest rank for one product, by number of chunks; each turn begins with a different one."""
    seconds: dict[int, float] = {}
    for chunks in [*CHUNKS, *CHUNKS][first % len(CHUNKS) :][: len(CHUNKS)]:
        job = {"chunks": chunks, "rows": rows, "features": FEATURES, "out": OUT, "times": 3}
        replies = world.request(job)
        if any(reply["sum"] != 3 * FEATURES for reply in replies):
            raise SystemExit(f"{chunks} chunks: sums {[reply['sum'] for reply in replies]}")
        seconds[chunks] = max(reply["seconds"] for reply in replies)
    return seconds


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--rows", type=int, nargs="+", default=[128, 512, 2048], help="samples times tokens")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--limit", type=int, default=500, help="seconds")
    setting = parser.parse_args(arguments)
    print(describe_machine())
    table = [[f"sum, at {setting.rate}", "chunks", "ms", "/ whole", "(half of turns)"]]
    options = {"module": "bench.tensor_worker", "limit_seconds": setting.limit}
    rate = None if setting.rate == "none" else setting.rate
    with Hosts(2, rate=rate) as hosts, World(GLOO, "chunks", num_ranks=2, hosts=hosts, **options) as world:
        for rows in setting.rows:
            turns = [run_turn(world, rows, number) for number in range(setting.turns)]
            for chunks in CHUNKS:
                ratios = [turn[chunks] / turn[1] for turn in turns]
                milliseconds = 1e3 * statistics.median(turn[chunks] for turn in turns)
                size = f"{rows * OUT * 4 / 2**20:g} MiB"
                ratio = f"{statistics.median(ratios):.3f}"
                table.append([size, str(chunks), f"{milliseconds:.1f}", ratio, middle_half(ratios)])
    print(format_table(table))


if __name__ == "__main__":
    main()
