"""The pipeline axis: its steps, its messages and its bubble.

    python -m bench.pipeline [--only steps edges bubble] [--turns 15] [--microbatches 4 8]
                             [--schedules 1f1b gpipe interleaved zero-bubble]

busy    a stage's own forwards and backwards of a step, without waiting; the slower rank's
bound   busy · (1 + the formula's bubble), and the rest of a step's own work, such as updates
formula (p − 1)/(v · m), v being the stages of a rank; of zero-bubble (p − 1)(F + I − 2W)/(m(F + I + W)), at least 0,
        with W in place of 2W where only p microbatches may be in flight
bubble  (step − rest − busy)/busy, busy being the mean over ranks

Steps are compared with those of `torch.distributed.pipelining` and with their bound, messages with gloo's. float32,
AdamW, two ranks with one thread each, 8 samples of 256 tokens in a step. The ways take turns, each with some steps or
messages; a ratio is taken inside each turn, then the median over turns. "half of turns" is the middle half of ratios.
Law: Fourfold and torch reach the same losses, and messages arrive as they were sent, else this command fails.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from statistics import mean, median
from typing import NamedTuple

from bench.data_parallel import middle_half
from bench.measurement import describe_machine, format_table
from bench.pipeline_worker import COMPUTES, EDGE, FOURFOLD, GLOO, SHARED, TORCH, Setting
from bench.process_world import World

MODULE = "bench.pipeline_worker"
RANKS = 2
WARMUP = 3  # steps before the first turn: memory is reserved and the optimizers' states are made
STEPS = 3  # of a turn
TOLERANCE = 1e-4
TORCH_TARGET, BOUND_TARGET, EDGE_TARGET, BUBBLE_TARGET = 0.95, 1.03, 0.2, 0.03
EDGE_BYTES = (2**16, 2**18, 2**20, 2**22)
SCHEDULES = ["1f1b", "gpipe", "interleaved", "zero-bubble"]


def bubble_formula(setting: Setting, seconds: Mapping[str, float]) -> float:
    """The bubble that the schedule must have. `seconds`: of the computes, by verb."""
    if setting.schedule != "zero-bubble":
        return (RANKS - 1) / (setting.num_chunks * setting.microbatches)
    forward, backward_input, backward_weight = (
        seconds[verb] for verb in ("forward", "backward-input", "backward-weight")
    )
    fillings = {None: 1, RANKS: 1, 2 * RANKS - 1: 2}[setting.max_in_flight]  # of H1, and of H2
    gap = max(0.0, forward + backward_input - fillings * backward_weight)
    return (RANKS - 1) * gap / (setting.microbatches * (forward + backward_input + backward_weight))


class StepTurn(NamedTuple):
    """A turn of one configuration: medians over its steps. `busy`, `rest`: by rank; empty if they are not known."""

    seconds: float
    busy: list[float]
    rest: list[float]
    losses: list[float]
    by_verb: dict[str, float]
    """Of the busier rank's computes, the seconds of each verb."""

    @classmethod
    def of(cls, replies: Sequence[dict]) -> "StepTurn":
        # Each step's slower rank: that rank's wait for the other is no part of the pipeline's own time.
        seconds = median(max(pair) for pair in zip(*(reply["seconds"] for reply in replies), strict=True))
        busy = [[sum(step.get(verb, 0.0) for verb in COMPUTES) for step in reply["busy"]] for reply in replies]
        rest = [[sum(step.values()) for step in reply["busy"]] for reply in replies]
        busier = max(replies, key=lambda reply: sum(sum(step.values()) for step in reply["busy"]))
        by_verb = {verb: median(step.get(verb, 0.0) for step in busier["busy"]) for verb in COMPUTES}
        return cls(
            seconds,
            [median(each) for each in busy],
            [median(all_ - own for all_, own in zip(*pair, strict=True)) for pair in zip(rest, busy, strict=True)],
            replies[-1]["losses"],
            by_verb,
        )

    def bound(self, setting: Setting) -> float:
        """The least time of this turn's steps: the busy time, the formula's bubble, and the rest."""
        return max(self.busy) * (1 + bubble_formula(setting, self.by_verb)) + max(self.rest)

    @property
    def bubble(self) -> float:
        """The share of a step's computes that ranks have waited."""
        return (self.seconds - mean(self.rest)) / mean(self.busy) - 1


def run_turns(names: Sequence[str], case: str, setting: argparse.Namespace) -> list[dict[str, StepTurn]]:
    """The turns of one case, by configuration; turns begin with a different one each."""
    with ExitStack() as stack:
        worlds = {
            name: stack.enter_context(World(name, case, num_ranks=RANKS, limit_seconds=setting.limit, module=MODULE))
            for name in names
        }
        turns = [{name: StepTurn.of(world.run_turn(untimed=WARMUP, timed=1)) for name, world in worlds.items()}]
        for number in range(setting.turns):
            first = number % len(names)
            # One untimed step in each turn: it finds other configurations' data in the caches.
            turns.append(
                {
                    name: StepTurn.of(worlds[name].run_turn(untimed=1, timed=STEPS))
                    for name in [*names[first:], *names[:first]]
                }
            )
            print(f"\r{case}: {number + 1} of {setting.turns} turns", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return turns


def _check_losses(case: str, turns: Sequence[dict[str, StepTurn]]) -> None:
    ours, peers = ([loss for turn in turns for loss in turn[name].losses] for name in (FOURFOLD, TORCH))
    largest = max(abs(one - other) / abs(other) for one, other in zip(ours, peers, strict=True))
    if largest > TOLERANCE:
        raise SystemExit(f"{case}: losses differ by {largest:.1e} of their value")


def _judged(value: float, target: float) -> str:
    return f"{target:.2f}, {'met' if value <= target else 'missed'}"


def _ratio_columns(ratios: list[float], target: float) -> list[str]:
    return [f"{median(ratios):.3f}", middle_half(ratios), _judged(median(ratios), target)]


def measure_steps(setting: argparse.Namespace) -> None:
    peers = [title for peer in ("torch", "bound") for title in (f"/ {peer}", "(half of turns)", "target")]
    rows = [["GPT, batch 8", "microbatches", "ms a step", *peers]]
    for schedule in setting.schedules:
        for microbatches in setting.microbatches:
            case = f"gpt8,{schedule},{microbatches}"
            turns = run_turns((FOURFOLD, TORCH), case, setting)
            _check_losses(case, turns)
            ours = [turn[FOURFOLD] for turn in turns[1:]]
            against = [turn[FOURFOLD].seconds / turn[TORCH].seconds for turn in turns[1:]]
            bounds = [turn.seconds / turn.bound(Setting.of(case)) for turn in ours]
            row = [schedule, str(microbatches), f"{1e3 * median(turn.seconds for turn in ours):.1f}"]
            rows.append([*row, *_ratio_columns(against, TORCH_TARGET), *_ratio_columns(bounds, BOUND_TARGET)])
    print(format_table(rows), flush=True)


def measure_bubble(setting: argparse.Namespace) -> None:
    rows = [["4 equal layers", "microbatches", "bubble", "(half of turns)", "formula", "difference"]]
    for schedule in setting.schedules:
        for microbatches in setting.microbatches:
            case = f"layers,{schedule},{microbatches}"
            turns = run_turns((FOURFOLD,), case, setting)
            bubbles = [turn[FOURFOLD].bubble for turn in turns[1:]]
            formula = median(bubble_formula(Setting.of(case), turn[FOURFOLD].by_verb) for turn in turns[1:])
            difference = median(bubbles) - formula
            judged = f"{difference:+.3f}, {'met' if abs(difference) <= BUBBLE_TARGET else 'missed'}"
            row = [schedule, str(microbatches), f"{median(bubbles):.3f}", middle_half(bubbles), f"{formula:.3f}"]
            rows.append([*row, judged])
    print(format_table(rows), flush=True)


def measure_edges(setting: argparse.Namespace) -> None:
    rows = [["message of", "", "us", "/ gloo", "(half of turns)", "target"]]
    ways = (SHARED, GLOO)
    with World(f"{FOURFOLD}-{EDGE}", "-", num_ranks=RANKS, limit_seconds=setting.limit, module=MODULE) as world:
        for num_bytes in EDGE_BYTES:
            turns: list[dict[str, float]] = []
            for number in range(setting.turns + 1):
                seconds = {}
                for way in ways if number % 2 else ways[::-1]:
                    times = max(4, min(20, 2**24 // num_bytes))
                    replies = world.request({"way": way, "bytes": num_bytes, "times": times})
                    if any(reply["value"] != 1.0 for reply in replies):
                        raise SystemExit(f"{way}: another message than was sent")
                    seconds[way] = max(reply["seconds"] for reply in replies)
                turns.append(seconds)
            for way in ways:
                ratios = [turn[way] / turn[GLOO] for turn in turns[1:]]
                microseconds = f"{1e6 * median(turn[way] for turn in turns[1:]):.0f}"
                judged = _judged(median(ratios), EDGE_TARGET) if way == SHARED else ""
                ratio = [f"{median(ratios):.3f}", middle_half(ratios), judged]
                rows.append([f"{num_bytes / 1024:,.0f} KiB", way, microseconds, *ratio])
    print(format_table(rows), flush=True)


MEASUREMENTS = {"edges": measure_edges, "steps": measure_steps, "bubble": measure_bubble}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(MEASUREMENTS), choices=list(MEASUREMENTS))
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--microbatches", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--schedules", nargs="+", default=SCHEDULES, choices=SCHEDULES)
    parser.add_argument("--limit", type=int, default=900, help="seconds for a case")
    setting = parser.parse_args(arguments)
    print(describe_machine(), flush=True)
    for part in setting.only:
        MEASUREMENTS[part](setting)


if __name__ == "__main__":
    main()
