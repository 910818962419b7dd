"""Stand-ins: what a stage has in place of values that other stages have.

stand-in  a tensor with a shape, a dtype and a device, and without values
source    where the values are: what a module of another stage returned or kept, or one of its weights or buffers
Law: what is computed with a stand-in is a stand-in, of the sources of both. Whatever needs its values raises
StandInUsed: a branch, a number, a write into a tensor that this stage has. So a stage computes with values that it
has, or says which ones it has not.
"""

import functools
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, NoReturn, Self, cast

import torch
from torch import Tensor

from fourfold.torch_kit.torch_private import (
    DisableTorchFunction,
    tensor_without_memory,
    tree_flatten,
    tree_leaves,
    tree_unflatten,
    written_arguments,
)
from fourfold.words.error_notes import frame_place, user_frame

OUTPUT, ATTRIBUTE, WEIGHT, BUFFER = "output", "attribute", "weight", "buffer"
NEEDS_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_READS = {"numpy", "tolist", "__array__", "data_ptr", "untyped_storage", "storage", "__dlpack__", "__deepcopy__"}
_aten = torch.ops.aten
_FACTORIES = {
    _aten.zeros_like, _aten.ones_like, _aten.full_like, _aten.empty_like, _aten.rand_like, _aten.randn_like,
    _aten.randint_like, _aten.new_zeros, _aten.new_ones, _aten.new_full, _aten.new_empty, _aten.new_empty_strided,
}  # fmt: skip


MAX_KNOWN_RESULTS = 4096
_KNOWN_RESULTS: dict[Any, Tensor] = {}
"""By operation and the forms of its operands: its result on the meta device, which takes 0.2 ms to find."""


class Source(NamedTuple):
    """Where values are.

    kind   OUTPUT of a module, ATTRIBUTE of a module, WEIGHT or BUFFER
    name   of the module, of the attribute with its module's, of the weight or of the buffer
    call   of an output: its number in a forward
    """

    kind: str
    name: str
    call: int = 0

    @property
    def module(self) -> str:
        """The module of an attribute, a weight or a buffer; `key` is its name there."""
        return self.name.rpartition(".")[0]

    @property
    def key(self) -> str:
        return self.name.rpartition(".")[2]

    def __str__(self) -> str:
        if self.kind == OUTPUT:
            return f"what {self.name} returned" + (f" in its call {self.call + 1}" if self.call else "")
        return f"{self.kind} {self.name}"


class StandInUsed(BaseException):
    """Values of stand-ins are needed. Not an Exception: a model may catch these."""

    def __init__(self, sources: Iterable[Source], *, place: str | None = None) -> None:
        """`place`: where in the user's code, as `frame_place` says it; None: at the line that runs now."""
        super().__init__()
        self.sources = frozenset(sources)
        self.place = frame_place(user_frame()) if place is None else place


class StandIn(Tensor):
    """A tensor without values: see above."""

    sources: frozenset[Source]
    meta: Tensor

    @staticmethod
    def __new__(cls, meta: Tensor, device: torch.device, sources: frozenset[Source]) -> "StandIn":
        made: StandIn = tensor_without_memory(cls, meta.shape, device=device, dtype=meta.dtype, strides=meta.stride())
        made.meta, made.sources = meta, sources
        return made

    @classmethod
    def like(cls, shape: Iterable[int], dtype: torch.dtype, device: torch.device, source: Source) -> Self:
        """One in this shape."""
        with DisableTorchFunction():
            return cls(torch.empty(tuple(shape), dtype=dtype, device="meta"), device, frozenset([source]))

    def __repr__(self, **_: Any) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return f"StandIn({list(self.shape)}, {self.dtype}, of {', '.join(sorted(map(str, self.sources)))})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _READS:
            raise StandInUsed(args[0].sources)
        try:
            with DisableTorchFunction():
                return func(*args, **(kwargs or {}))
        except RuntimeError as error:
            # It reads values below the dispatcher, or those of another operand, such as lengths. An error of the
            # user's comes again where the values are there.
            sources = [each.sources for each in tree_flatten((args, kwargs or {}))[0] if isinstance(each, StandIn)]
            raise StandInUsed(frozenset[Source]().union(*sources)) from error

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves, spec = tree_flatten((args, kwargs or {}))
        given = [each for each in leaves if isinstance(each, StandIn)]
        sources = frozenset[Source]().union(*(each.sources for each in given))
        if func.overloadpacket in _FACTORIES:
            args, kwargs = tree_unflatten([_with_room(each) for each in leaves], spec)
            return func(*args, **kwargs)
        written = _written(func, args, kwargs or {})
        if torch.Tag.inplace_view in func.tags or any(not isinstance(each, StandIn) for each in written):
            raise StandInUsed(sources)
        device, key = given[0].device, None if written else _key_of(func, leaves, spec)
        if key is not None and (known := _KNOWN_RESULTS.get(key)) is not None:
            return cls(known, device, sources)
        for each in written:
            each.meta = _on_meta(each.meta)  # of its own: results that are known share one
        args, kwargs = tree_unflatten([_on_meta(each) for each in leaves], spec)
        if kwargs.get("device") is not None:
            device, kwargs["device"] = torch.device(kwargs["device"]), torch.device("meta")
        try:
            result = func(*args, **kwargs)
        except RuntimeError as error:
            # The result, or its shape, follows from values; or the operation has no kernel that finds its shape.
            if NEEDS_VALUES & set(func.tags) or isinstance(error, NotImplementedError):
                raise StandInUsed(sources) from None
            raise
        if key is not None and isinstance(result, Tensor) and kwargs.get("device") is None:
            if len(_KNOWN_RESULTS) == MAX_KNOWN_RESULTS:
                _KNOWN_RESULTS.clear()
            _KNOWN_RESULTS[key] = result
        for each in written:
            each.sources |= sources
        by_meta = {id(each.meta): each for each in written}
        outputs, spec = tree_flatten(result)
        return tree_unflatten([_wrapped(each, device, sources, by_meta) for each in outputs], spec)


def _key_of(func: Any, leaves: Iterable[Any], spec: Any) -> Any:
    """What the form of an operation's result follows from; None: it is not known."""
    key = [
        (each.shape, each.stride(), each.dtype) if isinstance(each, Tensor) else (type(each), each) for each in leaves
    ]
    try:
        hash(found := (func, spec, torch.get_default_dtype(), *key))
    except TypeError:
        return None
    return found


_written_places = functools.cache(written_arguments)


def _written(func: Any, args: Any, kwargs: Mapping[str, Any]) -> list[Any]:
    """The tensors that an operation writes."""
    places = _written_places(func)
    given = [args[position] if position < len(args) else kwargs.get(name) for position, name in places]
    return [each for each in tree_leaves(given) if isinstance(each, Tensor)]


def _on_meta(value: Any) -> Any:
    if isinstance(value, StandIn):
        return value.meta
    if isinstance(value, Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return value


def _with_room(value: Any) -> Any:
    """A tensor of which a factory reads nothing but the shape."""
    if isinstance(value, StandIn):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    return value


def _wrapped(value: Any, device: torch.device, sources: frozenset[Source], by_meta: Mapping[int, StandIn]) -> Any:
    if not isinstance(value, Tensor):
        return value
    known = by_meta.get(id(value))
    return StandIn(value, device, sources) if known is None else known


class UnknownValue:
    """Stands for an object that is no tensor and that another stage has."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def _used(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise StandInUsed([vars(self)["_source"]])

    __getattr__ = __call__ = __bool__ = __len__ = __iter__ = __getitem__ = __contains__ = __next__ = _used
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __add__ = __radd__ = __mul__ = __rmul__ = _used  # pyright: ignore[reportAssignmentType]
    __sub__ = __rsub__ = __truediv__ = __rtruediv__ = __neg__ = __float__ = __int__ = __index__ = _used
    __hash__ = object.__hash__


class _Placed(torch.autograd.Function):
    """A stand-in with a place in the graph, as the tensor has that it stands for: no leaf, so it may be written."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, stand_in: StandIn) -> Tensor:
        return StandIn(stand_in.meta, stand_in.device, stand_in.sources)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
        return None, None


def stand_in(
    shape: Iterable[int], dtype: torch.dtype, device: torch.device, source: Source, *, needs_gradient: bool
) -> Tensor:
    """A stand-in that is no leaf of autograd's graph."""
    made = StandIn.like(shape, dtype, device, source)
    if not needs_gradient or not torch.is_grad_enabled():
        return made
    return cast(Tensor, _Placed.apply(torch.zeros((), requires_grad=True), made))


def sources_of(tensors: Iterable[Tensor]) -> frozenset[Source]:
    """The sources of those that are stand-ins."""
    return frozenset[Source]().union(*(each.sources for each in tensors if isinstance(each, StandIn)))
