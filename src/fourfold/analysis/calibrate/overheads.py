"""Overheads: what a step takes beside what it computes and sends, and what messages cost a rank that computes.

Law: they are measured on steps of a model so small that nothing else takes time.
"""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fourfold.analysis.calibrate.probe import make_probe
from fourfold.analysis.calibrate.segments import SegmentTimer
from fourfold.analysis.calibrate.timing import NUM_TURNS, Turns, now
from fourfold.plan.plan import Plan
from fourfold.step.train_step import TrainStep
from fourfold.words.task import Task

WIDTH, MICROBATCHES = 8, 9
FLIGHT_ELEMENTS, NETWORK_FLIGHT_ELEMENTS = 2**22, 2**18
PRODUCT = 256


class Overheads(NamedTuple):
    """Seconds, and how many times as long computing takes while a collective is in flight."""

    between_actions: float
    around_step: float
    slowdown: float


class _Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))

    def forward(self, x_BD: Tensor) -> Tensor:
        return self.blocks(x_BD)


def _squares(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean(-1)


def _tiny_task() -> Task:
    return Task(
        model=_Tiny,
        loss=_squares,
        data=_no_data,
        optimizer=functools.partial(torch.optim.SGD, lr=1e-3),
    )


def _no_data() -> Any:
    raise AssertionError("batches are given")


def measure_overheads(turns: Turns) -> Overheads:
    """Collective."""
    ranks = turns.ranks
    one, many = (_step_seconds(turns, microbatches) for microbatches in (1, MICROBATCHES))
    probe = make_probe(_tiny_task(), Plan(dp=ranks.size), ranks)
    times = SegmentTimer(probe, turns).whole(_batch(1))
    computed = sum(times.forward) + sum(times.backward)
    between = max(0.0, ((many - one) / (MICROBATCHES - 1) - computed) / 2)
    # Forward, the loss, backward, a reduction and an update.
    around = max(0.0, one - computed - 5 * between)
    return Overheads(between, around, _slowdown(turns))


def _batch(samples: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(samples)
    inputs, targets = torch.randn(2, samples, WIDTH, generator=generator)
    return inputs, targets


def _step_seconds(turns: Turns, microbatches: int) -> float:
    task, plan = _tiny_task(), Plan(dp=turns.ranks.size, microbatches=microbatches)
    model = task.model().to(turns.ranks.device)
    step = TrainStep(model, task.loss, task.optimizer, plan=plan, communicator=turns.ranks, same_batches="allow")
    batch = _batch(microbatches)
    return turns.median_seconds(lambda: step(batch))


def _slowdown(turns: Turns) -> float:
    """The products of a rank while an all-reduce over messages is in flight, over those while there is none."""
    if turns.ranks.size == 1:
        return 1.0
    elements = NETWORK_FLIGHT_ELEMENTS if turns.ranks.num_hosts > 1 else FLIGHT_ELEMENTS
    device = turns.ranks.device
    values, matrix = torch.zeros(elements, device=device), torch.randn(PRODUCT, PRODUCT, device=device)
    alone = turns.median_seconds(lambda: matrix @ matrix)
    group = turns.ranks.get_group(range(turns.ranks.size), "calibration")
    rates = []
    for _ in range(NUM_TURNS):
        turns.begin()
        work = group.all_reduce(values)
        start, count = now(), 0
        while not work.is_completed():
            torch.mm(matrix, matrix)
            count += 1
        spent = now() - start
        work.wait()
        if count:
            rates.append(spent / count)
    return max(1.0, sorted(rates)[len(rates) // 2] / alone) if rates else 1.0
