"""The data axis compared with DDP, FSDP2 and DeepSpeed: step time, memory and loss of the same training.

case           a model and a batch size
configuration  a way to train it on all ranks
turn           a few steps of one configuration while the others sleep; turns rotate, A B C … B C … A
round          a new start of all processes of a case, and its turns
step time      the median over turns of the slower rank's median; ratios are taken within a turn, then their median
Law: all data-parallel configurations of a case reach the same losses, or this command fails.

    python -m bench.data_parallel [--cases gpt1,gpt8,cnn,mlp] [--only fourfold,ddp-tuned] [--rounds 2] [--json FILE]

Memory is measured in runs of its own, with one configuration on the machine at a time: reading it takes locks that
would slow a timed step, and sleeping processes would share the pages of libraries.
"""

import argparse
import importlib.util
import json
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import NamedTuple

from bench.measurement import MB, PeakMemory, describe_machine, format_table
from bench.process_world import World, WorldError

FOURFOLD_CONFIGURATIONS = (
    "fourfold",
    "fourfold-early",
    "fourfold-forward",
    "fourfold-zero1",
    "fourfold-zero1-early",
    "fourfold-zero1-forward",
    "fourfold-zero2",
    "fourfold-zero3",
)
DEEPSPEED = ("deepspeed1", "deepspeed2", "deepspeed3")
CONFIGURATIONS = (
    "ddp",
    "ddp-tuned",
    "ddp-malloc",
    "zero-torch",
    "fsdp2",
    *DEEPSPEED,
    "alone",
    *FOURFOLD_CONFIGURATIONS,
)
DEFAULT = ("ddp", "ddp-tuned", "ddp-malloc", "fsdp2", "alone", "fourfold")
LOWER_BOUND, PEER = "alone", "ddp-tuned"
# These do not use the other rank's data, or round differently (AdamW as a loop of operations, not fused).
OTHER_ARITHMETIC = (LOWER_BOUND, "ddp")
TOLERANCE = 1e-4
WARMUP = 3  # steps before the first turn: they set up optimizer state, DDP's buckets and the allocator


class Target(NamedTuple):
    """The ratios to the peer's step time and summed memory to reach."""

    step_ratio: float
    memory_ratio: float = 1.0


@dataclass(frozen=True)
class CaseSpec:
    """A case's description, the timed steps of a turn, and the targets of Fourfold's configurations."""

    text: str
    steps: int
    targets: dict[str, Target]


CASES = {
    "gpt1": CaseSpec(
        "GPT, 4.9 M parameters, 256 tokens, batch 1 per rank",
        8,
        {
            "fourfold": Target(0.86),
            "fourfold-zero1": Target(0.80),
            "fourfold-zero2": Target(0.90),
            "fourfold-zero3": Target(0.90),
        },
    ),
    "gpt8": CaseSpec("GPT, 4.9 M parameters, 256 tokens, batch 8 per rank", 3, {"fourfold": Target(1.00)}),
    "cnn": CaseSpec("CNN, 6.4 M parameters, 32×32 images, batch 16 per rank", 3, {"fourfold": Target(1.00)}),
    "mlp": CaseSpec(
        "MLP, 56.7 M parameters, batch 8 per rank",
        4,
        {
            "fourfold": Target(0.75),
            "fourfold-zero1": Target(0.58, 0.65),
            "fourfold-zero2": Target(0.90),
            "fourfold-zero3": Target(0.90),
        },
    ),
}


@dataclass(frozen=True)
class Settings:
    """How much is run."""

    configurations: tuple[str, ...]
    ranks: int
    rounds: int
    turns: int
    steps: int | None
    limit: int

    def world(self, configuration: str, case: str) -> World:
        return World(configuration, case, num_ranks=self.ranks, limit_seconds=self.limit)


@dataclass(frozen=True)
class Turn:
    """One turn of one configuration: the slower rank's times per step, losses averaged over ranks."""

    seconds: float
    user_seconds: float
    system_seconds: float
    page_faults: float
    peak_bytes: float
    others: float
    losses: list[float]

    @classmethod
    def from_replies(cls, results: Sequence[dict]) -> "Turn":
        def per_step(key: str) -> float:
            return max(result[key] / len(result["seconds"]) for result in results)

        return cls(
            seconds=max(median(result["seconds"]) for result in results),
            user_seconds=per_step("user_seconds"),
            system_seconds=per_step("system_seconds"),
            page_faults=per_step("page_faults"),
            peak_bytes=max(result["peak_bytes"] for result in results),
            others=results[0]["others"],
            losses=[sum(ranks) / len(results) for ranks in zip(*(r["losses"] for r in results), strict=True)],
        )


@dataclass
class Results:
    """All measurements of one case: the turns of all rounds, the losses of the last round."""

    turns: list[dict[str, Turn]]
    losses: dict[str, list[float]]
    memory: dict[str, PeakMemory]

    def median(self, configuration: str, field: str) -> float:
        return median(getattr(turn[configuration], field) for turn in self.turns)

    def ratios(self, configuration: str, peer: str) -> list[float]:
        return [turn[configuration].seconds / turn[peer].seconds for turn in self.turns if peer in turn]

    def max_loss_difference(self) -> float:
        """Largest relative difference of any step's loss between two configurations of the same arithmetic."""
        trained = [losses for name, losses in self.losses.items() if name not in OTHER_ARITHMETIC]
        return max(
            (abs(a - b) / max(abs(a), abs(b)) for one, two in pairwise(trained) for a, b in zip(one, two, strict=True)),
            default=0.0,
        )


def measure(case: str, setting: Settings, *, memory: bool = True) -> Results:
    """The memory pass, if wanted, then the rounds."""
    steps = setting.steps or CASES[case].steps
    measured = Results([], {}, {})
    for name in setting.configurations if memory else ():
        _show_status(f"{case}: memory of {name}")
        measured.memory[name] = PeakMemory()
        with setting.world(name, case) as world:
            world.run_turn(untimed=WARMUP, timed=2 * steps, sample=measured.memory[name].sample)
    for number in range(setting.rounds):
        _show_status(f"{case}: round {number + 1} of {setting.rounds}")
        with ExitStack() as stack:
            worlds = {name: stack.enter_context(setting.world(name, case)) for name in setting.configurations}
            _run_round(worlds, measured, steps=steps, turns=setting.turns)
    return measured


def _run_round(worlds: dict[str, World], measured: Results, *, steps: int, turns: int) -> None:
    names = list(worlds)
    measured.losses = {name: Turn.from_replies(worlds[name].run_turn(untimed=WARMUP, timed=1)).losses for name in names}
    for number in range(turns):
        first = number % len(names)
        # One untimed step in each turn: it finds other configurations' data in the caches.
        turn = {
            name: Turn.from_replies(worlds[name].run_turn(untimed=1, timed=steps))
            for name in names[first:] + names[:first]
        }
        measured.turns.append({name: turn[name] for name in names})
        for name in names:
            measured.losses[name] += turn[name].losses


def _show_status(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def describe(case: str, measured: Results, setting: Settings) -> str:
    """The table of a case, the check of its losses, and the targets."""
    names = list(measured.memory)
    num_steps = len(measured.losses[names[0]])
    titles = ["", "step ms", f"/ {PEER}", "(half of turns)", f"/ {LOWER_BOUND}", "cpu ms", "system", "PSS MB", "own MB"]
    rows = [[*titles, f"loss {num_steps}"], *(_row(name, measured) for name in names)]
    difference = measured.max_loss_difference()
    others = sorted(turn.others for turns in measured.turns for turn in turns.values())
    excluded = " and ".join(OTHER_ARITHMETIC)
    verdict = "agree" if difference <= TOLERANCE else "DISAGREE"
    lines = [
        f"{case} · {CASES[case].text} · {setting.ranks} ranks × 1 thread · {len(measured.turns)} turns",
        format_table(rows),
        f"  losses {verdict}: largest relative difference {difference:.1e} in {num_steps} steps, without {excluded}",
        f"  other processes used {median(others):.2f} cores (median of turns), {others[-1]:.2f} at most",
    ]
    # The targets are for two ranks.
    if PEER in names and setting.ranks == 2:
        reached = [
            _format_target(name, target, measured) for name, target in CASES[case].targets.items() if name in names
        ]
        lines += [f"  {line}" for line in reached]
    return "\n".join(lines)


def _row(name: str, measured: Results) -> list[str]:
    def ratio(peer: str) -> str:
        ratios = measured.ratios(name, peer)
        return f"{median(ratios):.3f}" if ratios else "–"

    memory = measured.memory[name]
    user, system = (measured.median(name, field) for field in ("user_seconds", "system_seconds"))
    return [
        name,
        f"{1e3 * measured.median(name, 'seconds'):.1f}",
        ratio(PEER),
        middle_half(measured.ratios(name, PEER)),
        ratio(LOWER_BOUND),
        f"{1e3 * (user + system):.1f}",
        f"{1e3 * system:.1f}",
        f"{memory.pss_bytes / MB:.0f}",
        f"{memory.own_bytes / MB:.0f}",
        f"{measured.losses[name][-1]:.5f}",
    ]


def middle_half(values: list[float]) -> str:
    if not values:
        return "–"
    ordered, cut = sorted(values), len(values) // 4
    return f"{ordered[cut]:.2f}–{ordered[-1 - cut]:.2f}"


def _format_target(name: str, target: Target, measured: Results) -> str:
    ratio = median(measured.ratios(name, PEER))
    share = measured.memory[name].pss_bytes / measured.memory[PEER].pss_bytes

    def format_limit(what: str, value: float, limit: float) -> str:
        return f"{what} {value:.3f} of {PEER}, target ≤ {limit:.2f}: {'reached' if value <= limit else 'missed'}"

    step, memory = format_limit("step", ratio, target.step_ratio), format_limit("memory", share, target.memory_ratio)
    return f"{name}: {step} · {memory}"


def main() -> int:
    """Returns 0, or 1 if losses disagree or a configuration does not run."""
    arguments = vars(_parser().parse_args())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leaves every `with` block: the worlds end too
    cases, file = arguments.pop("cases"), arguments.pop("json")
    chosen, absent = arguments.pop("only"), ()
    if not importlib.util.find_spec("deepspeed"):
        absent = tuple(name for name in chosen if name in DEEPSPEED)
    setting = Settings(configurations=tuple(name for name in chosen if name not in absent), **arguments)
    head, failed, record = describe_machine(), False, {}
    print(head, flush=True)
    if absent:
        print(f"left out: {', '.join(absent)} (DeepSpeed is not installed)", flush=True)
    for case in cases:
        try:
            measured = measure(case, setting)
        except WorldError as error:
            print(f"\n{error}", flush=True)
            failed = True
            continue
        _show_status("")
        print(f"\n{describe(case, measured, setting)}", flush=True)
        failed |= measured.max_loss_difference() > TOLERANCE
        record[case] = _record(measured)
    if file:
        Path(file).write_text(json.dumps({"machine": head, "cases": record}, indent=1) + "\n")
    return int(failed)


def _record(measured: Results) -> dict[str, object]:
    return {
        "turns": [{name: vars(turn) for name, turn in turns.items()} for turns in measured.turns],
        "memory": {name: vars(memory) for name, memory in measured.memory.items()},
    }


def comma_separated(choices: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """A parser of a comma-separated list of these choices."""

    def parse(text: str) -> tuple[str, ...]:
        chosen = tuple(text.split(","))
        if unknown := set(chosen) - set(choices):
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: need some of {', '.join(choices)}")
        return chosen

    return parse


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.data_parallel", description=str(__doc__).split("\n")[0])
    parser.add_argument("--cases", type=comma_separated(tuple(CASES)), default=tuple(CASES), help="comma-separated")
    parser.add_argument("--only", type=comma_separated(CONFIGURATIONS), default=DEFAULT, help="configurations")
    parser.add_argument("--rounds", type=int, default=2, help="fresh starts of all processes")
    parser.add_argument("--turns", type=int, default=6, help="turns of a round")
    parser.add_argument("--steps", type=int, help="timed steps of a turn; each case has its own default")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--limit", type=int, default=600, help="seconds after which a world is ended")
    parser.add_argument("--json", metavar="FILE", help="write all figures")
    return parser


if __name__ == "__main__":
    sys.exit(main())
