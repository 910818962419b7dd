"""Laws of how long a DistributedOptimizer lives: as long as its torch optimizer, and no longer."""

import copy
import gc
import os
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from fourfold.plan.plan import Plan
from fourfold.step.distributed_optimizer import DistributedOptimizer
from fourfold.testing import threads
from tests.cases import SEED_LOCK


def wrap(comm: Any, model: nn.Module, optimizer: torch.optim.Optimizer, batch_norm: str) -> DistributedOptimizer:
    plan = Plan(dp=comm.size, batch_norm=batch_norm)
    return DistributedOptimizer(optimizer, model, plan, communicator=comm, drift_check=1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    for step in range(2):
        inputs = torch.randn(4, 3, generator=torch.Generator().manual_seed(2 * step + rank))
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()


def make() -> nn.Sequential:
    with SEED_LOCK:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


@pytest.mark.parametrize("batch_norm", ["local", "sync"])
def test_an_unreferenced_wrapper_is_freed_with_its_model_and_its_shared_memory(batch_norm):
    def body(comm):
        model = make()
        optimizer = wrap(comm, model, torch.optim.SGD(model.parameters(), lr=0.1), batch_norm)
        train(model, optimizer, comm.rank)
        return weakref.ref(optimizer), weakref.ref(model), weakref.ref(model[0].weight)

    def open_files() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    threads.run(2, body)
    before = open_files()
    references = [reference for _ in range(3) for each in threads.run(2, body) for reference in each]
    assert open_files() <= before
    assert [reference() for reference in references] == [None] * len(references)


def test_a_user_who_holds_the_torch_optimizer_only_trains_on_all_ranks():
    def body(comm):
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        wrap(comm, model, optimizer, "local")
        gc.collect()
        train(model, optimizer, comm.rank)
        return [parameter.detach() for parameter in model.parameters()]

    first, second = threads.run(2, body)
    assert all(map(torch.equal, first, second))


def test_a_copy_of_the_torch_optimizer_has_no_part_of_the_wrapper():
    def body(comm):
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        wrap(comm, model, optimizer, "local")
        copied = copy.deepcopy(optimizer)
        assert not any(isinstance(value, DistributedOptimizer) for value in vars(copied).values())

    threads.run(2, body)
