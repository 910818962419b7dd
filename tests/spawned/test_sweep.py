"""A sweep in real processes: one member fails, the others finish, and the same command trains only what has failed."""

import os
import subprocess
import sys
from pathlib import Path

TASK = """
import os
import torch
import fourfold as ff


def loss(outputs, targets):
    if outputs.requires_grad and BREAKS and os.path.exists("broken"):
        os._exit(3)
    return (outputs - targets) ** 2


def task(*, breaks: bool = False):
    global BREAKS
    BREAKS = breaks
    return ff.Task(
        model=lambda: torch.nn.Linear(4, 1),
        loss=loss,
        data=lambda: ff.Data(train=[(torch.zeros(4), torch.zeros(1))] * 8),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        steps=2,
        batch_size=8,
    )
"""


def sweep(folder: Path) -> tuple[int, str]:
    words = ["train", "mine.py", "breaks=true,false", "-n", "1", "restarts=0", "checkpoint_every=0"]
    command = [sys.executable, "-m", "fourfold", *words]
    ended = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=300, check=False, env=os.environ
    )
    return ended.returncode, ended.stdout + ended.stderr


def test_a_member_that_dies_does_not_end_the_others_and_the_same_command_trains_it_again(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(TASK)
    (tmp_path / "broken").write_text("")
    code, text = sweep(tmp_path)
    assert code == 1, text
    assert "failed (3)" in text
    assert text.count("time  ") == 1, "one run has finished"
    (tmp_path / "broken").unlink()
    code, text = sweep(tmp_path)
    assert code == 0, text
    assert "is finished (2 steps)" in text
    assert text.count("time  ") == 1, "only the other one is trained"
    assert "fourfold report runs/mine-breaks=true-" in text
