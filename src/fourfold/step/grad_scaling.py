"""Gradient scaling: where sums of gradients are multiplied by the grad scale.

grad scale  the factor that turns reduced sums into the gradient of the mean; None while the totals are not known
Law: a sum is multiplied once, in one pass over it that is made anyway.
"""

from collections.abc import Iterable
from typing import Protocol

from fourfold.comm.reduce.protocol import GradReducer


class GradScaling(Protocol):
    """Where sums are scaled. `scale` is the grad scale."""

    def sum_factor(self, scale: float | None) -> float | None:
        """What the reducers multiply sums by; None: not known yet."""
        ...

    def update_factor(self, scale: float) -> float:
        """What the sums must still be multiplied by when they are used."""
        ...

    def clip(self, coefficient: float, reducers: Iterable[GradReducer]) -> float:
        """Make gradients smaller by a coefficient; returns what the grad scale is multiplied by."""
        ...


class ScaledSums:
    """Reducers scale the sums: states rest whole, and the update uses the sums as they are."""

    def sum_factor(self, scale: float | None) -> float | None:
        return scale

    def update_factor(self, scale: float) -> float:
        return 1.0

    def clip(self, coefficient: float, reducers: Iterable[GradReducer]) -> float:
        if coefficient != 1.0:
            for reducer in reducers:
                reducer.scale_grads(coefficient)
        return 1.0


class ScaledInUpdate:
    """The update scales the gradients that it prepares or converts."""

    def sum_factor(self, scale: float | None) -> float | None:
        return 1.0

    def update_factor(self, scale: float) -> float:
        return scale

    def clip(self, coefficient: float, reducers: Iterable[GradReducer]) -> float:
        return coefficient


def make_scaling(*, is_whole: bool, converts_grads: bool) -> GradScaling:
    """`is_whole`: states rest whole. `converts_grads`: the update reads every gradient to convert it anyway."""
    return ScaledSums() if is_whole and not converts_grads else ScaledInUpdate()
