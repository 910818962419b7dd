"""Split logits: the logits of a head that is split by vocabulary, gathered only where all of them are needed.

local   the logits of this rank's classes
whole   those of all classes: the ranks' local ones, gathered
family  sources that were made of each other, as by `logits[:, :-1]`; they are gathered together, once
factor  what a target's loss is multiplied by in the sum: its class weight, and for a mean 1 / the sum of all weights
Law: every use gives what it gives for the whole logits, and the same gradients. What leaves the classes alone, such as
a slice of the tokens, makes split logits; cross entropy is computed of each rank's; any other use, also one that torch
passes to no tensor class, is of the whole logits.
Law: the value of a loss, its dtype and its gradients are those of `torch.nn.functional.cross_entropy` of the whole
logits; in the graph it is one node, as torch's is, so what it divides by is not taken for a division of the user's.
Law: `whole` has the values, the graph and the views that it would have if the first of the family had been gathered
at once. All ranks gather at the same place in the program.

The tensor itself has no memory, so no kernel can read it. It has a place in autograd's graph, for what torch does not
pass to tensor classes, such as the arguments of an `autograd.Function`.

N rows · V classes

Source: torch's protocols for subclasses, "Extending PyTorch" in its docs; Megatron-LM (arXiv 1909.08053), section 3.
"""

import contextlib
import copy
import inspect
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import GetSetDescriptorType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fourfold.axes.tensor.work.cross_entropy import Vocabulary, cross_entropy, split_cross_entropy
from fourfold.axes.tensor.work.split_region import gather_last_dim
from fourfold.comm.tensor_group import TensorGroup
from fourfold.torch_kit.param_access import restore_arguments
from fourfold.torch_kit.torch_private import (
    DisableTorchFunctionSubclass,
    are_transforms_active,
    suspend_transforms,
    tensor_without_memory,
    tree_leaves,
    tree_map_only,
    version_of,
    written_arguments,
)
from fourfold.words.errors import Problem, TaskError

# ---- logits source --------------------------------------------------------------------------------------------------


Derive = Callable[[Tensor], Tensor]


class Family:
    """What split logits that were made of each other have in common."""

    def __init__(self) -> None:
        self.members: list[weakref.ref[Source]] = []
        """The first one, then what was made of it, in this order."""
        self.has_split_loss = False
        """Whether a loss was computed of local logits: the whole ones have no part in its graph."""
        self.is_whole_only = False
        """Whether someone may write into the memory of the whole logits, unseen by autograd, or `is_watched`."""
        self.is_watched = False
        """Whether hooks or changes were made that only the whole logits know of."""


class Source:
    """What split logits are made of.

    local      the logits of this rank's classes; their dtype may be narrower than `dtype`, that of the split logits
    parent     None, or what they are `operation(parent)` of
    """

    def __init__(
        self,
        local: Tensor,
        vocabulary: Vocabulary,
        *,
        parent: "Source | None" = None,
        operation: Derive | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.local, self.vocabulary, self.dtype = local, vocabulary, dtype or local.dtype
        self._parent, self._operation = parent, operation
        self.gathered: Tensor | None = None
        """The whole logits, once the family is gathered."""
        self._version = 0
        self.family = Family() if parent is None else parent.family
        self.family.members.append(weakref.ref(self))
        if parent is not None and parent.gathered is not None:
            self._make_whole()

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.local.shape[:-1], self.vocabulary.num_classes)

    @property
    def wide_local(self) -> Tensor:
        """The local logits in the dtype of the split ones."""
        return self.local.to(self.dtype)

    @property
    def is_written(self) -> bool:
        """Whether the whole logits were changed in place: the local ones were not."""
        return self.gathered is not None and version_of(self.gathered) != self._version

    @property
    def stays_split(self) -> bool:
        """Whether what is computed of the local logits now is what the whole ones would give."""
        return (
            torch.is_grad_enabled()
            and not self.family.is_whole_only
            and not self.is_written
            and not are_transforms_active()
        )

    @property
    def whole(self) -> Tensor:
        """The whole logits, with their graph. Collective, unless the family is gathered already."""
        if self.gathered is None:
            # All of the family: later changes in place are seen through views of each other, as in torch.
            for member in self.family.members:
                if (source := member()) is not None:
                    source._make_whole()
        assert self.gathered is not None
        return self.gathered

    def _make_whole(self) -> None:
        # The whole logits belong to no transform of `torch.func` in which they are first used.
        outside = suspend_transforms() if are_transforms_active() else contextlib.nullcontext()
        with torch.inference_mode(False), torch.enable_grad(), outside:
            if self._parent is None or self._operation is None:
                assert self.vocabulary.group is not None
                self.vocabulary.group.meet("the whole logits")
                self.gathered = gather_classes(self.local, self.vocabulary)
            else:
                self.gathered = self._operation(self._parent.whole)
        self._version = version_of(self.gathered)

    def derive(self, local: Tensor, operation: Derive, dtype: torch.dtype | None = None) -> "Source":
        """The source whose local logits are these, and whose whole ones `operation` makes of this one's."""
        return Source(local, self.vocabulary, parent=self, operation=operation, dtype=dtype or self.dtype)


def gather_classes(local: Tensor, vocabulary: Vocabulary) -> Tensor:
    """The logits of all classes, of which this rank has the local ones. Collective."""
    assert vocabulary.group is not None
    return gather_last_dim(local, vocabulary.group, vocabulary.num_classes)


# ---- class loss ----------------------------------------------------------------------------------------------------

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


# ---- split operations ----------------------------------------------------------------------------------------------


Operation = Callable[[Any, Source, tuple[Any, ...], dict[str, Any]], Source | Tensor | None]


def _index(func: Any, source: Source, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Source | None:
    (index,) = copy.deepcopy(args)  # the whole logits may be indexed later
    if not _leaves_classes(index if isinstance(index, tuple) else (index,), len(source.shape)):
        return None
    return source.derive(source.local[index], lambda whole: whole[index])


def _leaves_classes(index: tuple[Any, ...], num_dims: int) -> bool:
    """Whether an index takes all of the last dim, and leaves it the last one."""
    sizes = [_num_indexed(each) for each in index]
    if None in sizes:
        return False
    has_ellipsis = any(each is Ellipsis for each in index)
    num_indexed = sum(size for size in sizes if size is not None)
    if num_indexed < num_dims and not (has_ellipsis and index[-1] is not Ellipsis):
        return True
    return isinstance(index[-1], slice) and index[-1] == slice(None)


def _num_indexed(part: Any) -> int | None:
    """How many dims a part of an index indexes; None: not known."""
    if part is None or part is Ellipsis:
        return 0
    if isinstance(part, slice) or type(part) is int:
        return 1
    if isinstance(part, list) and all(type(each) is int for each in part):
        return 1
    if isinstance(part, Tensor):
        return part.dim() if part.dtype in (torch.bool, torch.uint8) else 1
    return None


def _reshape(func: Any, source: Source, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Source | None:
    like = torch.empty(source.shape, dtype=source.dtype, device="meta")
    found = func(like, *args, **kwargs)
    if found.dtype != source.dtype or not found.dim() or found.shape[-1] != source.shape[-1]:
        return None
    reshape = Tensor.view if func is Tensor.view else Tensor.reshape
    local = reshape(source.local, *found.shape[:-1], source.local.shape[-1])
    return source.derive(local, lambda whole: reshape(whole, *found.shape))


def _cast(func: Any, source: Source, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Source | None:
    if kwargs.get("memory_format") is not None:
        return None
    found = func(source.local.new_empty(0, dtype=source.dtype), *args, **kwargs)
    if not found.is_floating_point() or found.device != source.local.device:
        return None
    # A loss computes in float32 anyway: half precision needs no wider copy.
    stays_narrow = found.dtype == torch.float32 and source.local.dtype in (torch.float16, torch.bfloat16)
    local = source.local.contiguous() if stays_narrow else func(source.wide_local, *args, **kwargs)
    return source.derive(local, lambda whole: func(whole, *args, **kwargs), found.dtype)


def _elementwise(func: Any, source: Source, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Source | None:
    if kwargs or not all(type(each) in (int, float) for each in args):
        return None
    return source.derive(func(source.wide_local, *args), lambda whole: func(whole, *args))


def _cross_entropy(func: Any, source: Source, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    (targets,) = args
    losses = split_cross_entropy(source.local, targets, source.vocabulary, **kwargs)
    source.family.has_split_loss = True
    return losses.to(torch.promote_types(source.dtype, torch.float32))


def _torch_cross_entropy(func: Any, source: Source, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    loss = split_class_loss(source.local, source.vocabulary, source.dtype, args, kwargs)
    source.family.has_split_loss |= loss is not None
    return loss


_CASTS = (Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16, Tensor.to, Tensor.contiguous)
_ELEMENTWISE = (
    *(Tensor.mul, Tensor.__mul__, Tensor.__rmul__, torch.mul),
    *(Tensor.div, Tensor.__truediv__, torch.div),
    *(Tensor.tanh, torch.tanh),
)
SPLIT_OPERATIONS: Mapping[Any, Operation] = {
    Tensor.__getitem__: _index,
    **dict.fromkeys((Tensor.view, Tensor.reshape, torch.reshape, Tensor.flatten, torch.flatten), _reshape),
    **dict.fromkeys(_CASTS, _cast),
    **dict.fromkeys(_ELEMENTWISE, _elementwise),
    cross_entropy: _cross_entropy,
    F.cross_entropy: _torch_cross_entropy,
}
"""By function: what takes the function, the source of its first argument, and the other arguments."""


# ---- split logits --------------------------------------------------------------------------------------------------


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


def _split_among(*trees: Any) -> list["SplitLogits"]:
    return [each for each in tree_leaves(trees) if isinstance(each, SplitLogits)]


def _of_whole(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    args, kwargs = tree_map_only(SplitLogits, whole_logits, (args, kwargs))
    return func(*args, **kwargs)


def _of_local(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of an operation on this rank's logits, if it has one."""
    logits, *others = args or (None,)
    if isinstance(logits, SplitLogits) and not _split_among(others, kwargs) and logits.source.stays_split:
        result = SPLIT_OPERATIONS[func](func, logits.source, tuple(others), kwargs)
        if result is not None:
            return _in_graph(result) if isinstance(result, Source) else result
    return _of_whole(func, args, kwargs)


def _watch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Hooks and changes that only the whole logits know of: from now on, only these count."""
    for logits in _split_among(args, kwargs):
        _check_no_loss(logits, getattr(func, "__name__", str(func)))
        logits.source.family.is_whole_only = logits.source.family.is_watched = True
    return _of_whole(func, args, kwargs)


def _expose(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What gives the memory of the whole logits, into which the caller may write."""
    for logits in _split_among(args, kwargs):
        logits.source.family.is_whole_only = True
    return _of_whole(func, args, kwargs)


def _grad(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    for logits in _split_among(args[1:2], kwargs.get("inputs")):
        _check_no_loss(logits, "autograd.grad")
    return _of_whole(func, args, kwargs)


def _read_grad(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    _check_no_loss(args[0], "grad")
    return None if args[0].source.gathered is None else _of_whole(func, args, kwargs)


def _read_version(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    return 0 if args[0].source.gathered is None else version_of(args[0].source.gathered)


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
        Tensor.is_contiguous: lambda func, args, kwargs: args[0].source.local.is_contiguous(*args[1:], **kwargs),
        _DESCRIPTORS["grad"].__get__: _read_grad,
        # Through this node every gradient of the logits goes, whether they are gathered or not.
        _DESCRIPTORS["grad_fn"].__get__: lambda func, args, kwargs: args[0].source.local.grad_fn,
        _DESCRIPTORS["_version"].__get__: _read_version,
    }


_METADATA = _metadata()
_SPECIAL = _special()
