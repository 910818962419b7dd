"""Your own loop, which resumes where it was stopped: ff.Checkpoints saves and loads it, on any number of processes.

python examples/resume.py                 stops after 30 of 60 steps, like a job at its time limit
fourfold run -n 2 examples/resume.py      the other 30, on two processes
"""

import functools

import torch
import torch.nn.functional as F
from torch import nn

import fourfold as ff

STEPS, STEPS_PER_START = 60, 30


class Sums(torch.utils.data.Dataset):
    """Eight numbers and their sum."""

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        numbers = torch.tensor([index * 2654435761 >> place & 255 for place in range(8)]) / 255
        return numbers, numbers.sum(0, keepdim=True)


def squared_error(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(outputs, targets, reduction="none")


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    plan = ff.Plan(dp=ff.world().size)
    step = ff.parallelize(model, squared_error, functools.partial(torch.optim.AdamW, lr=3e-2), plan)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(step.optimizer, T_max=STEPS)
    feed = ff.Feed(Sums(), plan, batch_size=32, seed=0)

    checkpoints = ff.Checkpoints("runs/resume", step, feed)
    if loaded := checkpoints.load():  # None at the first start
        scheduler.load_state_dict(loaded.extra["scheduler"])
    start, losses = step.num_steps, [float("nan")]
    for batch in feed.repeat():
        if step.num_steps == min(start + STEPS_PER_START, STEPS):
            break
        losses.append(step(batch).loss)
        scheduler.step()
        if step.num_steps % 10 == 0:
            checkpoints.save(extra={"scheduler": scheduler.state_dict()})
    if step.rank == 0:
        print(f"steps {start} to {step.num_steps} of {STEPS}: loss {losses[-1]:.4f}")
    assert start in (0, STEPS) or losses[-1] < 0.5


if __name__ == "__main__":
    main()
