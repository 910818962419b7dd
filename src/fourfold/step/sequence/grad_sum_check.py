"""Gradient sums: the parameter gradients of all shards of the tokens add up to those of the whole.

group  parameters whose projections are added (`step/dry_run/grad_projections.py`), at most LIMIT of them per rank
Law: where a parameter's gradients do not add up, the model is refused.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from fourfold.step.dry_run import grad_projections
from fourfold.step.dry_run.grad_projections import Projection, group_size
from fourfold.words.errors import Problem

MAX_GROUPS = 512
# Of the largest gradient of the model: a gradient that is 0 in theory is rounding noise in practice.
NOISE_FLOOR = 1e-3


class GradProjections(NamedTuple):
    """The projections of whole sequences' gradients and of one shard's, by group; `close`: how near sums must be."""

    whole: list[Projection]
    shard: list[Projection]
    tolerance: float


def project_grouped_gradients(parameters: Mapping[str, Tensor]) -> list[Projection]:
    """The projections of the parameters' gradients, by group. The gradients are freed."""
    return grad_projections.project_gradients(parameters, max_groups=MAX_GROUPS)


def gradient_sum_problem(names: Sequence[str], ranks: Sequence[GradProjections]) -> Problem | None:
    """What is wrong where the gradients of the shards do not add up; `names` are the parameters of `collected`."""
    each = group_size(len(names), MAX_GROUPS)
    whole = ranks[0].whole
    close = max(rank.tolerance for rank in ranks)
    largest = max((projection.norm for projection in whole), default=0.0)
    for group, expected in enumerate(whole):
        parts = [rank.shard[group] for rank in ranks]
        scale = max(expected.norm, *(part.norm for part in parts), NOISE_FLOOR * largest)
        if not abs(sum(part.value for part in parts) - expected.value) <= close * scale:
            some = names[group * each : (group + 1) * each]
            name = some[0] if len(some) == 1 else f"{some[0]} … {some[-1]}"
            got = f"sp = {len(ranks)}, and gradients of {name} that do not add up to those of whole sequences"
            need = "a backward in which each token's gradient depends on other tokens through attention only"
            return Problem(got, need, "sp = 1, and dp instead")
    return None
