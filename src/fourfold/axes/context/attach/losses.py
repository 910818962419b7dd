"""Losses with cp > 1: whether losses and gradients of token shards add up to those of all tokens.

mean     a scalar loss must be torch's own mean of all elements, so that the number of elements is known
even     each rank has the same number of elements; then the mean of the ranks' means is the mean
ignored  targets that torch's losses leave out, as with `ignore_index`
group    parameters whose projections are summed (`proof/grad_projections.py`), at most MAX_GROUPS groups
Law: the sums and counts of the ranks add up to those of all tokens, or the loss is refused. If the gradients of a
parameter do not add up, the model is.
"""

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fourfold.axes.context.attach.token_shards import TokenShard, shard_tokens
from fourfold.axes.context.rules.layout import DP_INSTEAD
from fourfold.model.batch import has_token_dim
from fourfold.model.loss_sum import sum_loss
from fourfold.model.sdpa_interception import AttentionCall, intercept_attention
from fourfold.model.torch_losses import RESHAPING_NODES, ignore_index_of
from fourfold.proof import grad_projections
from fourfold.proof.float64_mode import Float64Mode, WidenOperandsMode
from fourfold.proof.grad_projections import NOISE_FLOOR, Projection, group_size
from fourfold.proof.random_weights import cast_real
from fourfold.torch_kit.tensor_tree import tree_leaves, tree_map
from fourfold.torch_kit.torch_private import (
    REDUCTION_MEAN,
    saved_class_weights,
    saved_input,
    saved_input_numel,
    saved_reduction,
    saved_total_weight,
)
from fourfold.words.errors import Problem, TaskError

# ---- gradient sum check ---------------------------------------------------------------------------------------------


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


# ---- losses with cp > 1 ---------------------------------------------------------------------------------------------


UNREDUCED_ADVICE = 'unreduced values (reduction="none"), or a pair (sum, count)'
# Both sides sum the same numbers, so they differ only by rounding. By the size in bytes of the least precise ones.
TOLERANCE = {8: 1e-9, 4: 1e-5, 2: 1e-2, 1: 1e-2}
# The autograd nodes that average elements.
NLL_NODES = {"NllLossBackward0", "NllLoss2DBackward0"}
REDUCED_LOSS_NODES = {
    f"{name}Backward0"
    for name in ("MseLoss", "SmoothL1Loss", "HuberLoss", "BinaryCrossEntropy", "BinaryCrossEntropyWithLogits")
}
MEAN_NODES = {"MeanBackward0", "MeanBackward1"}
# These may select other elements in another batch.
INDEXING_NODES = {"IndexBackward0", "MaskedSelectBackward0", "TakeBackward0"}


class LossSum(NamedTuple):
    """A loss, as a sum over elements."""

    total: float
    num_elements: float

    @property
    def mean(self) -> float:
        return self.total / self.num_elements if self.num_elements else 0.0


class ObservedLoss(NamedTuple):
    """A loss. `is_mean`: it was a scalar; `non_mean_op`: the operation that made that scalar, if that is no mean.

    gradients  those of the sum by the outputs
    """

    loss_sum: LossSum
    is_mean: bool
    ignored_indices: list[int]
    non_mean_op: str | None
    tolerance: float
    gradients: Sequence[Tensor]


def observe_losses(
    loss: Callable[[Any, Any], Any], outputs: Any, targets: Any, shard: TokenShard
) -> list[ObservedLoss]:
    """The loss of all tokens and of a shard of them; in float64, where it runs there.

    Both are computed from the same outputs, so that they differ by the loss alone.
    """
    for dtype in (torch.float64, None):
        whole = tree_map((outputs, targets), lambda tensor, to=dtype: cast_real(tensor, to))
        with contextlib.suppress(Exception) if dtype is not None else contextlib.nullcontext():
            return [_observe_loss(loss, o, t, dtype) for o, t in (whole, shard_tokens(whole, shard))]
    raise AssertionError("the loss in its own dtype returns or raises")


@torch.enable_grad()
def _observe_loss(
    loss: Callable[[Any, Any], Any], outputs: Any, targets: Any, dtype: torch.dtype | None
) -> ObservedLoss:
    """Compute a loss, and observe how."""
    ignored, num_samples = [], len(next(tree_leaves(targets)))

    def observe(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if (index := ignore_index_of(func, args, kwargs)) is not None:
            ignored.append(index)

    outputs = tree_map(outputs, lambda t: t.detach().requires_grad_() if t.is_floating_point() else t)
    wide = contextlib.nullcontext() if dtype is None else Float64Mode(new_tensors=True)
    with wide, WidenOperandsMode({}, dtype) as operands, intercept_attention(AttentionCall.run_sdpa, observer=observe):
        value = loss(tree_map(outputs, torch.clone), targets)  # it may write into them
    numbers = [t.dtype.itemsize for t in tree_leaves((outputs, value)) if t.is_floating_point()]
    tolerance = TOLERANCE[min([*numbers, operands.min_itemsize])]
    if isinstance(value, Tensor) and value.dim() == 0:
        count, non_mean_op = _num_averaged(value), None
        if count is None:
            non_mean_op = "the model" if value.grad_fn is None else value.grad_fn.name()
        loss_sum = LossSum(float(value.detach()) * (count or 0.0), count or 0.0)
        gradients = _gradients(value * (count or 0.0), outputs)
        return ObservedLoss(loss_sum, True, ignored, non_mean_op, tolerance, gradients)
    total = sum_loss(value, num_samples)
    loss_sum = LossSum(float(total.total.detach()), float(total.count))
    return ObservedLoss(loss_sum, False, ignored, None, tolerance, _gradients(total.total, outputs))


def _gradients(total: Tensor, outputs: Any) -> Sequence[Tensor]:
    leaves = [each for each in tree_leaves(outputs) if each.requires_grad]
    if not leaves or total.grad_fn is None:
        return [torch.zeros_like(each) for each in leaves]
    return torch.autograd.grad(total, leaves, materialize_grads=True)


def gradient_problem(full: ObservedLoss, local: ObservedLoss, shard: TokenShard) -> Problem | None:
    """What is wrong if the gradients of a shard are not its rows of those of all tokens."""
    if full.non_mean_op is not None or not math.isfinite(full.loss_sum.total):  # it is refused, or shows nothing
        return None
    for whole, part in zip(full.gradients, local.gradients, strict=True):
        expected = shard_tokens(whole, shard)
        largest = float(expected.abs().max()) if expected.numel() else 0.0
        if bool((expected - part).abs().le(10 * full.tolerance * largest).logical_or(expected.isnan()).all()):
            continue
        got = "cp > 1 and a loss whose gradient for a token depends on other ranks' tokens, though its value does not"
        need = "a loss that compares each token's output with the same token's target"
        return Problem(got, need, "no means of other tokens, detached ones too, or cp = 1")
    return None


def _num_averaged(value: Tensor) -> float | None:
    """The number of elements whose plain mean a scalar is, in this batch as in any other; None if that is not known."""
    node: Any = value.grad_fn
    while node is not None and node.name() in RESHAPING_NODES:
        node = node.next_functions[0][0]
    if node is None or any(each.name() in INDEXING_NODES for each in _nodes_behind(node)):
        return None
    if node.name() in NLL_NODES and saved_reduction(node) == REDUCTION_MEAN and saved_class_weights(node) is None:
        return float(saved_total_weight(node))
    if node.name() in REDUCED_LOSS_NODES and saved_reduction(node) == REDUCTION_MEAN:
        return float(saved_input(node).numel())
    return float(saved_input_numel(node)) if node.name() in MEAN_NODES else None


def _nodes_behind(node: Any) -> set[Any]:
    found, pending = set[Any](), [node]
    while pending:
        node = pending.pop()
        if node is not None and node not in found:
            found.add(node)
            pending += [before for before, _ in node.next_functions]
    return found


def check_even_targets(
    targets: Any, shards: Sequence[TokenShard], ignored_indices: Sequence[int], *, lengths: str
) -> None:
    """Raise TaskError, on all ranks, if some shard has fewer targets: then the mean of the shards' means is no mean.

    `lengths` names the sequence lengths that divide evenly.
    """
    length = shards[0].length
    counts = [shard.size if shard.real_tokens is None else len(shard.real_tokens) for shard in shards]
    what, attempt = f"{length} tokens, which do not divide evenly", f"{UNREDUCED_ADVICE}, or {lengths}"
    for target in tree_leaves(targets) if len(set(counts)) == 1 else ():
        if not has_token_dim(target, length) or target.is_floating_point():
            continue
        for index in {-100, *ignored_indices}:
            num_counted = (target != index).sum(0)
            counts = [sum(int(num_counted[start:stop].sum()) for start, stop in shard.ranges) for shard in shards]
            what, attempt = f"targets with {index}, which is ignored", UNREDUCED_ADVICE
            if len(set(counts)) > 1:
                break
    if len(set(counts)) > 1:
        got = f"cp = {len(shards)}, a loss that is a mean, and {what}: {counts} targets by rank"
        raise TaskError(
            Problem(got, "the same number on every rank, or a loss that can be summed over ranks", attempt),
            where="the loss",
        )


def non_mean_problem(non_mean_op: str, cp_size: int) -> Problem:
    """What is wrong with a scalar loss that `non_mean_op` has made."""
    got = f"cp = {cp_size}, and a scalar loss made by {non_mean_op}"
    need = "a scalar that torch makes as the mean of all elements, without weights, so that their number is known"
    return Problem(got, need, UNREDUCED_ADVICE)


def loss_sum_problem(full: LossSum, parts: Sequence[LossSum], *, tolerance: float) -> Problem | None:
    """What is wrong if the losses of the shards do not add up; `tolerance` is that of the mean, relative."""
    added = LossSum(sum(part.total for part in parts), sum(part.num_elements for part in parts))
    if added.num_elements == full.num_elements and abs(added.mean - full.mean) <= tolerance * max(abs(full.mean), 1e-6):
        return None
    got = f"cp = {len(parts)}, a loss of {full.mean:.8g} over {full.num_elements:g} elements for all tokens"
    got += f", but {added.mean:.8g} over {added.num_elements:g} for the ranks' tokens"
    need = "a loss that compares each token's output with the same token's target"
    return Problem(got, need, f"targets that the data has shifted, and {UNREDUCED_ADVICE}")
