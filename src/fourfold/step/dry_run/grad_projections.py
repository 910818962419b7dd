"""Projections: a gradient in one number, so that gradients can be compared without a second set of them.

projection  a gradient's product with fixed random numbers: projections of summands add up to the projection of the sum
group       consecutive parameters whose projections are added
Law: where a parameter's gradients do not add up, their projections do not.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from fourfold.step.dry_run.random_weights import TILE_SIZE

SEED = 7


class Projection(NamedTuple):
    """A gradient's projection, and its norm."""

    value: float
    norm: float


def project_gradients(parameters: Mapping[str, Tensor], *, max_groups: int | None = None) -> list[Projection]:
    """The projections of the parameters' gradients, in at most `limit` groups; None: one each. Gradients are freed."""
    count = min(TILE_SIZE, max((2 * p.numel() for p in parameters.values()), default=0))  # of complex ones both parts
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
    each = group_size(len(table), max_groups)
    groups = [table[start : start + each] for start in range(0, len(table), each)]
    return [Projection(sum(value for value, _ in group), max(norm for _, norm in group)) for group in groups]


def group_size(num_params: int, max_groups: int | None) -> int:
    """How many of `count` parameters make a group, so that there are at most `limit` groups."""
    return 1 if max_groups is None else max(1, math.ceil(num_params / max_groups))


def _project(flat: Tensor, numbers: Tensor) -> Tensor:
    full = flat.numel() // TILE_SIZE
    if not full:
        return flat @ numbers[: flat.numel()]
    rows = flat[: full * TILE_SIZE].view(full, TILE_SIZE)
    weights = numbers.repeat(math.ceil(full / TILE_SIZE))[:full]
    rest = flat[full * TILE_SIZE :]
    return (rows @ numbers) @ weights + rest @ numbers[: rest.numel()]
