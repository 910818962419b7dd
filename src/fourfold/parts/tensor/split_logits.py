"""Split logits: the logits of a head that is split by vocabulary, gathered only where all of them are needed.

Law: every use gives what it gives for the whole logits, and the same gradients. What leaves the classes alone, such as
a slice of the tokens, makes split logits; cross entropy is computed of each rank's; any other use, also one that torch
passes to no tensor class, is of the whole logits (`logits_source.py`, `split_operations.py`).

The tensor itself has no memory, so no kernel can read it. It has a place in autograd's graph, for what torch does not
pass to tensor classes, such as the arguments of an `autograd.Function`.

Source: torch's protocols for subclasses, "Extending PyTorch" in its docs; Megatron-LM (arXiv 1909.08053), section 3.
"""

from collections.abc import Callable, Mapping, Sequence
from types import GetSetDescriptorType
from typing import Any

import torch
from torch import Tensor

from fourfold.parts.comm.tensor.protocol import TensorGroup
from fourfold.parts.dropped_arguments import restore_arguments
from fourfold.parts.tensor.cross_entropy import Vocabulary
from fourfold.parts.tensor.logits_source import Source, gather_classes
from fourfold.parts.tensor.split_operations import SPLIT_OPERATIONS
from fourfold.parts.torch_private import (
    DisableTorchFunctionSubclass,
    are_transforms_active,
    tensor_without_memory,
    tree_leaves,
    tree_map_only,
    version_of,
    written_arguments,
)
from fourfold.words.errors import Problem, TaskError


class SplitLogits(Tensor):
    """Logits [..., V] of all classes, of which this rank holds some."""

    source: Source

    @staticmethod
    def __new__(cls, source: Source) -> "SplitLogits":
        logits: SplitLogits = tensor_without_memory(cls, source.shape, device=source.local.device, dtype=source.dtype)
        logits.source = source
        return logits

    def __init__(self, source: Source) -> None:
        pass

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = restore_arguments(func, tuple(args), kwargs or {})
        if func in _METADATA:
            with DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        special = _SPECIAL.get(func, _of_whole)
        return special(func, tuple(args), kwargs)

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """What torch calls without asking the class; autograd has recorded it already."""
        named = kwargs or {}
        written = [args[index] if index < len(args) else named.get(name) for index, name in written_arguments(func)]
        if any(isinstance(each, cls) for each in written):
            got = f"{func}, which changes logits in place"
            raise TaskError(Problem(got, "logits that stay as they are", "logits.clone()"), where="split logits")
        args, named = tree_map_only(cls, lambda logits: logits.source.whole.detach(), (tuple(args), named))
        return func(*args, **named)


def split_logits(local: Tensor, vocabulary: Vocabulary) -> Tensor:
    """The logits of all classes, of which each rank of the group holds `local`; whole at once if nothing is trained."""
    if torch.is_grad_enabled() and local.requires_grad and not are_transforms_active():
        return _in_graph(Source(_MeetInBackward.apply(local, vocabulary.group), vocabulary))
    return gather_classes(local, vocabulary)


class _MeetInBackward(torch.autograd.Function):
    """The same values. In backward the ranks meet: one of them may have gathered logits, alone."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, group: TensorGroup) -> Tensor:
        ctx.group = group
        return local.detach()  # not a view, which would keep its base alive

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.group.meet("the backward of logits that are split by vocabulary")
        return grads[0], None


def whole_logits(tensor: Tensor) -> Tensor:
    """A tensor without split logits: their whole ones, or itself. Collective."""
    return tensor.source.whole if isinstance(tensor, SplitLogits) else tensor


def _in_graph(source: Source) -> SplitLogits:
    return _InGraph.apply(source.local, source)


class _InGraph(torch.autograd.Function):
    """Local logits -> split logits, which have a place in the graph."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, source: Source) -> SplitLogits:
        ctx.source = source
        return SplitLogits(source)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        source: Source = ctx.source
        if source.is_written or source.family.is_watched:
            got = "logits that were changed in place, or have hooks, and then used by an autograd.Function"
            raise TaskError(Problem(got, "logits as the head gave them", "logits.clone()"), where="split logits")
        start, length = source.vocabulary.start, source.local.shape[-1]
        return grads[0][..., start : start + length].to(source.local.dtype), None


# ---- uses ----------------------------------------------------------------------------------------------


def _of_whole(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    args, kwargs = tree_map_only(SplitLogits, whole_logits, (args, kwargs))
    return func(*args, **kwargs)


def _of_local(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of an operation on this rank's logits, if it has one."""
    logits, *others = args or (None,)
    is_only_one = not any(isinstance(each, SplitLogits) for each in tree_leaves((others, kwargs)))
    if isinstance(logits, SplitLogits) and is_only_one and logits.source.stays_split:
        result = SPLIT_OPERATIONS[func](func, logits.source, tuple(others), kwargs)
        if result is not None:
            return _in_graph(result) if isinstance(result, Source) else result
    return _of_whole(func, args, kwargs)


def _watch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Hooks and changes that only the whole logits know of: from now on, only these count."""
    for logits in tree_leaves((args, kwargs)):
        if isinstance(logits, SplitLogits):
            _check_no_loss(logits, getattr(func, "__name__", str(func)))
            logits.source.family.is_whole_only = logits.source.family.is_watched = True
    return _of_whole(func, args, kwargs)


def _expose(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What gives the memory of the whole logits, into which the caller may write."""
    for logits in tree_leaves((args, kwargs)):
        if isinstance(logits, SplitLogits):
            logits.source.family.is_whole_only = True
    return _of_whole(func, args, kwargs)


def _grad(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    for logits in tree_leaves((args[1:2], kwargs.get("inputs"))):
        if isinstance(logits, SplitLogits):
            _check_no_loss(logits, "autograd.grad")
    return _of_whole(func, args, kwargs)


def _read_grad(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    _check_no_loss(args[0], "grad")
    return None if args[0].source.gathered is None else _of_whole(func, args, kwargs)


def _read_grad_fn(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The node through which every gradient of the logits goes, whether they are gathered or not."""
    return args[0].source.local.grad_fn


def _read_version(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    return 0 if args[0].source.gathered is None else version_of(args[0].source.gathered)


def _read_contiguous(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return args[0].source.local.is_contiguous(*args[1:], **kwargs)


def _check_no_loss(logits: SplitLogits, what: str) -> None:
    if logits.source.family.has_split_loss:
        got = f"{what} of logits after their cross entropy, which was computed of each tensor rank's part of them"
        attempt = "retain_grad() or register_hook() before the loss is computed"
        raise TaskError(Problem(got, "the gradient of whole logits, which then does not exist", attempt))


_METADATA_NAMES = (
    "shape dtype device ndim layout requires_grad is_leaf itemsize nbytes names is_cpu is_cuda is_meta is_mps is_xla "
    "is_xpu is_sparse is_sparse_csr is_quantized is_nested is_mkldnn is_vulkan is_ipu is_maia is_mtia output_nr "
    "size dim ndimension numel nelement element_size get_device is_floating_point is_complex is_signed is_inference "
    "__len__ __hash__"
)


_DESCRIPTORS: Mapping[str, Any] = {
    name: attribute
    for base in Tensor.__mro__
    for name, attribute in vars(base).items()
    if isinstance(attribute, GetSetDescriptorType)
}
_WATCHING = (Tensor.register_hook, Tensor.retain_grad, Tensor.detach_, Tensor.requires_grad_, Tensor.set_)
_EXPOSING = (
    *(Tensor.data_ptr, Tensor.untyped_storage, Tensor.storage, Tensor.numpy),
    *(Tensor.__array__, Tensor.__dlpack__, _DESCRIPTORS["data"].__get__),
)


def _metadata() -> frozenset[Any]:
    found = {getattr(Tensor, name, None) for name in _METADATA_NAMES.split()}
    getters = {_DESCRIPTORS[name].__get__ for name in _METADATA_NAMES.split() if name in _DESCRIPTORS}
    return frozenset(found | getters | {torch.numel, torch.is_floating_point, torch.is_complex})


def _special() -> Mapping[Any, Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]]:
    setters = [each for found in _DESCRIPTORS.values() for each in (found.__set__, found.__delete__)]
    return {
        **dict.fromkeys(SPLIT_OPERATIONS, _of_local),
        **dict.fromkeys((*setters, *_WATCHING), _watch),
        **dict.fromkeys(_EXPOSING, _expose),
        torch.autograd.grad: _grad,
        Tensor.is_contiguous: _read_contiguous,
        _DESCRIPTORS["grad"].__get__: _read_grad,
        _DESCRIPTORS["grad_fn"].__get__: _read_grad_fn,
        _DESCRIPTORS["_version"].__get__: _read_version,
    }


_METADATA = _metadata()
_SPECIAL = _special()
