"""Loss sums: what a loss function returns, as a sum and a count.

A scalar may be made of several means, each over its own count. The losses of the parts of a batch (microbatches, ranks)
then add up to the loss of the whole batch only if these counts have the same ratio in every part.

count         of one part: the weight of its scalar
other_count   of one part: the counts that must be proportional to it, added up with fixed factors
other_square  of one part: other_count² / count
Law: sums and counts are added up over microbatches and ranks; only then is the sum divided by the count. With all three
summed, other_count² = count · other_square if and only if the ratio is the same in every part (Cauchy and Schwarz).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fourfold.words.argument_checks import format_argument
from fourfold.words.errors import Problem, TaskError

Count = float | Tensor
MEND = "return (sum, count), or unreduced values"


@dataclass(frozen=True)
class Loss:
    """A loss as a sum over `count` elements. A count computed from tensors stays on their device."""

    total: Tensor
    count: Count
    other_count: Count = 0.0
    other_square: Count = 0.0


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


def with_others(total: Tensor, count: Count, others: Sequence[Count]) -> Loss:
    """A loss whose `others` must be proportional to its count in every part of a batch."""
    # Factors with no small integer relation between them: differences cannot cancel out.
    other: Count = sum(math.sqrt(2 + index) * each for index, each in enumerate(others))
    if isinstance(other, Tensor) or isinstance(count, Tensor):
        other = torch.as_tensor(other, dtype=torch.float64, device=count.device if isinstance(count, Tensor) else None)
        return Loss(total, count, other, torch.where(other == 0, 0.0, other * other / count))
    square = other * other / count if count else math.inf if other else 0.0
    return Loss(total, count, other, square)


def is_uneven(count: float, other_count: float, other_square: float) -> bool:
    """Whether the counts of several means, each summed over all parts, are not proportional from part to part."""
    square = other_count * other_count
    return bool(other_count) and not count * other_square - square <= 1e-10 * square


def uneven_problem(names: str) -> Problem:
    """The problem of a loss whose means are uneven. `names`: the loss functions that took the means."""
    what = f"means over different elements ({names})" if names else "means over different elements"
    got = f"a loss that is one number, made of {what}, whose counts are not proportional from part to part of the batch"
    return Problem(got, "one count for each part, so that the parts add up to the batch", MEND)


def other_form_problem() -> Problem:
    """The problem of a scalar that no dry run has seen."""
    got = "a scalar loss, where the first batch had unreduced values or a pair (sum, count)"
    return Problem(got, "one form of loss for every batch: whether a scalar is a mean is checked on the first", MEND)


def scale_problem(count: float, nominal: float) -> Problem:
    """The problem of a backward that is not linear in the upstream gradient, in a step of another count."""
    got = "a backward that changes gradients by their size (a clamp, a sign, a threshold, in a hook or a function"
    got += f" of your own), and a batch of {count:g} counted elements where gradients were divided by {nominal:g}"
    need = "as many in every microbatch and step, so that gradients have the size that they have on one device"
    return Problem(got, need, "microbatches = 1, or drop_last=True; or bound the whole gradient instead (clip)")


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
