"""Faults: kills ranks of a real run, one after the other, and measures the time until training resumes.

    python -m bench.faults [--kills 20] [--words lm steps=300 checkpoint_every=5]

detect   from the signal until the launcher has found the cause
resume   from the signal to the end of the first step after it; the target is 6 s
Law: a seed draws the moments and the ranks; afterwards the weights are compared, bit for bit, with those of an
undisturbed run.
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import psutil
import torch
from safetensors.torch import load_file

from bench.measurement import describe_machine, format_table

COMMAND_ARGS = ("lm", "steps=300", "checkpoint_every=5")
TIMEOUT_SECONDS = 60.0  # until a run resumes
MAX_STEPS, MAX_SECONDS = 6, 0.1  # between two kills
POLL_SECONDS = 0.01


class Kill(NamedTuple):
    """One kill, and the seconds until it was detected and until training resumed."""

    rank: int
    detect_seconds: float
    recover_seconds: float


def start_job(folder: Path, words: Sequence[str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "fourfold", "train", *words, "name=run", "-n", "2"]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL)


def wait_for_lines(path: Path, lines: int, job: subprocess.Popen[bytes]) -> list[dict] | None:
    """The lines of a JSON-lines file as soon as it has `lines` of them; None if the job has ended before."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        raw_lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
        if len(raw_lines) >= lines:
            return [json.loads(line) for line in raw_lines]
        if job.poll() is not None:
            return None
        time.sleep(POLL_SECONDS)
    raise TimeoutError(f"{path.name} had no {lines} lines within {TIMEOUT_SECONDS:.0f} s")


def wait_for_step(log: Path, step: int, job: subprocess.Popen[bytes]) -> None:
    """Wait until a run's log has reached a step, or the job has ended."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while job.poll() is None and time.monotonic() < deadline:
        lines = log.read_bytes().split(b"\n")[:-1] if log.exists() else []
        if any(json.loads(line).get("step", 0) >= step for line in lines[-20:]):
            return
        time.sleep(POLL_SECONDS)


def kill_repeatedly(folder: Path, words: Sequence[str], kills: int) -> list[Kill]:
    rng = random.Random(0)
    job = start_job(folder, words)
    run = folder / "runs" / "run"
    recovered: list[Kill] = []
    try:
        furthest = 0
        while len(recovered) < kills:
            # A launcher gives up a job without progress, so each attempt runs further than those before.
            wait_for_step(run / "metrics.jsonl", furthest + rng.randint(1, MAX_STEPS), job)
            time.sleep(rng.uniform(0.0, MAX_SECONDS))
            ranks = sorted(psutil.Process(job.pid).children(), key=lambda each: each.pid)
            if job.poll() is not None or len(ranks) < 2:
                break
            rank, begin = rng.randrange(2), time.time()
            os.kill(ranks[rank].pid, signal.SIGKILL)
            faults = wait_for_lines(run / "faults.jsonl", len(recovered) + 1, job)
            if faults is None:
                break
            detect_seconds = faults[-1]["time"] - begin
            recovered.append(Kill(rank, detect_seconds, detect_seconds + faults[-1]["seconds"]))
            furthest = max(furthest, faults[-1]["step"])
        if job.wait(600):
            raise RuntimeError(f"the run ended with code {job.returncode}")
    finally:
        if job.poll() is None:
            job.kill()  # its ranks end with it
            job.wait()
    return recovered


def load_newest_weights(folder: Path) -> dict[str, torch.Tensor]:
    newest = max((folder / "runs" / "run" / "checkpoints").glob("step-*"))
    return {name: value for path in newest.glob("*.safetensors") for name, value in load_file(path).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--words", nargs="+", default=COMMAND_ARGS)
    given = parser.parse_args()
    print(describe_machine())
    with tempfile.TemporaryDirectory() as folder:
        disturbed, undisturbed = Path(folder) / "disturbed", Path(folder) / "whole"
        disturbed.mkdir()
        undisturbed.mkdir()
        recovered = kill_repeatedly(disturbed, given.words, given.kills)
        if start_job(undisturbed, given.words).wait():
            raise RuntimeError("the undisturbed run failed")
        disturbed_weights, undisturbed_weights = load_newest_weights(disturbed), load_newest_weights(undisturbed)
        same = disturbed_weights.keys() == undisturbed_weights.keys() and all(
            torch.equal(disturbed_weights[name], value) for name, value in undisturbed_weights.items()
        )
    rows = [("seconds", "median", "min", "max")]
    rows += [
        (name, *(f"{value:.2f}" for value in (statistics.median(times), min(times), max(times))))
        for name, times in (
            ("detect", [kill.detect_seconds for kill in recovered]),
            ("resume", [kill.recover_seconds for kill in recovered]),
        )
    ]
    print(format_table(rows))
    print(
        f"{len(recovered)} kills survived; the final weights are {'the same, bit for bit' if same else 'NOT the same'}"
    )
    print(f"load now {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
