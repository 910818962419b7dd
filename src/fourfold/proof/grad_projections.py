"""Gradient projections: each gradient as one number, so that gradients can be compared without storing two sets.

projection  the dot product of a gradient with fixed random numbers; it is linear in the gradient
group       consecutive parameters whose projections are summed
Law: if the gradients of the parts do not add up to the full gradient, their projections do not either.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from fourfold.proof.random_weights import TILE_SIZE

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
