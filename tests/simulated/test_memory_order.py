"""Weights in channels_last train as one device does, and keep their memory order where nothing divides them."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fourfold.checkpoint.checkpoints import Checkpoints
from fourfold.comm.memory_order import dims_in_memory, flat_of, shaped
from fourfold.plan.plan import Plan
from fourfold.step.train_step import TrainStep
from fourfold.testing import oracle, threads
from fourfold.testing.oracle import TOLERANCE
from tests import cases

DRAW = torch.Generator().manual_seed(3)
IMAGES = torch.randn(4, 4, 3, 6, 6, generator=DRAW).double()
BATCHES = list(zip(IMAGES, torch.randint(0, 5, (4, 4), generator=DRAW), strict=True))
ORDER = (0, 2, 3, 1)
CONVOLUTIONS = ("0.weight", "3.weight")
adamw = functools.partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
momentum = functools.partial(torch.optim.SGD, lr=1e-2, momentum=0.9)


def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs, targets, reduction="none")


def net(*, channels_last: bool = True) -> nn.Module:
    with cases.SEED_LOCK:
        torch.manual_seed(1)
        convolutions = nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv2d(4, 6, (1, 2))
        model = nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(72, 5)).double()
    return model.to(memory_format=torch.channels_last) if channels_last else model  # type: ignore[call-overload]


def step_of(comm: Any, optimizer: Any = adamw, *, channels_last: bool = True, **fields: Any) -> TrainStep:
    plan = Plan(dp=comm.size, bucket_bytes=2000, **fields)
    return TrainStep(net(channels_last=channels_last), loss, optimizer, plan=plan, communicator=comm)


def train(step: TrainStep, batches: Any = BATCHES) -> None:
    for batch in batches:
        step(cases.local_batch(batch, step.plan.dp, step.dp_index))


def orders(step: TrainStep) -> list[tuple[int, ...]]:
    return [dims_in_memory(step.model.get_parameter(name)) for name in CONVOLUTIONS]


KEPT: list[dict[str, Any]] = [{}, {"microbatches": 2}, {"unused": "allow"}, {"update": "in_backward"}]
OTHERS: list[dict[str, Any]] = [{"zero": 1}, {"zero": 2}, {"zero": 3}, {"zero": 1, "update": "in_forward"}]


@pytest.mark.covering
@pytest.mark.parametrize("fields", [*KEPT, *OTHERS], ids=str)
@pytest.mark.parametrize("optimizer", [adamw, momentum], ids=["adamw", "momentum"])
@pytest.mark.parametrize("size", [1, 2])
def test_weights_in_channels_last_train_as_one_device(size, optimizer, fields):
    expected = oracle.train(net(channels_last=False), loss, optimizer, BATCHES)

    def body(comm: Any) -> Any:
        step = step_of(comm, optimizer, **fields)
        train(step)
        state = step.state_dict()
        return (
            orders(step),
            {name: weight.clone() for name, weight in step.named_weights()},
            state["optimizer"]["3.weight"],
        )

    for kept, weights, state in threads.run(size, body, hosts=size):
        if fields in KEPT:
            assert kept == [ORDER, ORDER]
        for name, weight in weights.items():
            assert (weight - expected.weights[name]).abs().max() <= TOLERANCE
        assert {value.shape for value in state.values() if isinstance(value, torch.Tensor)} == {(6, 4, 1, 2)}


@pytest.mark.parametrize("saved_in", [True, False], ids=["saved in channels_last", "saved contiguous"])
def test_checkpoints_and_states_are_the_same_in_both_orders(saved_in, tmp_path):
    def body(comm: Any, folder: Path) -> tuple[float, float]:
        first, second = (step_of(comm, channels_last=each) for each in (saved_in, not saved_in))
        train(first, BATCHES[:2])
        second.load_state_dict(first.state_dict())
        Checkpoints(folder, first).save(wait=True)
        third = step_of(comm, channels_last=not saved_in)
        Checkpoints(folder, third).load()
        found = []
        for step in (first, second, third):
            train(step, BATCHES[2:])
            found.append(dict(step.named_weights()))
        return tuple(max((found[0][k] - each[k]).abs().max().item() for k in each) for each in found[1:])  # type: ignore[return-value]

    for deviations in threads.run(2, functools.partial(body, folder=tmp_path)):
        assert max(deviations) <= TOLERANCE


@pytest.mark.parametrize("given_in", [True, False], ids=["given in channels_last", "given contiguous"])
def test_averages_of_weights_take_their_place_and_give_it_back(given_in):
    def body(comm: Any) -> None:
        step, other = step_of(comm), net(channels_last=given_in)
        train(step)
        before = {name: weight.clone() for name, weight in step.named_weights()}
        others = {name: p.detach() + 1 for name, p in other.named_parameters()}
        with step.swapped_weights(others):
            assert all(torch.equal(weight, others[name]) for name, weight in step.named_weights())
        assert all(torch.equal(weight, before[name]) for name, weight in step.named_weights())

    threads.run(2, body)


def test_ranks_that_differ_in_it_are_contiguous_and_say_so(caplog):
    def body(comm: Any) -> list[tuple[int, ...]]:
        return orders(step_of(comm, channels_last=comm.rank == 0))

    assert threads.run(2, body) == [[(0, 1, 2, 3)] * 2] * 2
    assert "0.weight does not keep its memory order (channels_last?), and 1 more: ranks differ in it" in caplog.text


def test_a_flat_in_memory_order_is_what_it_was_made_of():
    like = torch.empty(2, 3, 4, 5).permute(2, 0, 3, 1)
    values = torch.randn(like.shape, generator=DRAW)
    assert torch.equal(shaped(flat_of(values, like), like), values)
    assert shaped(flat_of(values, like), like).stride() == like.stride()
    assert flat_of(values.contiguous(), torch.empty(like.shape)).data_ptr() == values.data_ptr()
