"""Staleness: the loss of the built-in language model with asynchronous schedules, next to 1F1B.

excess  the validation loss relative to that of 1F1B with the same seed and the same batches
Law: each training is a `fourfold train` of its own in a new folder, and its loss is the one that its log ends with.

    python -m bench.staleness [--pp 2 4] [--seeds 3] [--steps 300]
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean

from bench.measurement import describe_machine, format_table

LIMIT_SECONDS = 900.0


def schedules(pp: int) -> dict[str, int]:
    """By schedule: its microbatches. 2BW needs at least one for each stage; `pipedream` updates behind each batch."""
    return {"1f1b": pp, "pipedream": 1, "2bw": pp}


def validation_loss(pp: int, schedule: str, microbatches: int, *, seed: int, steps: int) -> float:
    """Train in processes of their own. Asynchronous schedules go without `clip`, so none has it here."""
    fields = {"pp": pp, "schedule": schedule, "microbatches": microbatches, "seed": seed, "steps": steps}
    fields["clip"] = "none"
    command = [sys.executable, "-m", "fourfold", "train", "lm", "-n", str(pp), *(f"{k}={v}" for k, v in fields.items())]
    with tempfile.TemporaryDirectory(prefix="fourfold-bench-") as folder:
        done = subprocess.run(command, cwd=folder, timeout=LIMIT_SECONDS, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
        (log,) = Path(folder).glob("runs/*/metrics.jsonl")
        return json.loads(log.read_text().splitlines()[-1])["valid"]["loss"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pp", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    print(describe_machine())
    print(f"lm, {options.steps} steps, no clip; validation loss in nats a byte, and relative to 1F1B")
    rows = [["stages", "schedule", *(f"seed {seed}" for seed in range(options.seeds)), "mean excess", "worst"]]
    for pp in options.pp:
        losses = {
            schedule: [
                validation_loss(pp, schedule, microbatches, seed=seed, steps=options.steps)
                for seed in range(options.seeds)
            ]
            for schedule, microbatches in schedules(pp).items()
        }
        for schedule, found in losses.items():
            excess = [loss / base - 1 for loss, base in zip(found, losses["1f1b"], strict=True)]
            shown = [] if schedule == "1f1b" else [f"{mean(excess):+.1%}", f"{max(excess):+.1%}"]
            rows.append([str(pp), schedule, *(f"{loss:.3f}" for loss in found), *(shown or ["", ""])])
    print(format_table(rows))


if __name__ == "__main__":
    main()
