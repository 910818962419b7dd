"""The simulator against the runtime: steps simulated at measured prices, over the measured steps.

own prices  each step is simulated at what each of its actions cost on each rank, waits taken out; the median of the
            simulated steps over the median of the measured ones
at medians  one step at the median cost of each action, over the median step: too short where ranks delay each other in
            turn
others      two stages: each half of the steps at the median costs of the other half, as a forecast has them

Law: prices and steps are of one run, so the ratio tells how well programs, dependencies and clock describe the runtime.

    python -m bench.simulated [--steps 30] [--transports shared,gloo] [--zeros 0,1,2,3] [--updates after,in_forward]
                              [--schedules gpipe,1f1b,interleaved,zero-bubble]
"""

import argparse
import dataclasses
import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from bench.measurement import describe_machine
from fourfold.plan.decode import format_pair
from fourfold.trace.cost import measure_costs
from fourfold.trace.step_comparison import (
    measured_seconds,
    simulated_seconds,
    simulated_step_seconds,
    simulated_timeline,
)
from fourfold.trace.trace_file import Trace, decode_trace
from fourfold.words.terminal_text import align_columns

TARGETS = {"shared": 0.05, "gloo": 0.10}
PIPELINE_TARGET = 0.10
SCHEDULES = ["gpipe", "1f1b", "interleaved", "zero-bubble"]
UPDATES, ZEROS = ("after", "in_backward", "in_forward"), ("0", "1", "2", "3")
TITLES = ("transport", "zero", "update", "measured", "simulated", "ratio", "target", "", "steps within", "at medians")
LIMIT_SECONDS = 300.0
ROOT = Path(__file__).parents[1]


class Comparison(NamedTuple):
    """A plan's steps, in seconds."""

    measured: list[float]
    simulated: list[float]
    at_median_prices: float

    @property
    def ratio(self) -> float:
        return median(self.simulated) / median(self.measured)

    def is_within(self, limit: float) -> bool:
        return abs(self.ratio - 1) <= limit

    def row(self, plan: Sequence[str], limit: float) -> tuple[str, ...]:
        pairs = list(zip(self.simulated, self.measured, strict=True))
        return (
            *plan,
            f"{median(self.measured) * 1e3:.1f} ms",
            f"{median(self.simulated) * 1e3:.1f} ms",
            f"{self.ratio:.3f}",
            f"± {limit:.0%}",
            "within" if self.is_within(limit) else "missed",
            f"{sum(abs(a / b - 1) <= limit for a, b in pairs)} of {len(pairs)}",
            f"{self.at_median_prices / median(self.measured):.3f}",
        )


def record(folder: Path, fields: Mapping[str, object], steps: int) -> Trace:
    """The trace of two ranks that train by a plan."""
    path = folder / "trace.json"
    worker = str(ROOT / "bench" / "simulated_worker.py")
    plan = ";".join(format_pair(name, value) for name, value in fields.items())
    command = [sys.executable, "-m", "fourfold", "run", "-n", "2", worker, plan, str(steps), str(path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}
    done = subprocess.run(command, cwd=folder, env=environment, timeout=LIMIT_SECONDS, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{plan} failed\n{done.stdout}{done.stderr}")
    return decode_trace(path.read_bytes())


def compare(trace: Trace) -> Comparison:
    """The steps of a trace, measured and simulated."""
    costs = measure_costs(trace)
    return Comparison(
        [measured_seconds(trace, step) for step in trace.steps],
        [simulated_step_seconds(trace, step) for step in trace.steps],
        simulated_seconds(simulated_timeline(trace, costs), costs),
    )


def at_costs_of_others(trace: Trace) -> Comparison:
    """The steps of a trace, measured, and simulated at the median costs of the steps of the other half."""
    measured, simulated = [], []
    for parity in range(2):
        own = trace.steps[parity::2]
        others = dataclasses.replace(trace, events=tuple(event for event in trace.events if event.step not in own))
        costs = measure_costs(others)
        measured += [measured_seconds(trace, step) for step in own]
        simulated += [simulated_seconds(simulated_timeline(trace, costs, step), costs) for step in own]
    return Comparison(measured, simulated, median(simulated))


def measure_pipelines(schedules: Sequence[str], steps: int) -> None:
    rows: list[tuple[str, ...]] = [("schedule", "microbatches", *TITLES[3:9])]
    with tempfile.TemporaryDirectory(prefix="fourfold-bench-") as folder:
        for schedule, microbatches in itertools.product(schedules, (4, 8)):
            interleave = 2 if schedule == "interleaved" else 1
            fields = {"pp": 2, "schedule": schedule, "microbatches": microbatches, "interleave": interleave}
            compared = at_costs_of_others(record(Path(folder), fields, steps))
            rows.append(compared.row((schedule, str(microbatches)), PIPELINE_TARGET)[:8])
    print("\n".join(align_columns(rows, "<>>>><<>")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    for name, values in {"transports": TARGETS, "zeros": ZEROS, "updates": UPDATES}.items():
        parser.add_argument(f"--{name}", type=lambda text: text.split(","), default=list(values))
    parser.add_argument("--schedules", type=lambda text: text.split(","), default=SCHEDULES)
    parser.add_argument("--keep", type=Path, help="a folder for the traces")
    options = parser.parse_args()
    print(describe_machine())
    print(f"lm of width 128 and 4 layers on two ranks, {options.steps} steps, each simulated at its own prices")
    rows: list[tuple[str, ...]] = [TITLES]
    num_within = 0
    with tempfile.TemporaryDirectory(prefix="fourfold-bench-") as folder:
        for plan in itertools.product(options.transports, options.zeros, options.updates):
            fields = {"dp": 2, "transport": plan[0], "zero": int(plan[1]), "update": plan[2]}
            trace = record(Path(folder), fields, options.steps)
            if options.keep:
                (Path(folder) / "trace.json").rename(options.keep / f"{'-'.join(plan)}.json")
            compared, limit = compare(trace), TARGETS[plan[0]]
            num_within += compared.is_within(limit)
            rows.append(compared.row(plan, limit))
            print(f"  {len(rows) - 1:2}  {' '.join(plan)}: {compared.ratio:.3f}", file=sys.stderr, flush=True)
    print("\n".join(align_columns(rows, "<><>>>><>>")))
    print(f"{num_within} of {len(rows) - 1} plans within the target")
    print("two stages, each step simulated at the median costs of the other half of the steps")
    measure_pipelines(options.schedules, options.steps)


if __name__ == "__main__":
    main()
