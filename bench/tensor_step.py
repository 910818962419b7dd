"""The step of the tensor axis: against torch's `parallelize_module` (DTensor), and against parts without messages.

    python -m bench.tensor_step [--cases gpt8 gpt1] [--turns 15] [--ranks 2]

The GPT of `bench/models.py`, float32, AdamW, one thread per rank; attention and MLP by column and row, the embedding
and the head by vocabulary, in all configurations. They take turns in one run, each with some steps; a ratio is taken
inside each turn, then the median over turns. "alone": each rank trains a model of its share of the weights and sends
nothing, which is the lower bound. "half of turns" is the middle half of the ratios.
Law: Fourfold and torch reach the same losses, else this command fails.
"""

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from statistics import median

from bench.data_parallel import Turn, middle_half
from bench.measurement import describe_machine, format_table
from bench.process_world import World
from bench.tensor_step_worker import ALONE, CONFIGURATIONS, DTENSOR, FOURFOLD

STEPS = {"gpt8": 3, "gpt1": 8}
TARGETS = {DTENSOR: 0.80, ALONE: 1.05}
"""By peer: the ratio to its time that two ranks of Fourfold should reach."""
WARMUP = 3  # steps before the first turn: memory is reserved and the optimizers' states are made
TOLERANCE = 1e-4


def measure(case: str, *, ranks: int, num_turns: int, limit: int) -> list[dict[str, Turn]]:
    """The turns of one case, by configuration; turns begin with a different one each."""
    names = list(CONFIGURATIONS)
    with ExitStack() as stack:
        worlds = {
            name: stack.enter_context(
                World(name, case, num_ranks=ranks, limit_seconds=limit, module="bench.tensor_step_worker")
            )
            for name in names
        }
        turns = [{name: Turn.from_replies(world.run_turn(untimed=WARMUP, timed=1)) for name, world in worlds.items()}]
        for number in range(num_turns):
            first = number % len(names)
            order = names[first:] + names[:first]
            # One untimed step in each turn: it finds other configurations' data in the caches.
            turns.append(
                {name: Turn.from_replies(worlds[name].run_turn(untimed=1, timed=STEPS.get(case, 3))) for name in order}
            )
            print(f"\r{case}: {number + 1} of {num_turns} turns", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    _check_losses(case, turns)
    return turns[1:]


def _check_losses(case: str, turns: Sequence[dict[str, Turn]]) -> None:
    ours, peers = ([loss for turn in turns for loss in turn[name].losses] for name in (FOURFOLD, DTENSOR))
    largest = max(abs(one - other) / abs(other) for one, other in zip(ours, peers, strict=True))
    if largest > TOLERANCE:
        raise SystemExit(f"{case}: losses differ by {largest:.1e} of their value")
    print(f"{case}: losses of {FOURFOLD} and {DTENSOR} differ by at most {largest:.1e} of their value")


def format_rows(case: str, turns: Sequence[dict[str, Turn]], *, ranks: int) -> list[list[str]]:
    rows = []
    for name in CONFIGURATIONS:
        row = [case, name, f"{1e3 * median(turn[name].seconds for turn in turns):.1f}"]
        for peer, target in TARGETS.items():
            ratios = [turn[name].seconds / turn[peer].seconds for turn in turns]
            is_judged = name == FOURFOLD and ranks == 2
            judged = f"{target:.2f}, {'met' if median(ratios) <= target else 'missed'}" if is_judged else ""
            row += [f"{median(ratios):.3f}", middle_half(ratios), judged]
        rows.append(row)
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(STEPS), choices=list(STEPS))
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--limit", type=int, default=900, help="seconds for a case")
    setting = parser.parse_args(arguments)
    print(describe_machine())
    peers = [title for peer in TARGETS for title in (f"/ {peer}", "(half of turns)", "target")]
    rows = [["case", "", "ms a step", *peers]]
    for case in setting.cases:
        turns = measure(case, ranks=setting.ranks, num_turns=setting.turns, limit=setting.limit)
        rows += format_rows(case, turns, ranks=setting.ranks)
    print(format_table(rows), flush=True)


if __name__ == "__main__":
    main()
