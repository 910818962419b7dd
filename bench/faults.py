"""Faults: ranks of a real run are killed, one after the other, and the time until training goes on is taken.

    python -m bench.faults [--kills 20] [--words lm steps=300 checkpoint_every=5]

noticed  from the signal to the launcher's finding
again    from the signal to the end of the first step after it: what the reach of 6 s is about
Law: the moments and the ranks are drawn at random from a seed; afterwards the weights are compared, bit for bit, with
those of a run that nobody disturbed.
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
TIMEOUT_SECONDS = 60.0  # for a run to go on
MAX_STEPS, MAX_SECONDS = 6, 0.1  # of training between two kills
POLL_SECONDS = 0.01


class Kill(NamedTuple):
    """One kill, and what came of it."""

    rank: int
    detect_seconds: float
    recover_seconds: float


def start_job(folder: Path, words: Sequence[str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "fourfold", "train", *words, "name=run", "-n", "2"]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL)


def wait_for_lines(path: Path, lines: int, job: subprocess.Popen[bytes]) -> list[dict] | None:
    """What a file of lines holds as soon as it holds so many; None where the job has ended before."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        found = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
        if len(found) >= lines:
            return [json.loads(line) for line in found]
        if job.poll() is not None:
            return None
        time.sleep(POLL_SECONDS)
    raise TimeoutError(f"{path.name} had no {lines} lines within {TIMEOUT_SECONDS:.0f} s")


def wait_for_step(log: Path, step: int, job: subprocess.Popen[bytes]) -> None:
    """Until a run's log tells of a step."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while job.poll() is None and time.monotonic() < deadline:
        lines = log.read_bytes().split(b"\n")[:-1] if log.exists() else []
        if any(json.loads(line).get("step", 0) >= step for line in lines[-20:]):
            return
        time.sleep(POLL_SECONDS)


def kill_repeatedly(folder: Path, words: Sequence[str], kills: int) -> list[Kill]:
    draw = random.Random(0)
    job = start_job(folder, words)
    run = folder / "runs" / "run"
    done: list[Kill] = []
    try:
        furthest = 0
        while len(done) < kills:
            # A job that never gets further is given up, so every attempt is let get further than those before.
            wait_for_step(run / "metrics.jsonl", furthest + draw.randint(1, MAX_STEPS), job)
            time.sleep(draw.uniform(0.0, MAX_SECONDS))
            ranks = sorted(psutil.Process(job.pid).children(), key=lambda each: each.pid)
            if job.poll() is not None or len(ranks) < 2:
                break
            rank, begin = draw.randrange(2), time.time()
            os.kill(ranks[rank].pid, signal.SIGKILL)
            faults = wait_for_lines(run / "faults.jsonl", len(done) + 1, job)
            if faults is None:
                break
            noticed = faults[-1]["time"] - begin
            done.append(Kill(rank, noticed, noticed + faults[-1]["seconds"]))
            furthest = max(furthest, faults[-1]["step"])
        if job.wait(600):
            raise RuntimeError(f"the run ended with code {job.returncode}")
    finally:
        if job.poll() is None:
            job.kill()  # its ranks end with it
            job.wait()
    return done


def load_newest_weights(folder: Path) -> dict[str, torch.Tensor]:
    newest = max((folder / "runs" / "run" / "checkpoints").glob("step-*"))
    return {name: value for path in newest.glob("*.safetensors") for name, value in load_file(path).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--words", nargs="+", default=COMMAND_ARGS)
    given = parser.parse_args()
    print(describe_machine())
    with tempfile.TemporaryDirectory() as place:
        disturbed, whole = Path(place) / "disturbed", Path(place) / "whole"
        disturbed.mkdir()
        whole.mkdir()
        done = kill_repeatedly(disturbed, given.words, given.kills)
        if start_job(whole, given.words).wait():
            raise RuntimeError("the undisturbed run failed")
        ours, theirs = load_newest_weights(disturbed), load_newest_weights(whole)
        same = ours.keys() == theirs.keys() and all(torch.equal(ours[name], value) for name, value in theirs.items())
    rows = [("seconds", "median", "least", "most")]
    rows += [
        (name, *(f"{value:.2f}" for value in (statistics.median(times), min(times), max(times))))
        for name, times in (
            ("noticed", [kill.detect_seconds for kill in done]),
            ("again", [kill.recover_seconds for kill in done]),
        )
    ]
    print(format_table(rows))
    print(f"{len(done)} kills survived; the final weights are {'the same, bit for bit' if same else 'NOT the same'}")
    print(f"load now {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
