"""Tolerance: whether numbers that were computed in two ways are the same, but for rounding.

tolerance  the largest difference, relative to the largest number: rounding stays below it, mixed tokens do not
floor      a size below which numbers are rounding noise, as are gradients that are 0 in theory
"""

import torch
from torch import Tensor

# In float64, 29 model types of transformers differ by at most 2e-14, gradients included.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}
HALF_TOLERANCE = 5e-2
# Gradients accumulate more rounding: in bfloat16, the sums of these models' gradients differ by up to 3e-2.
GRADIENT_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-2}
HALF_GRADIENT_TOLERANCE = 0.2


def tolerance_of(dtype: torch.dtype) -> float:
    return TOLERANCE.get(dtype.to_real(), HALF_TOLERANCE)


def gradient_tolerance_of(dtype: torch.dtype) -> float:
    return GRADIENT_TOLERANCE.get(dtype.to_real(), HALF_GRADIENT_TOLERANCE)


@torch.no_grad()  # a checkpoint counts what autograd saves in it
def is_close(expected: Tensor, actual: Tensor, tolerance: float | None = None, *, floor: float = 0.0) -> bool:
    if expected.is_complex():
        expected, actual = (torch.view_as_real(tensor.resolve_conj()) for tensor in (expected, actual))
    if not expected.is_floating_point():
        return torch.equal(expected, actual)
    if not torch.equal(expected.isnan(), actual.isnan()):
        return False
    if not expected.numel():
        return True
    tolerance = tolerance_of(expected.dtype) if tolerance is None else tolerance
    expected, actual = (torch.nan_to_num(tensor, posinf=0.0, neginf=0.0).double() for tensor in (expected, actual))
    return (expected - actual).abs().max().item() <= tolerance * max(expected.abs().max().item(), floor, 1e-30)
