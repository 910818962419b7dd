"""Torch's loss functions, observed as they are called: how many elements each mean is taken over.

call   one call of a loss function of torch.nn.functional
count  what a mean divides by: the targets that are not ignored, or the sum of their class weights; elements; rows
Law: mean × count is the sum, so that the counted means of the parts of a batch add up to the mean of the whole.

`observing` sees calls through a TorchFunctionMode: however the caller came by the function, but not in compiled code.
A mean over no elements is 0 inside, where torch gives NaN: such a part adds nothing to a batch.
"""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fourfold.parts.lost_arguments import DROPPED_ARGUMENTS, restore_arguments
from fourfold.run.origins import call_site

IGNORED = -100  # torch's default
Options = dict[str, Any]
Count = float | Tensor


@dataclass(frozen=True)
class Call:
    """One call whose loss was reduced to a number. A count that depends on targets stays on their device."""

    name: str
    count: Count
    is_mean: bool
    value: Tensor
    is_trained: bool | None
    """Whether autograd follows it, as it does not follow figures for people; None: without autograd one cannot tell."""
    slope: float | None = None
    """How much a number changes with it; None: not known."""
    place: int = 0
    """Where it was called: see `run.origins`."""


def _classes(func: Any, given: Options) -> Count:
    """Targets that are not ignored, or the sum of their class weights."""
    scores, target, weight = given["input"], given["target"], given.get("weight")
    if target.is_floating_point():  # probabilities: torch divides by the number of their rows, whatever the weights
        return target.numel() / max(target.shape[min(scores.dim(), 2) - 1], 1)
    kept = target != _ignore_index(given)
    return _host(torch.count_nonzero(kept) if weight is None else (weight.double()[target.where(kept, 0)] * kept).sum())


def _host(count: Tensor) -> Count:
    """A float where reading the count does not wait for a device."""
    return float(count) if count.device.type == "cpu" else count.double()


def _elements(func: Any, given: Options) -> Count:
    if given.get("weight") is not None and func in (F.mse_loss, F.l1_loss):
        return _host(given["weight"].sum(dtype=torch.float64))
    return float(math.prod(torch.broadcast_shapes(given["input"].shape, given["target"].shape)))


def _own_elements(func: Any, given: Options) -> Count:
    return float(given["input"].numel())


def _rows(func: Any, given: Options) -> Count:
    """Rows of scores: all dims but the last."""
    return float(math.prod(given["input"].shape[:-1]))


def _divergence(func: Any, given: Options) -> Count:
    if given["reduction"] == "batchmean":
        return float(given["input"].shape[0]) if given["input"].dim() else 1.0
    return _elements(func, given)


def _ranked(func: Any, given: Options) -> Count:
    return float(math.prod(torch.broadcast_shapes(*(given[name].shape for name in ("input1", "input2", "target")))))


def _pairs(func: Any, given: Options) -> Count:
    shape = torch.broadcast_shapes(given["input1"].shape, given["input2"].shape)[:-1]
    return float(math.prod(torch.broadcast_shapes(shape, given["target"].shape)))


def _triplets(func: Any, given: Options) -> Count:
    shapes = (given[name].shape for name in ("anchor", "positive", "negative"))
    return float(math.prod(torch.broadcast_shapes(*shapes)[:-1]))


def _sequences(func: Any, given: Options) -> Count:
    return float(given["log_probs"].shape[1]) if given["log_probs"].dim() == 3 else 1.0


CLASSES = {F.cross_entropy, F.nll_loss} | {f for f in [getattr(F, "linear_cross_entropy", None)] if f is not None}
COUNTS: dict[Any, Callable[[Any, Options], Count]] = {
    **dict.fromkeys(CLASSES, _classes),
    **dict.fromkeys((F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss), _elements),
    **dict.fromkeys((F.binary_cross_entropy, F.binary_cross_entropy_with_logits), _elements),
    **dict.fromkeys((F.poisson_nll_loss, F.hinge_embedding_loss, F.soft_margin_loss), _elements),
    **dict.fromkeys((F.multi_margin_loss, F.multilabel_margin_loss, F.multilabel_soft_margin_loss), _rows),
    **dict.fromkeys((F.triplet_margin_loss, F.triplet_margin_with_distance_loss), _triplets),
    F.gaussian_nll_loss: _own_elements,
    F.kl_div: _divergence,
    F.margin_ranking_loss: _ranked,
    F.cosine_embedding_loss: _pairs,
    F.ctc_loss: _sequences,
}
_NAMES = {func: tuple(inspect.signature(func).parameters) for func in COUNTS}


def ignored_by(func: Any, args: tuple[Any, ...], kwargs: Options) -> int | None:
    """The target that a call leaves out; None where it is no loss of classes."""
    return _ignore_index(_given(func, args, kwargs)) if func in CLASSES else None


class observing(TorchFunctionMode):
    """`with observing() as calls`: within, this thread's calls of torch's loss functions are added to the list."""

    def __enter__(self) -> list[Call]:  # type: ignore[override]
        super().__enter__()
        self._calls: list[Call] = []
        return self._calls

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Options | None = None
    ) -> Any:
        if func in DROPPED_ARGUMENTS:
            kwargs = restore_arguments(func, args, kwargs or {})
        if func not in COUNTS:  # first: a forward makes hundreds of such calls
            return func(*args, **kwargs) if kwargs else func(*args)
        kwargs = kwargs or {}
        # The compiler follows a mode into here, and what it finds would not compile.
        if torch.compiler.is_compiling() or kwargs.get("reduction") == "none":
            return func(*args, **kwargs)
        # Within vmap a number is one for each sample, and what a transform differentiates is no tensor outside of it.
        if torch._C._are_functorch_transforms_active():
            return func(*args, **kwargs)
        return self._observed(func, _given(func, args, kwargs))

    def _observed(self, func: Any, given: Options) -> Any:
        reduction = given["reduction"]
        if reduction not in ("mean", "batchmean", "sum"):
            return _called(func, given)
        count = COUNTS[func](func, given)
        value = _mean(func, given, count) if reduction != "sum" else _called(func, given)
        is_trained = value.requires_grad if torch.is_grad_enabled() else None
        self._calls.append(Call(func.__name__, count, reduction != "sum", value, is_trained, place=call_site()))
        return value


def _given(func: Any, args: tuple[Any, ...], kwargs: Options) -> Options:
    """The arguments of a call by name, with `reduction` for the older `size_average` and `reduce`."""
    given = dict(zip(_NAMES[func], args, strict=False)) | kwargs
    average, reduce = given.pop("size_average", None), given.pop("reduce", None)
    given.setdefault("reduction", "mean")
    if average is not None or reduce is not None:
        mean = "mean" if average is None or average else "sum"
        given["reduction"] = mean if reduce is None or reduce else "none"
    return given


def _called(func: Any, given: Options, reduction: str | None = None) -> Any:
    return func(**given | ({} if reduction is None else {"reduction": reduction}))


def _mean(func: Any, given: Options, count: Count) -> Tensor:
    """The mean; 0, with gradients of 0, over no elements."""
    if not isinstance(count, Tensor):
        return _called(func, given) if count else _called(func, given, "sum")
    # Without a look at the count, which would wait for the device. In float32 at least: a sum of many in half
    # precision is beyond what it can hold.
    values = _called(func, given, "none")
    total = values.sum(dtype=torch.promote_types(values.dtype, torch.float32))
    return (total / count.where(count != 0, 1.0).to(total.dtype)).to(values.dtype)


def _ignore_index(given: Options) -> int:
    index = given.get("ignore_index")
    return IGNORED if index is None else int(index)
