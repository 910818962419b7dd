"""Losses: what a loss of a part of the tokens says of the whole.

mean     a loss that is one number: torch's own mean of all elements, so that it is known how many it is of
even     each rank's part has as many elements as the others': then the mean of their means is the mean
ignored  the targets that torch's own losses leave out, as they were called
Law: the ranks' sums and counts add up to those of the whole, or the loss is refused.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fourfold.parts.torch_private import (
    REDUCTION_MEAN,
    saved_class_weights,
    saved_input,
    saved_input_numel,
    saved_reduction,
    saved_total_weight,
)
from fourfold.step.batch import has_token_dim
from fourfold.step.loss_sum import sum_loss
from fourfold.step.sequence.sdpa_interception import AttentionCall, intercept_attention
from fourfold.step.sequence.token_shards import TokenShard
from fourfold.step.tensor_tree import tree_leaves, tree_map
from fourfold.step.torch_losses import ignore_index_of
from fourfold.words.errors import Problem, TaskError

UNREDUCED_ADVICE = 'unreduced values (reduction="none"), or a pair (sum, count)'
# Both sides are made of the same numbers, and differ by the rounding of their sums only.
TOLERANCE, HALF_TOLERANCE = 1e-5, 1e-2
# The steps of autograd that make a mean of elements, and what may stand behind one.
NLL_NODES = {"NllLossBackward0", "NllLoss2DBackward0"}
MEAN_NODES = {"MeanBackward0", "MeanBackward1"}
REDUCED_LOSS_NODES = {
    f"{name}Backward0"
    for name in ("MseLoss", "SmoothL1Loss", "HuberLoss", "BinaryCrossEntropy", "BinaryCrossEntropyWithLogits")
}
TRANSPARENT_NODES = {f"{name}Backward0" for name in ("ToCopy", "View", "Squeeze", "Unsqueeze", "Alias", "Clone")}
# These may take other elements in another batch.
INDEXING_NODES = {"IndexBackward0", "MaskedSelectBackward0", "TakeBackward0"}


class LossSum(NamedTuple):
    """A loss, as a sum over elements."""

    total: float
    num_elements: float

    @property
    def mean(self) -> float:
        return self.total / self.num_elements if self.num_elements else 0.0


class ObservedLoss(NamedTuple):
    """A loss; whether it was given as one number, and if so by what, where that is no mean; the targets left out."""

    loss_sum: LossSum
    is_mean: bool
    ignored_indices: list[int]
    non_mean_op: str | None
    tolerance: float


def observe_loss(loss: Callable[[Any, Any], Any], outputs: Any, targets: Any, num_samples: int) -> ObservedLoss:
    """The value of a loss, and how it was come by."""
    ignored = []

    def watch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if (index := ignore_index_of(func, args, kwargs)) is not None:
            ignored.append(index)

    outputs = tree_map(outputs, lambda t: t.detach().requires_grad_() if t.is_floating_point() else t)
    with torch.enable_grad(), intercept_attention(AttentionCall.run_sdpa, observer=watch):
        value = loss(outputs, targets)
    half = any(t.is_floating_point() and t.dtype.itemsize < 4 for t in tree_leaves(outputs))
    close = HALF_TOLERANCE if half else TOLERANCE
    if isinstance(value, Tensor) and value.dim() == 0:
        elements = _num_averaged(value)
        odd = None if elements is not None else value.grad_fn.name() if value.grad_fn is not None else "the model"
        return ObservedLoss(LossSum(float(value) * (elements or 0.0), elements or 0.0), True, ignored, odd, close)
    measured = sum_loss(value, num_samples)
    return ObservedLoss(LossSum(float(measured.total), float(measured.count)), False, ignored, None, close)


def _num_averaged(value: Tensor) -> float | None:
    """How many elements a scalar is the plain mean of, in this batch and in any other; None where that is not known."""
    node: Any = value.grad_fn
    while node is not None and node.name() in TRANSPARENT_NODES:
        node = node.next_functions[0][0]
    if node is None or any(name in INDEXING_NODES for name in _node_names(node)):
        return None
    if node.name() in NLL_NODES and saved_reduction(node) == REDUCTION_MEAN and saved_class_weights(node) is None:
        return float(saved_total_weight(node))
    if node.name() in REDUCED_LOSS_NODES and saved_reduction(node) == REDUCTION_MEAN:
        return float(saved_input(node).numel())
    return float(saved_input_numel(node)) if node.name() in MEAN_NODES else None


def _node_names(node: Any) -> set[str]:
    """The names of all that autograd has recorded up to this node."""
    seen, ahead = {node}, [node]
    while ahead:
        fresh = {before for before, _ in ahead.pop().next_functions if before is not None} - seen
        seen |= fresh
        ahead += fresh
    return {each.name() for each in seen}


def check_even_targets(
    targets: Any, shards: Sequence[TokenShard], ignored_indices: Sequence[int], *, lengths: str
) -> None:
    """Raise TaskError where the means of parts are no mean: some part has fewer targets. On all ranks alike.

    lengths: those that divide, in words.
    """
    length = shards[0].length
    counts = [share.size if share.real_tokens is None else len(share.real_tokens) for share in shards]
    what, attempt = f"{length} tokens, which do not divide", f"{UNREDUCED_ADVICE}, or {lengths}"
    for target in tree_leaves(targets) if len(set(counts)) == 1 else ():
        if not has_token_dim(target, length) or target.is_floating_point():
            continue
        for index in {-100, *ignored_indices}:
            told = (target != index).sum(0)
            counts = [int(sum(int(told[start:stop].sum()) for start, stop in share.ranges)) for share in shards]
            what, attempt = f"targets with {index}, which is ignored", UNREDUCED_ADVICE
            if len(set(counts)) > 1:
                break
    if len(set(counts)) > 1:
        got = f"sp = {len(shards)}, a loss that is a mean, and {what}: {counts} targets by rank"
        raise TaskError(
            Problem(got, "as many on every rank, or a loss that can be added up", attempt), where="the loss"
        )


def non_mean_problem(non_mean_op: str, sp_size: int) -> Problem:
    """What is wrong with a loss that is one number, made by `odd`."""
    got = f"sp = {sp_size}, and a loss that is one number, made by {non_mean_op}"
    need = "to know how many elements it is the mean of: torch's own mean of all of them, without weights"
    return Problem(got, need, UNREDUCED_ADVICE)


def loss_sum_problem(whole: LossSum, parts: Sequence[LossSum], *, tolerance: float) -> Problem | None:
    """What is wrong with a loss whose parts are not the whole's. `close`: what rounding makes of the mean."""
    added = LossSum(sum(part.total for part in parts), sum(part.num_elements for part in parts))
    if added.num_elements == whole.num_elements and abs(added.mean - whole.mean) <= tolerance * max(
        abs(whole.mean), 1e-6
    ):
        return None
    got = f"sp = {len(parts)}, a loss of {whole.mean:.8g} over {whole.num_elements:g} elements for all tokens"
    got += f", and {added.mean:.8g} over {added.num_elements:g} for the ranks' parts"
    need = "a loss of each token's output and its own target"
    return Problem(got, need, "targets that the data has shifted, and " + UNREDUCED_ADVICE)
