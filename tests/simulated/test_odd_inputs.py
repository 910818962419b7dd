"""Laws of unusual user inputs: accepted if they are unambiguous, else refused by name."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fourfold as ff
from fourfold.feed.source import TensorSource
from fourfold.step.initial_model import build_meta_model
from fourfold.words.errors import TaskError

PLAIN_PLAN = ff.Plan(dp=2, zero=1, outer_lr=0.5, transport="gloo")
ROWS = TensorSource(torch.ones(8, 4), torch.ones(8, 1))
TASK = ff.Task(
    model=lambda: nn.Linear(4, 1),
    loss=lambda outputs, targets: (outputs - targets) ** 2,
    data=lambda: ff.Data(train=ROWS, valid=ROWS),
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    steps=1,
    batch_size=4,
)


@pytest.mark.parametrize("lr", [np.float32(0.125), np.float64(0.125), torch.tensor(0.125)])
def test_numpy_learning_rates_are_saved_and_loaded(lr: Any, tmp_path):
    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=lr, betas=(np.float64(0.5), 0.9))

    task = dataclasses.replace(TASK, optimizer=make)
    assert ff.train(task, folder=str(tmp_path)).steps == 1
    assert ff.train(task, folder=str(tmp_path)).steps == 1  # from its checkpoint


@pytest.mark.parametrize(
    "found", [{"a": ("x", 1)}, {"a": ("3", 1)}, {3: (1, 3)}, {"a": (torch.ones(2), 3)}, {"a": (1j, 3)}]
)
def test_metrics_that_are_not_numbers_are_refused(found: Any, tmp_path):
    task = dataclasses.replace(TASK, evaluate=lambda outputs, targets: found)
    with pytest.raises(TaskError, match="a dict from names to pairs"):
        ff.train(task, folder=str(tmp_path))


def _checked(error: Callable[[str], Exception]) -> nn.Module:
    model = nn.Linear(4, 1)
    if model.weight.is_meta:
        raise error("a device without values")
    return model


@pytest.mark.parametrize("error", [ValueError, AssertionError, KeyError])
def test_a_model_that_fails_on_the_meta_device_is_built_with_values(error: Callable[[str], Exception]):
    assert not build_meta_model(dataclasses.replace(TASK, model=lambda: _checked(error))).weight.is_meta


@pytest.mark.parametrize("keep", [functools.cache, functools.lru_cache(maxsize=1)])
def test_a_cached_model_function_is_trained(keep: Callable[..., Any], tmp_path):
    kept = keep(lambda: nn.Linear(4, 1))
    before = ff.train(dataclasses.replace(TASK, model=kept), folder=str(tmp_path)).steps
    assert before == 1
    assert not kept().weight.is_meta
    assert not build_meta_model(dataclasses.replace(TASK, model=keep(lambda: _checked(ValueError)))).weight.is_meta


def test_plans_accept_numpy_scalars():
    plan = ff.Plan(dp=np.int64(2), zero=np.uint8(1), outer_lr=np.float64(0.5), transport=np.str_("gloo"))  # pyright: ignore[reportArgumentType]
    assert plan == ff.Plan(dp=2, zero=1, outer_lr=0.5, transport="gloo")
    assert [type(value) for value in dataclasses.astuple(plan)] == [type(v) for v in dataclasses.astuple(PLAIN_PLAN)]
    assert ff.Plan.from_toml(plan.to_toml()) == plan


@pytest.mark.parametrize(
    "value", [True, np.True_, 2.0, np.float64(2), "2", torch.tensor(2), np.int64(0), np.array([2])]
)
def test_plans_refuse_values_that_are_not_integers(value: Any):
    with pytest.raises(ff.PlanError, match="a whole number from 1 to"):
        ff.Plan(dp=value)
