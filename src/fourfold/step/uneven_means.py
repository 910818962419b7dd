"""Uneven means: whether the counts of several means have the same ratio in all parts of a batch.

A scalar loss may be made of several means, each over its own count of elements. The losses of the parts of a batch
(microbatches, ranks) add up to the loss of the whole batch only if these counts have the same ratio in every part.

count         in one part, the count of the first mean
other_count   in one part, the counts of the other means, added up with fixed factors
other_square  in one part, other_count² / count
Law: with all three summed over the parts, other_count² = count · other_square if and only if the ratio is the same in
every part (Cauchy and Schwarz). So three sums over the ranks find an uneven loss, which is refused.
"""

import math

import torch
from torch import Tensor

from fourfold.step.torch_losses import Count
from fourfold.words.errors import Problem


def uneven_problem(names: str) -> Problem:
    """The problem of a loss whose means are uneven. `names`: the loss functions that took the means."""
    what = f"means over different elements ({names})" if names else "means over different elements"
    got = f"a loss that is one number, made of {what}, whose counts are not proportional from part to part of the batch"
    need = "one count for each part, so that the parts add up to the batch"
    return Problem(got, need, "unreduced values, or a pair (sum, count)")


def is_uneven(count: float, other_count: float, other_square: float) -> bool:
    """Whether the counts of several means, each summed over all parts, are not proportional from part to part."""
    return (
        bool(other_count) and not count * other_square - other_count * other_count <= 1e-10 * other_count * other_count
    )


def actual_divisor(value: Tensor, total: Tensor, expected: Count) -> Count:
    """What the user divided `total` by to get `value`: `expected`, unless it is off by more than rounding."""
    tolerance = 1e-5 if min(value.dtype.itemsize, total.dtype.itemsize) >= 4 else 2e-2
    value, total = value.double(), total.detach().double()
    wanted = torch.as_tensor(expected, dtype=torch.float64, device=value.device)
    is_off = (value * wanted - total).abs() > tolerance * total.abs()  # False where either is NaN
    divisor = (total / value).where(is_off & (value != 0), wanted)
    return float(divisor) if divisor.device.type == "cpu" else divisor


def squared_ratio(other: Count, count: Count) -> Count:
    """other² / count; 0 if both are 0."""
    if isinstance(other, Tensor) or isinstance(count, Tensor):
        other = torch.as_tensor(other, dtype=torch.float64, device=count.device if isinstance(count, Tensor) else None)
        return torch.where(other == 0, 0.0, other * other / count)
    if count == 0:
        return math.inf if other else 0.0
    return other * other / count
