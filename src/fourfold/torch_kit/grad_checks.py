"""Gradient checks: gradients that cannot be reduced.

Law: each error names the parameter and says what to change in the user's code.
"""

from typing import NoReturn

import torch
from torch import Tensor

from fourfold.words.errors import Problem, TaskError, TrainingError


def raise_grad_cleared(name: str) -> NoReturn:
    """Raise TaskError for a gradient that a hook has removed before it could be reduced."""
    got = f"a hook has set .grad of {name} to None"
    need = "the gradient left in .grad: the update takes it from there, after all hooks"
    raise TaskError(Problem(got, need, "a hook that reads .grad, or changes it"))


def raise_grad_written(name: str) -> NoReturn:
    """Raise TrainingError for a `.grad` that something else has written in the same backward."""
    got = f".grad of {name}, written again in the backward that it was taken from (by DistributedDataParallel?)"
    need = "one that reduces gradients: a second one would lose them"
    raise TrainingError(Problem(got, need, "the plain model in the loop: model.module(…) in place of model(…)"))


def raise_grad_has_graph(name: str) -> NoReturn:
    """Raise TaskError for a gradient that has a graph: its derivative would be lost in the reduction."""
    got = f"backward(create_graph=True), which gives .grad of {name} a graph"
    need = "gradients without a graph: a mean over ranks has none"
    attempt = "torch.autograd.grad(loss, parameters, create_graph=True) in the loss, then backward()"
    raise TaskError(Problem(got, need, attempt))


def check_dense(gradient: Tensor | None, name: str) -> None:
    """Raise TaskError for a sparse gradient."""
    if gradient is not None and gradient.layout is not torch.strided:
        raise TaskError(Problem(f"{name} has a sparse gradient", "dense gradients", "sparse=False"))


def second_grad_problem(name: str) -> Problem:
    """The problem of a parameter that gets two gradients in one backward."""
    got = f"two gradients of {name} in one backward (a reentrant checkpoint around its layer?)"
    return Problem(got, "one, with all uses added up", "checkpoint(…, use_reentrant=False)")


def raise_second_grad(name: str) -> NoReturn:
    """Raise TaskError for the second gradient of a parameter in one backward."""
    raise TaskError(second_grad_problem(name))
