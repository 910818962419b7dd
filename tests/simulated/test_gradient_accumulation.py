"""Laws of gradient accumulation with a DistributedOptimizer, in the loop of docs/from-ddp.md. Ranks are threads."""

import contextlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fourfold.step.distributed_optimizer import DistributedOptimizer
from fourfold.step.grad_averager import GradAverager
from fourfold.testing import threads
from fourfold.testing.oracle import TOLERANCE

pytestmark = pytest.mark.usefixtures("without_dry_run")

PAGE = Path(__file__).parents[2] / "docs" / "from-ddp.md"
MAX_NORM = 1.0


def model() -> nn.Module:
    made = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 2)).double()
    generator = torch.Generator().manual_seed(0)
    for parameter in made.parameters():
        nn.init.normal_(parameter, generator=generator)
    return made


def batches(rank: int, count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    values = torch.randn(count, 3, 8, generator=generator, dtype=torch.float64)
    return [(each[:, :6], each[:, 6:]) for each in values]


def adamw(mine: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(mine.parameters(), lr=0.1)


def schedule(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


def expected(count: int, size: int, accumulate: int) -> list[Tensor]:
    """One device: each update has the mean over ranks of the batches that the page accumulates."""
    mine = model()
    optimizer = adamw(mine)
    scheduler = schedule(optimizer)
    for start in range(0, count, accumulate):
        optimizer.zero_grad()
        for rank in range(size):
            for x, y in batches(rank, count)[start : start + accumulate]:
                (F.mse_loss(mine(x), y) / accumulate / size).backward()
        nn.utils.clip_grad_norm_(mine.parameters(), MAX_NORM)
        optimizer.step()
        scheduler.step()
    return [p.detach() for p in mine.parameters()]


def deviation(mine: nn.Module, theirs: list[Tensor]) -> float:
    return max(float((a.detach() - b).abs().max()) for a, b in zip(mine.parameters(), theirs, strict=True))


@pytest.mark.parametrize("count", [8, 10])  # with 10, two batches remain for the last update
def test_the_loop_of_the_page_trains_as_one_device_and_reduces_once_an_update(count, monkeypatch):
    section = PAGE.read_text(encoding="utf-8").partition("## Gradient accumulation\n")[2]
    found = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert found is not None
    rounds, average = [], GradAverager.average

    def counted(averager: GradAverager, *args: Any) -> Any:
        rounds.append(None)
        return average(averager, *args)

    monkeypatch.setattr(GradAverager, "average", counted)

    def body(comm):
        mine = model()
        optimizer = DistributedOptimizer(adamw(mine), mine, communicator=comm)
        scope = {"contextlib": contextlib, "F": F, "model": mine, "optimizer": optimizer}
        exec(found[1], scope | {"loader": batches(comm.rank, count), "scheduler": schedule(optimizer)})
        return deviation(mine, expected(count, comm.size, 4))

    assert max(threads.run(2, body)) <= TOLERANCE
    assert len(rounds) == 2 * -(-count // 4)  # on each of two ranks


def test_ranks_may_accumulate_differently_many_backwards():
    counts = (1, 3)

    def body(comm):
        mine = model()
        optimizer = DistributedOptimizer(adamw(mine), mine, communicator=comm)
        *others, last = batches(comm.rank, counts[comm.rank])
        for x, y in others:
            with optimizer.no_sync():
                (F.mse_loss(mine(x), y) / counts[comm.rank]).backward()
        (F.mse_loss(mine(last[0]), last[1]) / counts[comm.rank]).backward()
        optimizer.step()
        return deviation(mine, theirs)

    reference = model()
    optimizer = adamw(reference)
    for rank, count in enumerate(counts):
        for x, y in batches(rank, count):
            (F.mse_loss(reference(x), y) / count / 2).backward()
    optimizer.step()
    theirs = [p.detach() for p in reference.parameters()]
    assert max(threads.run(2, body)) <= TOLERANCE


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_gradient_that_is_given_other_memory_is_averaged_again_in_the_next_backward(set_to_none):
    def train(rank: int, size: int, wrap: Any) -> list[Tensor]:
        mine = model()
        optimizer = wrap(mine)
        for index in range(3):
            optimizer.zero_grad(set_to_none)
            for each in range(rank, rank + size):
                x, y = batches(each, 3)[index]
                (F.mse_loss(mine(x), y) / size).backward()
            for parameter in mine.parameters():
                assert parameter.grad is not None
                parameter.grad.data = parameter.grad.data.clamp(-0.1, 0.1)
            optimizer.step()
        return [p.detach() for p in mine.parameters()]

    def sgd(mine: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(mine.parameters(), lr=0.1)

    def body(comm: Any) -> list[Tensor]:
        return train(comm.rank, 1, lambda mine: DistributedOptimizer(sgd(mine), mine, communicator=comm))

    for got in threads.run(2, body):
        torch.testing.assert_close(got, train(0, 2, sgd), rtol=TOLERANCE, atol=TOLERANCE)
