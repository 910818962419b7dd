"""Batches: (inputs, targets), tensors or dicts of tensors whose first dim counts samples.

Law: the microbatches of a batch tile it, in order; there may be empty ones.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fourfold.plan.order import share
from fourfold.words.errors import Problem, TaskError

POSITION_NAMES = ("position_ids", "positions")


class Microbatch(NamedTuple):
    """A stretch of a batch; `tokens` is 0 where inputs carry no positions."""

    inputs: Any
    targets: Any
    samples: int
    tokens: int


def cut(batch: Any, count: int, device: torch.device) -> list[Microbatch]:
    """The batch in `count` microbatches on `device`, sizes as equal as can be, larger ones never first.

    Raises TaskError for what is not a pair of tensors or dicts of tensors with one number of samples.
    """
    if not (isinstance(batch, tuple | list) and len(batch) == 2):
        raise TaskError(Problem(f"a batch of type {type(batch).__name__}", "a pair (inputs, targets)"))
    inputs, targets = (_to(part, device) for part in batch)
    lengths = {tensor.shape[0] for tensor in (*_tensors(inputs), *_tensors(targets))}
    if len(lengths) != 1:
        raise TaskError(Problem(f"first dims {sorted(lengths)}", "one number of samples in inputs and targets"))
    (samples,) = lengths
    parts = []
    for index in range(count):
        start, stop = share(0, samples, count, index)
        some = _slice(inputs, start, stop)
        parts.append(Microbatch(some, _slice(targets, start, stop), stop - start, num_tokens(some)))
    return parts


def call(model: torch.nn.Module, inputs: Any) -> Any:
    """The model's outputs: a dict of inputs is given as keywords."""
    return model(**inputs) if isinstance(inputs, dict) else model(inputs)


@contextlib.contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Evaluation mode inside; afterwards every module is in the mode it was in."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def num_tokens(inputs: Any) -> int:
    """Elements of the positions, where the inputs are a dict with `position_ids` or `positions`; else 0."""
    if not isinstance(inputs, dict):
        return 0
    return next((inputs[name].numel() for name in POSITION_NAMES if name in inputs), 0)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return [tensor for part in value.values() for tensor in _tensors(part)]
    raise TaskError(Problem(f"a batch with a {type(value).__name__}", "tensors, or dicts of tensors"))


def _to(value: Any, device: torch.device) -> Any:
    if isinstance(value, dict):
        return {name: _to(part, device) for name, part in value.items()}
    return value.to(device, non_blocking=True) if isinstance(value, Tensor) else value


def _slice(value: Any, start: int, stop: int) -> Any:
    if isinstance(value, dict):
        return {name: _slice(part, start, stop) for name, part in value.items()}
    return value[start:stop]


@dataclass(frozen=True)
class Loss:
    """A loss as a sum over `count` elements."""

    total: Tensor
    count: float


def measure(value: Any, samples: int) -> Loss:
    """What a loss function returned, as a sum and a count.

    Unreduced values count their elements; a pair is (sum, count); a scalar is a mean over the samples. Sums of values
    in half precision are made in float32: a mean of 1.0 over 70,000 samples is beyond what float16 can hold.
    """
    if isinstance(value, tuple | list) and len(value) == 2:
        return Loss(value[0], float(value[1]))
    if not isinstance(value, Tensor):
        problem = Problem(
            f"a loss of type {type(value).__name__}", "unreduced values, a pair (sum, count), or a scalar"
        )
        raise TaskError(problem)
    dtype = torch.promote_types(value.dtype, torch.float32)
    if value.dim() == 0:
        return Loss(value.to(dtype) * samples, float(samples))
    return Loss(value.sum(dtype=dtype), float(value.numel()))
