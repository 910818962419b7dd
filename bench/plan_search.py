"""How long the planner searches: plans for GPTs on DGX A100, in pure Python.

considered  plans that were estimated
bound       by how much a plan that was not simulated may be faster than the fastest one, at most
Law: what is timed is all of `decide`: baselines, search, simulation of the best, reasons.

    python -m bench.plan_search [--cases 18B,175B] [--profile]
"""

import argparse
import cProfile
import dataclasses
import pstats
import time
from typing import NamedTuple

from bench.measurement import describe_machine
from fourfold.plan.ask import Ask
from fourfold.planner.predict.clusters import RooflinePrices, load_cluster
from fourfold.planner.predict.gpt_facts import GptFacts
from fourfold.planner.search.answer import decide
from fourfold.words.terminal_text import align_columns


class Case(NamedTuple):
    """A GPT of Megatron's tables (2104.04473), its global batch and devices; `aim`: seconds that a search may take."""

    layers: int
    width: int
    heads: int
    batch_size: int
    devices: int
    aim: float


CASES = {
    "7B": Case(36, 4096, 32, 512, 128, 10.0),
    "18B": Case(40, 6144, 48, 1024, 256, 10.0),
    "175B": Case(96, 12288, 96, 1536, 1024, 60.0),
}
DTYPE = "bfloat16"


def search(case: Case) -> tuple[str, ...]:
    """The row of a case, after its name."""
    layers, width, heads = case.layers, case.width, case.heads
    source = GptFacts(layers=layers, width=width, heads=heads, batch_size=case.batch_size, precision=DTYPE)
    cluster = dataclasses.replace(load_cluster("dgx-a100"), hosts=case.devices // 8)
    wall, processor = time.perf_counter(), time.process_time()
    decision = decide(Ask(devices=case.devices), source, RooflinePrices(cluster, dtype=DTYPE), cluster)
    wall, processor = time.perf_counter() - wall, time.process_time() - processor
    plan = ", ".join(decision.answer.plan.to_toml().splitlines()[1:])
    figures = (f"{wall:.1f} s", f"{processor:.1f} s", f"{case.aim:.0f} s", str(decision.num_considered))
    return (*figures, f"{decision.bound:.1%}", f"{decision.answer.seconds:.2f} s", plan)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=lambda text: text.split(","), default=list(CASES))
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    print(describe_machine())
    rows: list[tuple[str, ...]] = [
        ("GPT", "devices", "wall", "processor", "aim", "considered", "bound", "step", "plan")
    ]
    profile = cProfile.Profile()
    for name in options.cases:
        row = profile.runcall(search, CASES[name]) if options.profile else search(CASES[name])
        rows.append((name, str(CASES[name].devices), *row))
    print("\n".join(align_columns(rows, "<>>>>>>><")))
    if options.profile:
        pstats.Stats(profile).sort_stats("cumtime").print_stats(30)


if __name__ == "__main__":
    main()
