"""Start-up: how long `fourfold train -n 2` takes to its first output and first step, and plain PyTorch to its own.

    python -m bench.start_up --rounds 5                       this checkout
    python -m bench.start_up --rounds 5 --other ../old/src    taking turns with another checkout

imports   two plain `import torch`, one after the other, the second with a first step of the same task on one process
help      `fourfold --help`
first     the first output of `fourfold train lm -n 2`
step      the line of the first step, at which the job is killed
"""

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src"
BARE_STEP = """
import torch
from fourfold.tasks.lm import task
task = task()
model, data = task.model(), task.data().train
optimizer = task.optimizer(model.parameters())
inputs, targets = torch.utils.data.default_collate([data[i] for i in range(task.batch_size // 2)])
loss = task.loss(model(**inputs), targets)
(loss[0] / loss[1] if isinstance(loss, tuple) else loss.mean()).backward()
optimizer.step()
"""


def seconds_of(*arguments: str, source: Path = SOURCE) -> float:
    """How long `python ARGUMENTS` takes."""
    begin = time.perf_counter()
    environ = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL, env=environ)
    return time.perf_counter() - begin


def start_of_a_job(source: Path, folder: str) -> dict[str, float]:
    """The times of the first output and of the first step."""
    environ = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    begin, times = time.perf_counter(), {}
    command = [sys.executable, "-m", "fourfold", "train", "lm", "-n", "2", "fresh=true", "name=start"]
    job = subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, text=True, bufsize=1, env=environ, start_new_session=True
    )
    assert job.stdout is not None
    for line in job.stdout:
        times.setdefault("first", time.perf_counter() - begin)
        if line.lstrip().startswith("step "):
            times["step"] = time.perf_counter() - begin
            break
    os.killpg(job.pid, signal.SIGKILL)  # and the kernel the ranks
    job.wait()
    job.stdout.close()
    return times


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--other", type=Path)
    given = parser.parse_args()
    sources = {"this": SOURCE} | ({"other": given.other.resolve()} if given.other else {})
    rows: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(given.rounds):
            plain = seconds_of("-c", "import torch") + seconds_of("-c", BARE_STEP)
            rows.setdefault("imports", []).append(plain)
            for name, source in sources.items():
                times = {"help": seconds_of("-m", "fourfold", "--help", source=source)}
                for key, value in {**times, **start_of_a_job(source, folder)}.items():
                    rows.setdefault(f"{name} {key}", []).append(value)
    for name, values in rows.items():
        print(f"{name:12}  median {statistics.median(values):5.2f} s   least {min(values):5.2f} s")


if __name__ == "__main__":
    main()
