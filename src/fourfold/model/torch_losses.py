"""Torch's loss functions, observed as they are called: over how many elements each mean is taken.

call   one call of a loss function of torch.nn.functional
count  what a mean divides by: the targets that are not ignored, or the sum of their class weights; elements; rows
Law: mean × count is the sum, so the counted means of the parts of a batch add up to the mean of the whole batch.

`observing` is a TorchFunctionMode: it sees calls however the caller got the function, but not inside compiled code.
Inside, a mean over no elements is 0, where torch gives NaN: such a part adds nothing to a batch. Of arguments that
cannot be counted, torch says what is wrong.
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

from fourfold.axes.tensor.work.cross_entropy import cross_entropy
from fourfold.model.loss_sum import Count
from fourfold.torch_kit.param_access import DROPPED_ARGUMENTS, restore_arguments
from fourfold.torch_kit.torch_private import are_transforms_active

# The nodes of autograd's graph that may follow a mean without changing the number.
RESHAPING_NODES = {f"{op}Backward0" for op in ("ToCopy", "View", "Squeeze", "Unsqueeze", "Alias", "Clone")}
DEFAULT_IGNORE_INDEX = -100  # torch's default
Arguments = dict[str, Any]


@dataclass(frozen=True)
class LossCall:
    """One call that took a mean. A count that depends on targets stays on their device."""

    name: str
    count: Count
    value: Tensor
    derivative: float | None = None
    """In a dry run, the derivative of the scalar loss with respect to this value; None: it does not depend on it."""


def _count_targets(func: Any, given: Arguments) -> Count:
    """Targets that are not ignored, or the sum of their class weights."""
    scores, target, weight = given["input"], given["target"], given.get("weight")
    if target.is_floating_point():  # probabilities: torch divides by the number of rows, with class weights too
        return target.numel() / max(target.shape[min(scores.dim(), 2) - 1], 1)
    is_counted = target != _ignore_index(given)
    if weight is None:
        return _to_host(torch.count_nonzero(is_counted))
    return _to_host((weight.double()[target.where(is_counted, 0)] * is_counted).sum())


def _to_host(count: Tensor) -> Count:
    """A float if reading the count does not wait for a device."""
    return float(count) if count.device.type == "cpu" else count.double()


def _count_elements(func: Any, given: Arguments) -> Count:
    if given.get("weight") is not None and func in (F.mse_loss, F.l1_loss):
        return _to_host(given["weight"].sum(dtype=torch.float64))
    return float(math.prod(torch.broadcast_shapes(given["input"].shape, given["target"].shape)))


def _count_input_elements(func: Any, given: Arguments) -> Count:
    return float(given["input"].numel())


def _count_rows(func: Any, given: Arguments) -> Count:
    """Rows of scores: all dims except the last."""
    return float(math.prod(given["input"].shape[:-1]))


def _count_kl_div(func: Any, given: Arguments) -> Count:
    if given["reduction"] == "batchmean":
        return float(given["input"].shape[0]) if given["input"].dim() else 1.0
    return _count_elements(func, given)


def _count_ranking(func: Any, given: Arguments) -> Count:
    return float(math.prod(torch.broadcast_shapes(*(given[name].shape for name in ("input1", "input2", "target")))))


def _count_pairs(func: Any, given: Arguments) -> Count:
    shape = torch.broadcast_shapes(given["input1"].shape, given["input2"].shape)[:-1]
    return float(math.prod(torch.broadcast_shapes(shape, given["target"].shape)))


def _count_triplets(func: Any, given: Arguments) -> Count:
    shapes = (given[name].shape for name in ("anchor", "positive", "negative"))
    return float(math.prod(torch.broadcast_shapes(*shapes)[:-1]))


def _count_sequences(func: Any, given: Arguments) -> Count:
    return float(given["log_probs"].shape[1]) if given["log_probs"].dim() == 3 else 1.0


CLASS_LOSSES = tuple(
    getattr(F, name) for name in ("cross_entropy", "nll_loss", "linear_cross_entropy") if hasattr(F, name)
)
COUNT_FUNCTIONS: dict[Any, Callable[[Any, Arguments], Count]] = {
    **dict.fromkeys(CLASS_LOSSES, _count_targets),
    **dict.fromkeys((F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss), _count_elements),
    **dict.fromkeys((F.binary_cross_entropy, F.binary_cross_entropy_with_logits), _count_elements),
    **dict.fromkeys((F.poisson_nll_loss, F.hinge_embedding_loss, F.soft_margin_loss), _count_elements),
    **dict.fromkeys((F.multi_margin_loss, F.multilabel_margin_loss, F.multilabel_soft_margin_loss), _count_rows),
    **dict.fromkeys((F.triplet_margin_loss, F.triplet_margin_with_distance_loss), _count_triplets),
    F.gaussian_nll_loss: _count_input_elements,
    F.kl_div: _count_kl_div,
    F.margin_ranking_loss: _count_ranking,
    F.cosine_embedding_loss: _count_pairs,
    F.ctc_loss: _count_sequences,
}
_PARAMETER_NAMES = {func: tuple(inspect.signature(func).parameters) for func in COUNT_FUNCTIONS}


def ignore_index_of(func: Any, args: tuple[Any, ...], kwargs: Arguments) -> int | None:
    """The target that a call ignores; None if its loss is not one of classes."""
    if func is cross_entropy:
        return _ignore_index(kwargs)
    return _ignore_index(_bind_arguments(func, args, kwargs)) if func in CLASS_LOSSES else None


class observing(TorchFunctionMode):
    """`with observing() as calls`: inside, this thread's calls of torch's loss functions are appended to `calls`."""

    def __enter__(self) -> list[LossCall]:  # type: ignore[override]
        super().__enter__()
        self._calls: list[LossCall] = []
        return self._calls

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Arguments | None = None
    ) -> Any:
        if func in DROPPED_ARGUMENTS:
            kwargs = restore_arguments(func, args, kwargs or {})
        if func not in COUNT_FUNCTIONS:  # first: a forward makes hundreds of such calls
            return func(*args, **kwargs) if kwargs else func(*args)
        kwargs = kwargs or {}
        # The compiler traces through modes into here, and this code would not compile.
        if torch.compiler.is_compiling() or kwargs.get("reduction") == "none":
            return func(*args, **kwargs)
        # Inside vmap a scalar is one value per sample, and a transform's tensors are not valid outside of it.
        if are_transforms_active():
            return func(*args, **kwargs)
        return self._observe(func, args, kwargs)

    def _observe(self, func: Any, args: tuple[Any, ...], kwargs: Arguments) -> Any:
        given = _bind_arguments(func, args, kwargs)
        if given["reduction"] not in ("mean", "batchmean"):
            return func(*args, **kwargs)
        count = _try_count(func, given)
        if isinstance(count, Exception):
            func(*args, **kwargs)  # raises, and names the argument
            raise count
        is_plain = not isinstance(count, Tensor) and count
        value = func(*args, **kwargs) if is_plain else _safe_mean(func, given, count)
        self._calls.append(LossCall(func.__name__, count, value))
        return value


def _try_count(func: Any, given: Arguments) -> Count | Exception:
    """The count, or why there is none."""
    try:
        return COUNT_FUNCTIONS[func](func, given)
    except Exception as error:
        return error


def _bind_arguments(func: Any, args: tuple[Any, ...], kwargs: Arguments) -> Arguments:
    """The arguments of a call by name; the deprecated `size_average` and `reduce` become `reduction`."""
    given = dict(zip(_PARAMETER_NAMES[func], args, strict=False)) | kwargs
    average, reduce = given.pop("size_average", None), given.pop("reduce", None)
    given.setdefault("reduction", "mean")
    if average is not None or reduce is not None:
        mean = "mean" if average is None or average else "sum"
        given["reduction"] = mean if reduce is None or reduce else "none"
    return given


def _safe_mean(func: Any, given: Arguments, count: Count) -> Tensor:
    """The mean where there may be no elements; over none it is 0, with gradients of 0."""
    if not isinstance(count, Tensor):
        return func(**given | {"reduction": "sum"})
    # Without reading the count, which would wait for the device. In float32 at least: a sum of many values overflows
    # half precision.
    values = func(**given | {"reduction": "none"})
    total = values.sum(dtype=torch.promote_types(values.dtype, torch.float32))
    return (total / count.where(count != 0, 1.0).to(total.dtype)).to(values.dtype)


def _ignore_index(given: Arguments) -> int:
    index = given.get("ignore_index")
    return DEFAULT_IGNORE_INDEX if index is None else int(index)
