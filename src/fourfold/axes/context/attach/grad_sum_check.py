"""Gradient sum check: the parameter gradients of all token shards add up to those of full sequences.

group  parameters whose projections are summed (`proof/grad_projections.py`), at most MAX_GROUPS groups
Law: if the gradients of a parameter do not add up, the model is refused.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from fourfold.axes.context.rules.layout import DP_INSTEAD
from fourfold.proof import grad_projections
from fourfold.proof.grad_projections import NOISE_FLOOR, Projection, group_size
from fourfold.words.errors import Problem

MAX_GROUPS = 512


class GradProjections(NamedTuple):
    """Gradient projections by group, of full sequences and of one shard; `tolerance` is that of their sums."""

    full: list[Projection]
    shard: list[Projection]
    tolerance: float


def project_grouped_gradients(parameters: Mapping[str, Tensor]) -> list[Projection]:
    """Project the parameters' gradients by group, and free them."""
    return grad_projections.project_gradients(parameters, max_groups=MAX_GROUPS)


def gradient_sum_problem(names: Sequence[str], ranks: Sequence[GradProjections]) -> Problem | None:
    """What is wrong if the gradients of the shards do not add up; `names` are the parameters, in order."""
    size = group_size(len(names), MAX_GROUPS)
    full = ranks[0].full
    tolerance = max(rank.tolerance for rank in ranks)
    largest = max((projection.norm for projection in full), default=0.0)
    for group, expected in enumerate(full):
        parts = [rank.shard[group] for rank in ranks]
        scale = max(expected.norm, *(part.norm for part in parts), NOISE_FLOOR * largest)
        if not abs(sum(part.value for part in parts) - expected.value) <= tolerance * scale:
            members = names[group * size : (group + 1) * size]
            name = members[0] if len(members) == 1 else f"{members[0]} … {members[-1]}"
            got = f"cp = {len(ranks)}, and gradients of {name} that do not add up to those of full sequences"
            need = "a backward in which a token's gradient depends on other tokens only through attention"
            return Problem(got, need, DP_INSTEAD)
    return None
