"""A task of your own: it says what is learned and mentions no ranks. `fourfold train` does the rest.

fourfold train examples/own_task.py:task
fourfold train examples/own_task.py:task -n 2 dp=2 zero=1 width=128
fourfold verify examples/own_task.py:task dp=2 zero=1
python examples/own_task.py
"""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fourfold as ff


class Parity:
    """Sixteen bits, and whether an odd number of the first four is set. A source has a length and numbered samples."""

    def __init__(self, first: int, count: int) -> None:
        self._first, self._count = first, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        number = (self._first + index) * 2654435761
        bits = torch.tensor([number >> place & 1 for place in range(8, 24)], dtype=torch.float32)
        return bits, (bits[:4].sum() % 2).long()


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none")  # unreduced: the mean is taken over all ranks


def evaluate(outputs: Tensor, targets: Tensor) -> dict[str, tuple[int, int]]:
    return {"accuracy": (int((outputs.argmax(1) == targets).sum()), len(targets))}  # (sum, count): ranks add them up


def model(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2))


def task(width: int = 64, lr: float = 3e-3) -> ff.Task:
    """The arguments can be given on the command line: width=128 lr=1e-3."""
    return ff.Task(
        model=functools.partial(model, width),
        loss=loss,
        data=lambda: ff.Data(train=Parity(0, 2048), valid=Parity(2048, 256)),
        optimizer=functools.partial(torch.optim.AdamW, lr=lr),
        evaluate=evaluate,
        steps=400,
        batch_size=64,  # of all ranks together
    )


def main() -> None:
    result = ff.train(task(), ff.Plan(dp=ff.world().size), checkpoint_every=0)
    assert result.valid["accuracy"] > 0.95
    if ff.world().rank == 0:
        print(f"accuracy {result.valid['accuracy']:.3f} after {result.steps} steps, in {result.folder}")


if __name__ == "__main__":
    main()
