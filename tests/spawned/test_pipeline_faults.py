"""Faults of a pipeline: any stage may be killed; the run names it, restarts, and repeats what no checkpoint has."""

import json
import re
from pathlib import Path

from tests.spawned.test_faults import HOST, Job, faults
from tests.spawned.test_resume import equal, losses

# One block on each of four ranks. In the fifth step of each attempt, the next stage of ORDER is killed in its forward.
# A dry run computes with a copy of the model, whose blocks count for themselves.
TASK = """
import os, signal, time
from pathlib import Path
import torch
import fourfold as ff

ORDER, RANK, MICROBATCHES = ("1", "2", "0", "3"), os.environ.get("RANK"), 2


class Block(torch.nn.Module):
    def __init__(self, dies):
        super().__init__()
        self.layer, self.dies, self.calls = torch.nn.Linear(4, 4), dies, 0

    def forward(self, x):
        if self.dies and self.training and torch.is_grad_enabled():
            self.calls += 1
            done = len(list(Path(".").glob("mark-*")))
            if self.calls == 4 * MICROBATCHES + 1 and done < len(ORDER) and RANK == ORDER[done]:
                Path(f"mark-{done}").touch()
                while not Path(f"runs/first/checkpoints/step-{3 * done + 3:08}").exists():
                    time.sleep(0.01)  # it is written while steps go on
                os.kill(os.getpid(), signal.SIGKILL)
        return x + torch.tanh(self.layer(x))


class Source:
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.linspace(-1, 1, 4) * (0.01 * index), torch.zeros(4)


def task(*, dies: bool = False):
    return ff.Task(
        model=lambda: torch.nn.Sequential(*(Block(dies) for _ in range(4))),
        loss=torch.nn.functional.mse_loss,
        data=lambda: ff.Data(train=Source()),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        steps=16,
        batch_size=8,
    )
"""
ORDER = (1, 2, 0, 3)
TRAIN = ("train", "script.py", "pp=4", "microbatches=2", "checkpoint_every=3", "name=first", "hang_seconds=100")


def run(folder: Path, *words: str) -> Job:
    folder.mkdir()
    (folder / "script.py").write_text(TASK)
    job = Job(folder, [*TRAIN, *words, "-n", "4"], {})
    assert job.end() == 0, job.err
    return job


def test_any_stage_may_be_killed_and_costs_the_steps_since_the_last_checkpoint(tmp_path: Path):
    run(tmp_path / "calm")
    job = run(tmp_path / "hit", "dies=true")
    calm, hit = tmp_path / "calm" / "runs" / "first", tmp_path / "hit" / "runs" / "first"
    assert equal(hit, calm)
    assert losses(hit) == losses(calm)
    found = faults(hit)
    assert [(fault["kind"], fault["rank"]) for fault in found] == [("restart", rank) for rank in ORDER]
    for rank in ORDER:
        assert re.search(rf"rank {rank} of 4 \(host {re.escape(HOST)}, after step \d+\) was killed by SIGKILL", job.err)
    resumed = [line["resumed"] for line in map(json.loads, (hit / "metrics.jsonl").open()) if "resumed" in line]
    assert resumed == [3, 6, 9, 12]
    # In the fifth step of an attempt, a stage has ended four steps at most, of which one or two are in no checkpoint.
    assert all(0 <= fault["step"] - step <= 2 for fault, step in zip(found, resumed, strict=True))
