"""Steps predicted, from what calibration has measured, next to the same steps measured; and bytes.

calibrated   before: blocks, messages and updates of the task, never one of these plans
measured     of the steps of a turn, each the median over turns, their mean: with local steps one of them averages
             weights. Every round starts all processes anew, plan by plan
error        predicted over measured, less one
answer       the plan with the least predicted step; a baseline is one of those that a planner always prices
Law: nothing that is predicted has seen a step of the plan that it is compared with.

    python -m bench.predict [--cases gpt,mlp,lm] [--plans dp2,tp2,…] [--rounds 3] [--turns 5] [--steps 10] [--memory]
    python -m bench.predict --quick --cases lm --plans dp2,pp2-1f1b         # does it run?
"""

import argparse
import itertools
import json
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import NamedTuple

from bench.measurement import MB, PeakMemory, describe_machine, format_table
from bench.predict_worker import CALIBRATE, parse_plan, parse_task
from bench.process_world import World
from fourfold.plan.lowering import lower
from fourfold.plan.memory import has_unbucketed_grads
from fourfold.plan.plan import Plan
from fourfold.plan.topology import Topology
from fourfold.planner.predict.calibrated_prices import CalibratedPrices
from fourfold.planner.predict.calibration import Calibration, decode_calibration
from fourfold.planner.predict.memory import predict_memory
from fourfold.planner.predict.prediction import MemoryParts, Prediction
from fourfold.planner.predict.step import predict_step
from fourfold.planner.task_facts.source import TaskFacts
from fourfold.testing.network_namespaces import Hosts
from fourfold.words.errors import FourfoldError

MODULE = "bench.predict_worker"
TASKS = {"gpt": "bench/predict_tasks.py:gpt", "mlp": "bench/predict_tasks.py:mlp", "lm": "lm clip=none"}
RATE = "100mbit"
TWO, FOUR, HOSTS = "two ranks", "four ranks on two cores", "two hosts at 100 Mbit/s"
TARGETS = {TWO: 0.10, FOUR: 0.15, HOSTS: 0.15}
MEAN_TARGET, TAU_TARGET, ANSWER_TARGET = 0.05, 0.85, 0.05
LOCAL_STEPS = 10
WARM_UP = 4  # the launch order is fixed after the first step, and memory no longer grows after the second


class Row(NamedTuple):
    """A plan by name: where it runs, its fields, and whether it is a baseline."""

    setting: str
    fields: Mapping[str, object]
    is_baseline: bool = False


ROWS = {
    "dp2": Row(TWO, {"dp": 2}, is_baseline=True),
    "dp2-zero1": Row(TWO, {"dp": 2, "zero": 1}, is_baseline=True),
    "dp2-zero2": Row(TWO, {"dp": 2, "zero": 2}, is_baseline=True),
    "dp2-early": Row(TWO, {"dp": 2, "update": "in_backward"}),
    "dp2-bf16sums": Row(TWO, {"dp": 2, "reduce_dtype": "bf16"}),
    "dp2-powersgd": Row(TWO, {"dp": 2, "codec": "powersgd"}),
    "dp2-local": Row(TWO, {"dp": 2, "sync": "local", "local_steps": LOCAL_STEPS}),
    "cp2-zigzag": Row(TWO, {"cp": 2}),
    "cp2-ulysses": Row(TWO, {"cp": 2, "ulysses": 2}),
    "tp2": Row(TWO, {"tp": 2}, is_baseline=True),
    "pp2-gpipe": Row(TWO, {"pp": 2, "microbatches": 4, "schedule": "gpipe"}),
    "pp2-1f1b": Row(TWO, {"pp": 2, "microbatches": 4, "schedule": "1f1b"}, is_baseline=True),
    "pp2-interleaved": Row(TWO, {"pp": 2, "microbatches": 4, "schedule": "interleaved", "interleave": 2}),
    "pp2-zerobubble": Row(TWO, {"pp": 2, "microbatches": 4, "schedule": "zero-bubble"}),
    "dp2-tp2": Row(FOUR, {"dp": 2, "tp": 2}),
    "dp2-pp2": Row(FOUR, {"dp": 2, "pp": 2, "microbatches": 4}),
    "dp2-cp2": Row(FOUR, {"dp": 2, "cp": 2}),
    "tp2-pp2": Row(FOUR, {"tp": 2, "pp": 2, "microbatches": 4}),
    "hosts-zero0": Row(HOSTS, {"dp": 2}, is_baseline=True),
    "hosts-zero3": Row(HOSTS, {"dp": 2, "zero": 3}, is_baseline=True),
    "hosts-topk": Row(HOSTS, {"dp": 2, "codec": "topk"}),
}


@dataclass(frozen=True)
class Options:
    """How much is run."""

    cases: tuple[str, ...]
    plans: tuple[str, ...]
    rounds: int
    turns: int
    steps: int
    limit: int
    memory: bool
    stored: Path | None


@dataclass
class Measured:
    """What was measured of a plan: seconds of the steps of each turn, busy seconds by verb, and bytes."""

    turns: list[list[float]] = field(default_factory=list)
    busy: dict[str, float] = field(default_factory=dict)
    kept_bytes: float = 0.0
    peak: PeakMemory = field(default_factory=PeakMemory)

    @property
    def seconds(self) -> float:
        """Of a step: the mean over the steps of a turn, of each the median over turns."""
        return mean(median(steps) for steps in zip(*self.turns, strict=True))

    @property
    def spread(self) -> float:
        """By how much the mean steps of turns differ, of the step."""
        means = [mean(turn) for turn in self.turns]
        return (max(means) - min(means)) / self.seconds


class Compared(NamedTuple):
    """A plan, predicted and measured."""

    name: str
    predicted: Prediction
    measured: Measured

    @property
    def seconds(self) -> float:
        return self.measured.seconds

    @property
    def error(self) -> float:
        return self.predicted.seconds / self.seconds - 1


def fields_of(case: str, name: str) -> dict[str, object]:
    """The fields of a plan for a case. The MLP's layers are split in pairs, which no boundary may part."""
    fields = dict(ROWS[name].fields)
    if case == "mlp" and fields.get("tp") and fields.get("pp"):
        fields["stages"] = "2,4"
    return fields


def configuration(case: str, name: str) -> str:
    pairs = [f"{key} = {json.dumps(value)}" for key, value in fields_of(case, name).items()]
    return ";".join(["fourfold", *pairs])


def applies(case: str, name: str) -> bool:
    """Vectors have no tokens to divide."""
    return not (case == "mlp" and "cp" in ROWS[name].fields)


def num_ranks(setting: str) -> int:
    return 4 if setting == FOUR else 2


def topology_of(setting: str) -> Topology:
    hosts = 2 if setting == HOSTS else 1
    return Topology.regular(hosts=hosts, ranks_per_host=num_ranks(setting) // hosts)


class Bench:
    """The measurements of one case in one setting."""

    def __init__(self, case: str, setting: str, options: Options, hosts: Hosts | None) -> None:
        self._case, self._setting, self._options, self._hosts = case, setting, options, hosts

    def _world(self, configuration: str) -> World:
        return World(
            configuration,
            TASKS[self._case],
            num_ranks=num_ranks(self._setting),
            limit_seconds=self._options.limit,
            module=MODULE,
            hosts=self._hosts,
        )

    def calibrate(self) -> Calibration:
        """What calibration finds now, or what it found before (`--stored`)."""
        name = f"{self._case}-{self._setting.replace(' ', '-').replace('/', '-')}.json"
        with tempfile.TemporaryDirectory(prefix="fourfold-predict-") as temporary:
            path = (self._options.stored or Path(temporary)) / name
            if not path.exists():
                with self._world(CALIBRATE) as world:
                    reply = world.request({"file": str(path)})[0]
                left_out = f"; left out: {'; '.join(reply['left_out'])}" if reply["left_out"] else ""
                print(f"  calibrated in {reply['seconds']:.0f} s{left_out}", flush=True)
            return decode_calibration(path.read_bytes(), where=name)

    def measure(self, names: Sequence[str]) -> dict[str, Measured]:
        found = {name: Measured() for name in names}
        for number in range(self._options.rounds):
            for name in names:
                _show_status(f"{self._case}, {self._setting}: round {number + 1}, {name}")
                self._measure_plan(name, found[name])
        _show_status("")
        return found

    def _measure_plan(self, name: str, into: Measured) -> None:
        steps = self._options.steps
        with self._world(configuration(self._case, name)) as world:
            # Turns of local steps begin after an average.
            world.run_turn(untimed=WARM_UP, timed=max(1, steps - WARM_UP))
            for _ in range(self._options.turns):
                replies = world.run_turn(untimed=0, timed=steps)
                into.turns.append([max(step) for step in zip(*(reply["seconds"] for reply in replies), strict=True)])
                busy = replies[0]["busy"]
                into.busy = {verb: median(each.get(verb, 0.0) for each in busy) for verb in busy[-1]}
                into.kept_bytes = sum(reply["kept"] for reply in replies)
            if self._options.memory:
                world.run_turn(untimed=0, timed=steps, sample=into.peak.sample)


def predict(source: TaskFacts, prices: CalibratedPrices, plan: Plan, setting: str) -> Prediction:
    blueprint = lower(plan, source.specs(plan), topology_of(setting), source.update_spec)
    return predict_step(blueprint, source, prices)


def predict_memory_of(source: TaskFacts, plan: Plan, topology: Topology) -> tuple[MemoryParts, ...]:
    """By place on the pipeline axis: what one rank holds."""
    return predict_memory(lower(plan, source.specs(plan), topology, source.update_spec), source)


def compare(case: str, options: Options) -> list[Compared]:
    """All plans of a case."""
    source, compared = TaskFacts(parse_task(TASKS[case])), []
    for setting in (TWO, FOUR, HOSTS):
        names = [name for name in options.plans if ROWS[name].setting == setting and applies(case, name)]
        if not names:
            continue
        print(f"\n{case}, {setting}", flush=True)
        with ExitStack() as stack:
            hosts = stack.enter_context(Hosts(2, rate=RATE)) if setting == HOSTS else None
            bench = Bench(case, setting, options, hosts)
            prices = CalibratedPrices(bench.calibrate())
            plans = {name: parse_plan(configuration(case, name)) for name in names}
            predicted = {name: predict(source, prices, plan, setting) for name, plan in plans.items()}
            measured = bench.measure(names)
        here = [Compared(name, predicted[name], measured[name]) for name in names]
        print(describe(here, TARGETS[setting], with_memory=options.memory), flush=True)
        compared += here
    return compared


def describe(rows: Iterable[Compared], target: float, *, with_memory: bool) -> str:
    titles = [
        "",
        "predicted ms",
        "measured ms",
        "spread",
        "error",
        "",
        "compute",
        "comm",
        "bubble",
        "exposed",
        "update",
    ]
    titles += ["other", "kept MB", "counted"] + (["PSS MB"] if with_memory else [])
    return format_table([titles, *(_row(each, target, with_memory=with_memory) for each in rows)])


def _row(each: Compared, target: float, *, with_memory: bool) -> list[str]:
    terms = each.predicted.terms
    parts = (
        terms.compute + terms.recompute,
        terms.tensor + terms.context,
        terms.bubble,
        terms.exposed,
        terms.update,
        terms.overhead,
    )
    cells = [
        each.name,
        f"{1e3 * each.predicted.seconds:.1f}",
        f"{1e3 * each.seconds:.1f}",
        f"{each.measured.spread:.0%}",
        f"{each.error:+.1%}",
        "within" if abs(each.error) <= target else "missed",
        *(f"{1e3 * part:.1f}" for part in parts),
        f"{each.measured.kept_bytes / MB:.1f}",
        f"{each.measured.kept_bytes / kept_bytes(each.predicted.plan, each.predicted.by_stage):.3f}",
    ]
    return cells + ([f"{each.measured.peak.pss_bytes / MB:.0f}"] if with_memory else [])


def kept_bytes(plan: Plan, by_stage: Sequence[MemoryParts]) -> float:
    """What all ranks hold from step to step; gradients without buffers are freed before the next one."""
    has_buffers = not has_unbucketed_grads(plan)
    places = [part.weights + part.states + part.gradients * has_buffers for part in by_stage]
    return sum(places) * plan.mesh.size / len(places)


def kendall_tau(pairs: Sequence[tuple[float, float]], least: float) -> float | None:
    """Of (predicted, measured): agreeing less disagreeing pairs over all whose measured steps differ by `least`."""
    agreeing = disagreeing = 0
    for one, other in itertools.combinations(pairs, 2):
        if abs(one[1] - other[1]) / max(one[1], other[1]) <= least:
            continue
        if (one[0] - other[0]) * (one[1] - other[1]) > 0:
            agreeing += 1
        else:
            disagreeing += 1
    total = agreeing + disagreeing
    return (agreeing - disagreeing) / total if total else None


def summarize(case: str, compared: Sequence[Compared]) -> list[str]:
    """Mean error, ranking, and the answer, by setting: plans of different machines do not compete."""
    lines = []
    for setting in (TWO, FOUR, HOSTS):
        rows = [each for each in compared if ROWS[each.name].setting == setting]
        if not rows:
            continue
        error = mean(abs(each.error) for each in rows)
        tau = kendall_tau([(each.predicted.seconds, each.seconds) for each in rows], error)
        answer = min(rows, key=lambda each: each.predicted.seconds)
        best = min(rows, key=lambda each: each.seconds)
        baselines = [each for each in rows if ROWS[each.name].is_baseline]
        behind = max((answer.seconds / each.seconds for each in baselines), default=0.0)
        lines.append(
            f"{case}, {setting}: mean error {error:.1%} (target {MEAN_TARGET:.0%}),"
            f" tau {'–' if tau is None else f'{tau:.2f}'} (target {TAU_TARGET}),"
            f" answer {answer.name} {answer.seconds / best.seconds:.3f} of the best ({best.name}),"
            f" {behind:.3f} of the best baseline"
        )
    return lines


def _show_status(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def names_of(choices: Iterable[str]) -> Callable[[str], tuple[str, ...]]:
    """A parser of some of these names, with commas between them."""
    known = tuple(choices)

    def parse(text: str) -> tuple[str, ...]:
        chosen = tuple(text.split(","))
        if unknown := set(chosen) - set(known):
            raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: need some of {', '.join(known)}")
        return chosen

    return parse


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=names_of(TASKS), default=tuple(TASKS))
    parser.add_argument("--plans", type=names_of(ROWS), default=tuple(ROWS))
    parser.add_argument("--rounds", type=int, default=3, help="fresh starts of all processes")
    parser.add_argument("--turns", type=int, default=5, help="turns of a round")
    parser.add_argument("--steps", type=int, default=LOCAL_STEPS, help="steps of a turn")
    parser.add_argument("--limit", type=int, default=300, help="seconds after which a world is ended")
    parser.add_argument("--memory", action="store_true", help="sample the memory of processes, in turns of their own")
    parser.add_argument("--stored", type=Path, help="a folder of calibrations: read, or written where they are absent")
    parser.add_argument("--quick", action="store_true", help="one round of two turns: does it run?")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    arguments = vars(parser.parse_args())
    file, quick = arguments.pop("json"), arguments.pop("quick")
    if quick:
        arguments |= {"rounds": 1, "turns": 2}
    options = Options(**arguments)
    if options.stored is not None:
        options.stored.mkdir(parents=True, exist_ok=True)
    head = describe_machine()
    print(head, flush=True)
    by_case: dict[str, list[Compared]] = {}
    try:
        for case in options.cases:
            by_case[case] = compare(case, options)
    except FourfoldError as error:
        print(f"\n{error}", flush=True)
        return 1
    lines = [line for case, compared in by_case.items() for line in summarize(case, compared)]
    print("\n" + "\n".join(lines))
    if file:
        record = {case: [_record(each) for each in compared] for case, compared in by_case.items()}
        file.write_text(json.dumps({"machine": head, "cases": record, "summary": lines}, indent=1) + "\n")
    return 0


def _record(each: Compared) -> dict[str, object]:
    return {
        "plan": each.name,
        "predicted": each.predicted.seconds,
        "terms": each.predicted.terms._asdict(),
        "measured": each.measured.turns,
        "busy": each.measured.busy,
        "kept_bytes": each.measured.kept_bytes,
    }


if __name__ == "__main__":
    sys.exit(main())
