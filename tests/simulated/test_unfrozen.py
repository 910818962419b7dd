"""Law of a state from before parameters were unfrozen: all ranks load it, or all refuse it."""

import functools

import pytest
import torch
from torch import nn

from fourfold.plan.plan import Plan
from fourfold.step.train_step import TrainStep
from fourfold.testing import threads
from fourfold.words.errors import OptimizerError


def net(*, frozen: bool) -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    for parameter in model[0].parameters():
        parameter.requires_grad_(not frozen)
    return model


@pytest.mark.parametrize("how", [{}, {"zero": 1}, {"unused": "allow"}, {"unused": "allow", "zero": 1}])
def test_a_state_without_unfrozen_parameters_is_loaded_or_refused_on_all_ranks(how):
    def body(comm):
        make, plan = functools.partial(torch.optim.Adam, lr=0.1), Plan(dp=2, **how)
        batch = torch.ones(2, 3, dtype=torch.float64) + comm.rank, torch.zeros(2, 2, dtype=torch.float64)
        build = functools.partial(TrainStep, loss=_squares, optimizer=make, plan=plan, communicator=comm, clip=None)
        first = build(net(frozen=True))
        first(batch)
        state = first.state_dict()
        state["optimizer"] |= {"0.weight": {}, "0.bias": {}}
        second = build(net(frozen=False))
        if "unused" not in how:
            with pytest.raises(OptimizerError, match="some with optimizer state and some without"):
                second.load_state_dict(state)
            return True
        second.load_state_dict(state)
        return second(batch).loss < float("inf")

    assert threads.run(2, body) == [True, True]


def _squares(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return ((outputs - targets) ** 2).sum(1)
