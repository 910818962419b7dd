"""Gradients of a dry run: how they are computed, and compared as one number each, without storing two sets.

projection  the dot product of a gradient with fixed random numbers; it is linear in the gradient
group       consecutive parameters whose projections are summed
tolerance   the largest difference, relative to the largest number: rounding stays below it, mixed tokens do not
floor       a size below which numbers are rounding noise, as are gradients that are 0 in theory
Law: if the gradients of the parts do not add up to the full gradient, their projections do not either.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fourfold.axes.tensor.work.split_logits import whole_logits
from fourfold.proof.random_weights import TILE_SIZE
from fourfold.torch_kit.tensor_tree import tree_leaves
from fourfold.torch_kit.torch_private import run_backward_under_modes

# ---- tolerance ------------------------------------------------------------------------------------------------------


# In float64, 29 model types of transformers differ by at most 2e-14, gradients included.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}
HALF_TOLERANCE = 5e-2
# Gradients accumulate more rounding: in bfloat16, the sums of these models' gradients differ by up to 3e-2.
GRADIENT_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-2}
HALF_GRADIENT_TOLERANCE = 0.2


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
    tolerance = TOLERANCE.get(expected.dtype, HALF_TOLERANCE) if tolerance is None else tolerance
    expected, actual = (torch.nan_to_num(tensor, posinf=0.0, neginf=0.0).double() for tensor in (expected, actual))
    return (expected - actual).abs().max().item() <= tolerance * max(expected.abs().max().item(), floor, 1e-30)


# ---- backward of the dry run ----------------------------------------------------------------------------------------


def run_backward(outputs: Any, grad_tensors: list[Tensor | None]) -> None:
    """Run backward from all outputs with these upstream gradients (None: skip the output).

    Torch function modes stay active, as in forward.
    """
    pairs = [
        (whole_logits(output), gradient)
        for output, gradient in zip(tree_leaves(outputs), grad_tensors, strict=True)
        if gradient is not None
    ]
    if not pairs:
        return
    roots, gradients = zip(*pairs, strict=True)
    # The modes would intercept `torch.autograd.backward` and run it with themselves off: a checkpoint would recompute
    # its forward in another dtype.
    run_backward_under_modes(roots, gradients)


@contextlib.contextmanager
def count_gradients(parameters: Mapping[str, Tensor]) -> Iterator[Mapping[str, int]]:
    """Context manager: counts how many gradients each parameter gets."""
    counts = dict.fromkeys(parameters, 0)

    def make_hook(name: str) -> Callable[[Tensor], None]:
        return lambda _: counts.__setitem__(name, counts[name] + 1)

    hooks = [p.register_post_accumulate_grad_hook(make_hook(name)) for name, p in parameters.items()]
    try:
        yield counts
    finally:
        for hook in hooks:
            hook.remove()


# ---- gradient projections -------------------------------------------------------------------------------------------


SEED = 7
# Relative to the largest gradient of the model: a gradient that is 0 in theory is rounding noise in practice.
NOISE_FLOOR = 1e-3


class Projection(NamedTuple):
    """The projection of a gradient, and its norm."""

    value: float
    norm: float


def project_gradients(parameters: Mapping[str, Tensor], *, max_groups: int | None = None) -> list[Projection]:
    """Project the gradients of the parameters, in at most `max_groups` groups (None: one each), and free them."""
    count = min(TILE_SIZE, max((2 * p.numel() for p in parameters.values()), default=0))  # 2: complex
    numbers = torch.randn(count, generator=torch.Generator().manual_seed(SEED)).double()
    values, norms = [], []
    for parameter in parameters.values():
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            gradient = torch.zeros((), device=parameter.device)
        flat = (torch.view_as_real(gradient) if gradient.is_complex() else gradient).to_dense().double().flatten()
        numbers = numbers.to(flat.device)
        values.append(_project(flat, numbers))
        norms.append(torch.linalg.vector_norm(flat))
    if not values:
        return []
    table = torch.stack([torch.stack(values), torch.stack(norms)]).T.tolist()
    size = group_size(len(table), max_groups)
    groups = [table[start : start + size] for start in range(0, len(table), size)]
    return [Projection(sum(value for value, _ in group), max(norm for _, norm in group)) for group in groups]


def group_size(num_params: int, max_groups: int | None) -> int:
    """The number of parameters in a group, such that there are at most `max_groups` groups."""
    return 1 if max_groups is None else max(1, math.ceil(num_params / max_groups))


def _project(flat: Tensor, numbers: Tensor) -> Tensor:
    full = flat.numel() // TILE_SIZE
    if not full:
        return flat @ numbers[: flat.numel()]
    rows = flat[: full * TILE_SIZE].view(full, TILE_SIZE)
    weights = numbers.repeat(math.ceil(full / TILE_SIZE))[:full]
    remainder = flat[full * TILE_SIZE :]
    return (rows @ numbers) @ weights + remainder @ numbers[: remainder.numel()]
