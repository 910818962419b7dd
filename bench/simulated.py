"""The simulator against the runtime: a step simulated at measured prices, over the measured step.

trace      of a run of `lm` on two ranks in which every step is sampled; the first ones are left out
simulated  the traced program at the median price of each action
Law: prices and steps are of one run, so the ratio tells how well programs, dependencies and clock describe the runtime.

    python -m bench.simulated [STEPS]
"""

import itertools
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.measurement import describe_machine
from fourfold.plan.cost import measured_timeline, median_step, simulated_timeline
from fourfold.plan.simulate import makespan
from fourfold.plan.trace_file import decode_trace
from fourfold.trainer.tracer import TRACE_FILE
from fourfold.words.text_table import align_columns

TRANSPORTS, UPDATES, ZEROS = ("shared", "gloo"), ("after", "in_backward", "in_forward"), range(4)
LIMIT_SECONDS = 300.0
ROOT = Path(__file__).parents[1]


def ratio(folder: Path, *, transport: str, zero: int, update: str, steps: int) -> tuple[float, float]:
    """Seconds of the median step, measured and simulated."""
    plan = [f"dp=2 zero={zero} update={update} transport={transport}", "width=128 layers=4 batch_size=16 clip=none"]
    settings = [f"steps={steps} trace_every=1 checkpoint_every=0 valid_bytes=4096 name=traced"]
    words = " ".join([*plan, *settings]).split()
    command = [sys.executable, "-m", "fourfold", "train", "lm", "-n", "2", *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    subprocess.run(command, cwd=folder, env=environment, check=True, timeout=LIMIT_SECONDS, capture_output=True)
    trace = decode_trace((folder / "runs" / "traced" / TRACE_FILE).read_bytes())
    shutil.rmtree(folder / "runs")
    return makespan(measured_timeline(trace, median_step(trace))), makespan(simulated_timeline(trace))


def main() -> None:
    steps = int(sys.argv[1]) if sys.argv[1:] else 34
    print(describe_machine())
    rows = [("transport", "zero", "update", "measured", "simulated", "ratio")]
    with tempfile.TemporaryDirectory(prefix="fourfold-bench-") as folder:
        for transport, zero, update in itertools.product(TRANSPORTS, ZEROS, UPDATES):
            measured, simulated = ratio(Path(folder), transport=transport, zero=zero, update=update, steps=steps)
            figures = (f"{measured * 1e3:.1f} ms", f"{simulated * 1e3:.1f} ms", f"{simulated / measured:.3f}")
            rows.append((transport, str(zero), update, *figures))
            print(*rows[-1], flush=True)
    print("\n".join(align_columns(rows, "<><>>>")))


if __name__ == "__main__":
    main()
