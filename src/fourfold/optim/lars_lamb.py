"""LARS and LAMB: each parameter moves in proportion to its own norm, whatever the norm of its gradient.

direction    the way an element would go: element-wise, from its gradient and its state
trust ratio  ‖weight‖ / ‖direction‖ of a parameter: the one number of an update that depends on a whole parameter
Law: the update of a parameter is the same however it is cut into tensors; on flat buffers it may lie in several.

Sources: LARS, You, Gitman, Ginsburg 2017 (arXiv 1708.03888), eq. 6 and algorithm 1; LAMB, You et al. 2020
(arXiv 1904.00962), algorithm 2, with φ(z) = z as in its experiments.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from fourfold.words.errors import OptimizerError, Problem

# ---- layer-wise updates --------------------------------------------------------------------------------------------

ParamGroup = dict[str, Any]
Ranges = Sequence[tuple[int, int]]


class PendingLayerwiseUpdate(NamedTuple):
    """An update that waits for its norms."""

    optimizer: "LARS | LAMB"
    param_updates: Sequence[tuple[Tensor, Tensor, int, ParamGroup]]
    """Weight, direction, index of the parameter that they are part of, group."""
    squared_norms: Tensor
    """[parameters, 2] float64: sums of squares of weight and direction, over the tensors on this rank."""


def begin_update(
    optimizer: "LARS | LAMB",
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


# ---- lars and lamb -------------------------------------------------------------------------------------------------


class _LayerwiseOptimizer(Optimizer):
    """An optimizer with a trust ratio. `below_one`: its options from 0 to below 1."""

    below_one: ClassVar[tuple[str, ...]]

    def add_param_group(self, param_group: ParamGroup) -> None:
        super().add_param_group(_checked_group(param_group, self.defaults, type(self).__name__, self.below_one))

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update; parameters whose `.grad` is None are left as they are."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        count = sum(len(group["params"]) for group in self.param_groups)
        pending = begin_update(cast("LARS | LAMB", self), range(count), num_parameters=count)
        finish_update(pending, pending.squared_norms)
        return loss


class LARS(_LayerwiseOptimizer):
    """Momentum SGD with layer-wise rates (You et al. 2017, algorithm 1), its momentum in the paper's form:

    λ = trust · ‖w‖ / (‖g‖ + weight_decay · ‖w‖ + eps)
    v ← momentum · v + lr · λ · (g + weight_decay · w)
    w ← w − v

    λ is one number per parameter. It is 1 if ‖w‖ or ‖g‖ is 0, or if the group has `adapt=False`: there `lr` is the
    plain rate of SGD, so a group of biases and gains needs a smaller one than the matrices.
    Raises OptimizerError for options out of range and for a group without elements.
    """

    below_one = ("momentum",)

    def __init__(
        self,
        params: Any,
        lr: float = 1.0,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = 0.001,
        eps: float = 0.0,
        adapt: bool = True,
    ) -> None:
        options = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust, "eps": eps}
        super().__init__(params, {**options, "adapt": adapt})

    def update_direction(self, weight: Tensor, state: dict[str, Any], group: ParamGroup) -> Tensor:
        """What the weight's norm is compared with: the gradient, as the paper takes its norm before weight decay is
        added. Advances the state. Never the weight tensor itself.
        """
        assert weight.grad is not None
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(weight)
        return weight.grad

    def trust_ratio(self, weight_norm: Tensor, norm: Tensor, group: ParamGroup) -> Tensor:
        """λ of a parameter with these norms, both above 0."""
        return group["trust"] * weight_norm / (norm + group["weight_decay"] * weight_norm + group["eps"])

    def apply_update(self, weight: Tensor, direction: Tensor, ratio: Tensor, group: ParamGroup) -> None:
        """Change the weight. `direction` may be overwritten, unless it is the gradient."""
        buffer = self.state[weight]["momentum_buffer"].mul_(group["momentum"])
        step = direction.add(weight, alpha=group["weight_decay"])
        weight.sub_(buffer.add_(step.mul_(ratio * group["lr"])))


class LAMB(_LayerwiseOptimizer):
    """Adam with layer-wise rates (You et al. 2020, algorithm 2), bias correction included:

    m ← β₁ m + (1 − β₁) g,   v ← β₂ v + (1 − β₂) g²
    u = m / (1 − β₁ᵗ) / (√(v / (1 − β₂ᵗ)) + eps) + weight_decay · w
    w ← w − lr · ‖w‖ / ‖u‖ · u

    The ratio is one number per parameter. It is 1 if ‖w‖ or ‖u‖ is 0, or if the group has `adapt=False`: there the
    update is AdamW's. Raises OptimizerError for options out of range and for a group without elements.
    """

    below_one = ("betas",)

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        adapt: bool = True,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "adapt": adapt})

    def update_direction(self, weight: Tensor, state: dict[str, Any], group: ParamGroup) -> Tensor:
        """u: Adam's direction plus weight decay."""
        gradient = weight.grad
        assert gradient is not None
        if not state:
            wide = torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32
            state["step"] = torch.zeros((), dtype=wide)  # on the CPU, like torch's own: it is read in every step
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(weight), torch.zeros_like(weight)
        state["step"] += 1
        number = state["step"].item()
        first, second = group["betas"]
        mean = state["exp_avg"].lerp_(gradient, 1.0 - first)
        square = state["exp_avg_sq"].mul_(second).addcmul_(gradient, gradient, value=1.0 - second)
        root = (square / (1.0 - second**number)).sqrt_().add_(group["eps"])
        u = (mean / (1.0 - first**number)).div_(root)
        return u.add_(weight, alpha=group["weight_decay"])

    def trust_ratio(self, weight_norm: Tensor, norm: Tensor, group: ParamGroup) -> Tensor:
        """‖w‖ / ‖u‖."""
        return weight_norm / norm

    def apply_update(self, weight: Tensor, direction: Tensor, ratio: Tensor, group: ParamGroup) -> None:
        weight.sub_(direction.mul_(ratio * group["lr"]))


LAYERWISE: tuple[type[Optimizer], ...] = (LARS, LAMB)


def _checked_group(group: ParamGroup, defaults: ParamGroup, class_name: str, below_one: Iterable[str]) -> ParamGroup:
    """The group with its parameters in a list. Raises OptimizerError with all problems."""
    params = group["params"]
    members = [params] if isinstance(params, Tensor) else list(params)
    options = {**defaults, **group}
    problems = []
    # A member may be a pair (name, parameter).
    tensors = [member[1] if isinstance(member, tuple) else member for member in members]
    if not any(tensor.numel() for tensor in tensors):
        got = f"{class_name} on an empty group ({len(tensors)} parameters, no elements)"
        need = "at least one weight: the trust ratio is computed from its norm"
        problems.append(Problem(got, need, 'groups = [group for group in groups if group["params"]]'))
    for name in ("lr", "weight_decay", "eps", "trust"):
        if name in options and not options[name] >= 0:
            problems.append(Problem(f"{name} = {options[name]}", "at least 0"))
    for name in below_one:
        values = options[name] if isinstance(options[name], tuple) else (options[name],)
        if not all(0 <= value < 1 for value in values):
            problems.append(Problem(f"{name} = {options[name]}", "at least 0, below 1"))
    if problems:
        raise OptimizerError(problems, where=class_name)
    return {**group, "params": members}
