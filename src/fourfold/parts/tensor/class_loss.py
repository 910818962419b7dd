"""Class loss: torch's cross entropy of split logits, with its reductions and class weights.

factor  what a target's loss is multiplied by in the sum: its class weight, and for a mean 1 / the sum of all weights
Law: the value, its dtype and its gradients are those of `torch.nn.functional.cross_entropy` of the whole logits; in
the graph it is one node, as torch's is, so what it divides by is not taken for a division of the user's.

N rows · V classes
"""

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fourfold.parts.tensor.cross_entropy import Vocabulary, split_cross_entropy

_SIGNATURE = inspect.signature(F.cross_entropy)
REDUCTIONS = ("mean", "sum", "none")


def split_class_loss(
    local: Tensor, vocabulary: Vocabulary, dtype: torch.dtype, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor | None:
    """`F.cross_entropy(logits, *args, **kwargs)`, of whose logits [N, V] or [V] of this dtype `local` is here.

    None: it cannot be computed of split logits, or the arguments are wrong. Else collective.
    """
    given = _SIGNATURE.bind(local, *args, **kwargs)
    given.apply_defaults()
    options: dict[str, Any] = given.arguments
    target, weight, smoothing = options["target"], options["weight"], options["label_smoothing"]
    if not _is_supported(local, vocabulary, options):
        return None
    ignore_index = options["ignore_index"]
    losses = split_cross_entropy(local, target, vocabulary, ignore_index=ignore_index, label_smoothing=smoothing)
    dtype = _result_dtype(dtype, local.device)
    is_counted = target != ignore_index
    factor = is_counted.to(losses.dtype)
    if weight is not None:
        factor = factor * weight.detach().to(losses.dtype)[target.where(is_counted, 0)]
    if options["reduction"] == "none":
        return (losses if weight is None else losses * factor).to(dtype)
    if options["reduction"] == "mean":
        factor = factor / factor.sum()
    return _WeightedSum.apply(losses, factor, dtype)


def _is_supported(local: Tensor, vocabulary: Vocabulary, options: dict[str, Any]) -> bool:
    target, weight, smoothing = options["target"], options["weight"], options["label_smoothing"]
    if not isinstance(target, Tensor) or target.dtype != torch.int64 or target.device != local.device:
        return False
    # Of more dims the second one counts the classes.
    if local.dim() not in (1, 2) or local.shape[:-1] != target.shape or not 0 <= smoothing <= 1:
        return False
    if weight is not None and (
        smoothing or weight.requires_grad or weight.shape != (vocabulary.num_classes,) or weight.device != local.device
    ):
        return False
    return options["reduction"] in REDUCTIONS and options["size_average"] is None and options["reduce"] is None


def _result_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype of torch's loss of logits of this dtype, which autocast may change."""
    if dtype.itemsize >= torch.float32.itemsize:
        return dtype
    return F.cross_entropy(
        torch.zeros(1, 1, dtype=dtype, device=device), torch.zeros(1, dtype=torch.long, device=device)
    ).dtype


class _WeightedSum(torch.autograd.Function):
    """Losses -> their sum, each times its factor, which has no gradient."""

    @staticmethod
    def forward(ctx: Any, losses: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(factor)
        return (losses * factor).sum().to(dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (factor,) = ctx.saved_tensors
        return grads[0].to(factor.dtype) * factor, None, None
