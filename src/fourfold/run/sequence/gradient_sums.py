"""Gradient sums: the parameter gradients of all shards of the tokens add up to those of the whole.

projection  a gradient's product with fixed random numbers: projections of summands add up to the projection of the sum
group       parameters whose projections are added, so that a rank sends at most LIMIT of them
Law: where a parameter's gradients do not add up, their projections do not.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fourfold.run.sequence.random_weights import PERIOD
from fourfold.words.errors import Problem

LIMIT = 512
SEED = 7
# Of the largest gradient of the model: a gradient that is 0 in theory is rounding noise in practice.
NOISE = 1e-3


class Projection(NamedTuple):
    """A gradient's projection, and its norm."""

    value: float
    norm: float


class Gradients(NamedTuple):
    """The projections of whole sequences' gradients and of one shard's, by group; `close`: how near sums must be."""

    whole: list[Projection]
    part: list[Projection]
    close: float


def collected(parameters: Mapping[str, Tensor]) -> list[Projection]:
    """The projections of the parameters' gradients, by group. The gradients are freed."""
    count = min(PERIOD, max((2 * p.numel() for p in parameters.values()), default=0))  # of complex ones both parts
    numbers = torch.randn(count, generator=torch.Generator().manual_seed(SEED)).double()
    values, norms = [], []
    for parameter in parameters.values():
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            gradient = torch.zeros((), device=parameter.device)
        flat = (torch.view_as_real(gradient) if gradient.is_complex() else gradient).to_dense().double().flatten()
        numbers = numbers.to(flat.device)
        values.append(_projected(flat, numbers))
        norms.append(torch.linalg.vector_norm(flat))
    if not values:
        return []
    table = torch.stack([torch.stack(values), torch.stack(norms)]).T.tolist()
    each = math.ceil(len(table) / LIMIT)
    groups = [table[start : start + each] for start in range(0, len(table), each)]
    return [Projection(sum(value for value, _ in group), max(norm for _, norm in group)) for group in groups]


def _projected(flat: Tensor, numbers: Tensor) -> Tensor:
    full = flat.numel() // PERIOD
    if not full:
        return flat @ numbers[: flat.numel()]
    rows = flat[: full * PERIOD].view(full, PERIOD)
    weights = numbers.repeat(math.ceil(full / PERIOD))[:full]
    rest = flat[full * PERIOD :]
    return (rows @ numbers) @ weights + rest @ numbers[: rest.numel()]


def problem(names: Sequence[str], ranks: Sequence[Gradients]) -> Problem | None:
    """What is wrong where the gradients of the shards do not add up; `names` are the parameters of `collected`."""
    each = math.ceil(len(names) / LIMIT)
    whole = ranks[0].whole
    close = max(rank.close for rank in ranks)
    largest = max((projection.norm for projection in whole), default=0.0)
    for group, expected in enumerate(whole):
        parts = [rank.part[group] for rank in ranks]
        scale = max(expected.norm, *(part.norm for part in parts), NOISE * largest)
        if not abs(sum(part.value for part in parts) - expected.value) <= close * scale:
            some = names[group * each : (group + 1) * each]
            name = some[0] if len(some) == 1 else f"{some[0]} … {some[-1]}"
            got = f"sp = {len(ranks)}, and gradients of {name} that do not add up to those of whole sequences"
            need = "a backward in which each token's gradient depends on other tokens through attention only"
            return Problem(got, need, "sp = 1, and dp instead")
    return None
