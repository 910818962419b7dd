"""Layer-wise updates: each parameter moves in proportion to its own norm.

direction    the way an element would go: element-wise, from its gradient and its state
trust ratio  ‖weight‖ / ‖direction‖ of a parameter: the one number of an update that depends on a whole parameter
Law: the update of a parameter is the same however it is cut into tensors; on flat buffers it may lie in several.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fourfold.words.errors import OptimizerError, Problem

ParamGroup = dict[str, Any]
Ranges = Sequence[tuple[int, int]]


class LayerwiseOptimizer(Protocol):
    """The parts of an optimizer with a trust ratio."""

    param_groups: list[ParamGroup]
    state: Any

    def update_direction(self, weight: Tensor, state: dict[str, Any], group: ParamGroup) -> Tensor:
        """What the weight's norm is compared with. Advances the state. Never the weight tensor itself."""
        ...

    def trust_ratio(self, weight_norm: Tensor, norm: Tensor, group: ParamGroup) -> Tensor:
        """The trust ratio of a parameter with these norms, both above 0."""
        ...

    def apply_update(self, weight: Tensor, direction: Tensor, ratio: Tensor, group: ParamGroup) -> None:
        """Change the weight. `direction` may be overwritten, unless it is the gradient."""
        ...


class PendingLayerwiseUpdate(NamedTuple):
    """An update that waits for its norms."""

    optimizer: LayerwiseOptimizer
    param_updates: Sequence[tuple[Tensor, Tensor, int, ParamGroup]]
    """Weight, direction, index of the parameter that they are part of, group."""
    squared_norms: Tensor
    """[parameters, 2] float64: sums of squares of weight and direction, over the tensors on this rank."""


def begin_update(
    optimizer: LayerwiseOptimizer,
    param_indices: Sequence[int],
    *,
    num_parameters: int,
    counted: Sequence[Ranges | None] | None = None,
) -> PendingLayerwiseUpdate:
    """The element-wise half of an update: directions, and this rank's part of the squared norms.

    Tensors without gradient are left out. Raises OptimizerError for a sparse gradient.

    param_indices  for each tensor of the optimizer, the index of the parameter that it is part of
    counted        for each tensor, which is flat, the elements whose squares this rank adds; None: all
    """
    tensors = [(weight, group) for group in optimizer.param_groups for weight in group["params"]]
    device = tensors[0][0].device if tensors else None
    squares = torch.zeros(num_parameters, 2, dtype=torch.float64, device=device)
    updates = []
    counted = counted or [None] * len(tensors)
    for (weight, group), param_index, ranges in zip(tensors, param_indices, counted, strict=True):
        if weight.grad is None:
            continue
        if weight.grad.layout is not torch.strided:
            raise OptimizerError(Problem("a sparse gradient", "dense gradients", "sparse=False"))
        direction = optimizer.update_direction(weight, optimizer.state[weight], group)
        pairs = [(weight, direction)] if ranges is None else [(weight[a:b], direction[a:b]) for a, b in ranges]
        for parts in pairs:
            squares[param_index] += torch.stack([_squared_norm(part) for part in parts])
        updates.append((weight, direction, param_index, group))
    return PendingLayerwiseUpdate(optimizer, updates, squares)


def finish_update(pending: PendingLayerwiseUpdate, squared_norms: Tensor) -> None:
    """The second half: `squared_norms` [parameters, 2] are those of whole parameters."""
    norms = squared_norms.sqrt()
    one = torch.ones((), dtype=norms.dtype, device=norms.device)
    for weight, direction, param_index, group in pending.param_updates:
        weight_norm, norm = norms[param_index]
        adapted = group["adapt"] & (weight_norm > 0) & (norm > 0)
        ratio = torch.where(adapted, pending.optimizer.trust_ratio(weight_norm, norm, group), one)
        pending.optimizer.apply_update(weight, direction, ratio, group)


def _squared_norm(tensor: Tensor) -> Tensor:
    # Squares of two-byte numbers overflow or underflow.
    wide = torch.float32 if tensor.dtype.itemsize < 4 else None
    return torch.linalg.vector_norm(tensor, dtype=wide).double().square()
