"""Scalar room: how many values one sum of scalars can carry."""

from torch import Tensor

from fourfold.words.errors import Problem, TrainingError

NUM_LOSS_SCALARS = 9
"""The room for each kind of scalars of the world."""


def check_room(values: Tensor, capacity: int) -> None:
    """Raise TrainingError for more values than there is room for: they would overwrite what lies behind it."""
    if values.numel() > capacity:
        raise TrainingError(Problem(f"{values.numel()} scalars in one sum", f"at most {capacity}"))
