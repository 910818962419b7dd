"""`ff.Checkpoints` in processes: one that is killed while it saves leaves the checkpoint before."""

import json
from pathlib import Path

from tests.spawned.test_launch import Start, end, start  # noqa: F401 (a fixture)

# A loop that saves steps 2, 4 and 6 of 6, and prints the losses of a whole training and of the one that was stopped.
# With "die", rank 1 is killed in the save of step 4, when its file is on the disk and nobody knows of it.
LOOP = """
import functools, json, os, signal, sys
import torch
import fourfold as ff
from fourfold.checkpoint import writer

def die(path, suffix, text, real=writer.write_marker):
    if "step-00000004" in str(path) and "rank-001" in str(path):
        os.kill(os.getpid(), signal.SIGKILL)
    real(path, suffix, text)

def train(folder):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 9), torch.nn.Tanh(), torch.nn.Linear(9, 1)).double()
    source = [(torch.linspace(-1, 1, 4).double() * number / 9, torch.ones(1).double() * number) for number in range(30)]
    plan = ff.Plan(dp=ff.world().size, zero=1 if ff.world().size > 1 else 0)
    loss = functools.partial(torch.nn.functional.mse_loss, reduction="none")
    step = ff.parallelize(model, loss, functools.partial(torch.optim.AdamW, lr=0.1), plan)
    scheduler = torch.optim.lr_scheduler.StepLR(step.optimizer, 2, gamma=0.5)
    feed = ff.Feed(source, plan, batch_size=8, seed=1)
    checkpoints = ff.Checkpoints(folder, step, feed)
    if loaded := checkpoints.load():
        scheduler.load_state_dict(loaded.extra["scheduler"])
    losses = []
    for batch in feed.repeat():
        losses.append(step(batch).loss)
        scheduler.step()
        if step.num_steps % 2 == 0:
            checkpoints.save(extra={"scheduler": scheduler.state_dict()})
        if step.num_steps == 6:
            return losses

if sys.argv[1:] == ["die"]:
    writer.write_marker = die
    train("stopped")
else:
    print(json.dumps([train("whole"), train("stopped")]))
"""


def test_a_loop_killed_while_it_saves_goes_on_on_another_number_of_ranks(start: Start, tmp_path: Path) -> None:  # noqa: F811
    killed = end(start(LOOP, ["run", "-n", "2", "script.py", "die"]))
    assert killed.code != 0
    folder = tmp_path / "stopped" / "checkpoints"
    assert [path.name for path in folder.glob("step-*")] == ["step-00000002"]
    resumed = end(start(LOOP, ["script.py"], launcher=()))
    assert resumed.code == 0, resumed.err
    whole, losses = json.loads(resumed.out.splitlines()[-1])
    assert len(losses) == 4
    for loss, expected in zip(losses, whole[2:], strict=True):
        assert abs(loss - expected) <= 1e-12 * max(1, abs(expected))
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000004", "step-00000006"]
