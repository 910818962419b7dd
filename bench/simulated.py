"""The simulator against the runtime: steps simulated at measured prices, over the measured steps.

own prices  each step is simulated at what each of its actions cost on each rank, waits taken out; the median of the
            simulated steps over the median of the measured ones
at medians  one step at the median cost of each action, over the median step: too short where ranks delay each other in
            turn
Law: prices and steps are of one run, so the ratio tells how well programs, dependencies and clock describe the runtime.

    python -m bench.simulated [--steps 30] [--transports shared,gloo] [--zeros 0,1,2,3] [--updates after,in_forward]
"""

import argparse
import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from bench.measurement import describe_machine
from fourfold.plan.cost import measure_costs
from fourfold.plan.step_comparison import (
    measured_seconds,
    simulated_seconds,
    simulated_step_seconds,
    simulated_timeline,
)
from fourfold.plan.trace_file import Trace, decode_trace
from fourfold.words.text_table import align_columns

TARGETS = {"shared": 0.05, "gloo": 0.10}
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


def record(folder: Path, plan: Sequence[str], steps: int) -> Trace:
    """The trace of two ranks that train by a plan: its transport, zero and update."""
    path = folder / "trace.json"
    worker = str(ROOT / "bench" / "simulated_worker.py")
    command = [sys.executable, "-m", "fourfold", "run", "-n", "2", worker, *plan, str(steps), str(path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}
    done = subprocess.run(command, cwd=folder, env=environment, timeout=LIMIT_SECONDS, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(plan)} failed\n{done.stdout}{done.stderr}")
    return decode_trace(path.read_bytes())


def compare(trace: Trace) -> Comparison:
    """The steps of a trace, measured and simulated."""
    costs = measure_costs(trace)
    return Comparison(
        [measured_seconds(trace, step) for step in trace.steps],
        [simulated_step_seconds(trace, step) for step in trace.steps],
        simulated_seconds(simulated_timeline(trace, costs), costs),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    for name, values in {"transports": TARGETS, "zeros": ZEROS, "updates": UPDATES}.items():
        parser.add_argument(f"--{name}", type=lambda text: text.split(","), default=list(values))
    parser.add_argument("--keep", type=Path, help="a folder for the traces")
    options = parser.parse_args()
    print(describe_machine())
    print(f"lm of width 128 and 4 layers on two ranks, {options.steps} steps, each simulated at its own prices")
    rows: list[tuple[str, ...]] = [TITLES]
    num_within = 0
    with tempfile.TemporaryDirectory(prefix="fourfold-bench-") as folder:
        for plan in itertools.product(options.transports, options.zeros, options.updates):
            trace = record(Path(folder), plan, options.steps)
            if options.keep:
                (Path(folder) / "trace.json").rename(options.keep / f"{'-'.join(plan)}.json")
            compared, limit = compare(trace), TARGETS[plan[0]]
            num_within += compared.is_within(limit)
            rows.append(compared.row(plan, limit))
            print(f"  {len(rows) - 1:2}  {' '.join(plan)}: {compared.ratio:.3f}", file=sys.stderr, flush=True)
    print("\n".join(align_columns(rows, "<><>>>><>>")))
    print(f"{num_within} of {len(rows) - 1} plans within the target")


if __name__ == "__main__":
    main()
