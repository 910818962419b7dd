"""Loss sums: what a loss function returns, as a sum and a count.

Law: sums and counts are added up over microbatches and ranks; only then is the sum divided by the count.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fourfold.words.argument_checks import format_argument
from fourfold.words.errors import Problem, TaskError


@dataclass(frozen=True)
class Loss:
    """A loss as a sum over `count` elements. A count computed from tensors stays on their device.

    other_count, other_square  of a loss that is made of several means: see `uneven_means`
    """

    total: Tensor
    count: float | Tensor
    other_count: float | Tensor = 0.0
    other_square: float | Tensor = 0.0


def sum_loss(value: Any, num_samples: int) -> Loss:
    """The sum and count of what a loss function returned: unreduced values, (sum, count), or a mean over the samples.

    Half-precision values are summed in float32: 70,000 samples with a mean of 1.0 overflow float16.
    """
    if isinstance(value, tuple | list) and len(value) == 2:
        return Loss(_checked_sum(value[0]), _checked_count(value[1]))
    if not isinstance(value, Tensor):
        problem = Problem(
            f"a loss of type {type(value).__name__}", "unreduced values, a pair (sum, count), or a scalar"
        )
        raise TaskError(problem)
    if value.is_complex():
        raise TaskError(Problem("a loss of complex numbers", "real numbers", "loss.abs(), or loss.real"))
    dtype = torch.promote_types(value.dtype, torch.float32)
    if value.dim() == 0:
        return Loss(value.to(dtype) * num_samples, float(num_samples))
    return Loss(value.sum(dtype=dtype), float(value.numel()))


def _checked_sum(value: Any) -> Tensor:
    """The sum of a pair (sum, count)."""
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        return value.reshape(())
    shape = f"of shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    raise TaskError(Problem(f"a loss (sum, count) with sum {shape}", "one real number as a tensor", "values.sum()"))


def _checked_count(value: Any) -> float:
    """The count of a pair (sum, count). NaN is allowed (the step becomes a bad step), a negative count is not."""
    if isinstance(value, Tensor) and value.requires_grad:
        got = "a loss (sum, count) whose count requires a gradient, as if it were a second loss"
        attempt = "count.detach(); for two losses, return their sum"
        raise TaskError(Problem(got, "a count without a gradient", attempt))
    try:
        count = float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        count = -1.0
    if not count < 0 and count != math.inf:
        return count
    is_plain = isinstance(value, int | float) or value is None
    shown = format_argument("count", value) if is_plain else f"count = a {type(value).__name__}"
    raise TaskError(Problem(f"a loss (sum, count) with {shown}", "how many elements were summed, 0 or more"))
