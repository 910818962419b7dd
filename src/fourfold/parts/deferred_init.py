"""Deferred initialization: a model is made with weights that take no memory; each is computed when it is asked for.

handle   stands for a large tensor that the model has created, without its values (`parts/init_record.py`)
backing  the values of a handle's storage; dropped when others are needed, and computed again from the record
Law: the values are those that the same function makes without this, bit for bit, and the generator ends in the same
state. While a model is made, and while a weight is computed, at most MAX_BACKING of the largest tensor is held.

The operations run for real, each once while the model is made: the values may decide what is done next, as in
`nn.init.trunc_normal_`.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fourfold.parts.init_record import (
    HANDLE_ATTRIBUTES,
    SHAPE_ONLY,
    UNSET,
    Handle,
    NotDeferrable,
    Operation,
    Record,
    View,
    aten,
    own_memory,
)
from fourfold.parts.torch_dispatch import EagerDispatchMode, change_wrapper_shape, schema_arguments
from fourfold.parts.torch_private import (
    storage_key,
    tree_leaves,
    tree_map_only,
)

MIN_ELEMENTS = 2**15  # of a handle; smaller tensors are made at once
MAX_BACKING = 1.75  # of the largest storage: a whole tensor, and the masks that its initialization may need

FACTORIES = {
    aten.empty.memory_format, aten.empty_strided.default, aten.zeros.default, aten.ones.default, aten.full.default,
    aten.rand.default, aten.rand.generator, aten.randn.default, aten.randn.generator,
}  # fmt: skip
OVERWRITING = {
    aten.normal_.default, aten.uniform_.default, aten.random_.default, aten.exponential_.default,
    aten.log_normal_.default, aten.cauchy_.default, aten.geometric_.default, aten.bernoulli_.float,
    aten.zero_.default, aten.fill_.Scalar, aten.copy_.default,
}  # fmt: skip
REPLACING_STORAGE = {aten.resize_.default, aten.set_.source_Storage, aten.set_.source_Tensor, aten.set_.default}


class InitialWeights:
    """The weights of a model before it is laid over ranks: its own, or those that are still to be computed."""

    def __init__(self, record: Record | None = None, views: dict[nn.Parameter, View] | None = None) -> None:
        self._record, self._views = record or Record(), views or {}

    @property
    def are_deferred(self) -> bool:
        return bool(self._views)

    def whole(self, parameter: nn.Parameter) -> Tensor:
        """The values of a whole parameter, on its device; if they were deferred, in memory of their own."""
        view = self._views.get(parameter)
        if view is None:
            return parameter.data
        return view.of(self._record.compute(view.storage)).to(parameter.device)


OWN_WEIGHTS = InitialWeights()


class InitialModel(NamedTuple):
    """A model on the device of this rank, and its weights."""

    model: nn.Module
    weights: InitialWeights = OWN_WEIGHTS


def deferred_model(make: Callable[[], Any], device: torch.device) -> tuple[Any, InitialWeights]:
    """What `make` returns, with parameters that have shapes and no memory, on `device`, and their values.

    Small parameters, buffers and attributes have their values. Raises NotDeferrable, and what `make` raises, which may
    be for want of values.
    """
    record = Record()
    with _Recorder(record):
        model = make()
    if not isinstance(model, nn.Module):
        return model, OWN_WEIGHTS
    views: dict[nn.Parameter, View] = {}
    others = _other_tensors(model)
    _check_separate([each for each in (*model.parameters(), *others) if isinstance(each, Handle)])
    for parameter in model.parameters():
        if isinstance(parameter, Handle):
            view = parameter.view_of_storage
            # As large as the parameter, of one element; on the CPU or a GPU, where an optimizer may look for it.
            values = torch.zeros((), dtype=view.dtype, device=device).expand(view.shape)
            _replace(parameter, nn.Parameter(values, requires_grad=parameter.requires_grad))
            views[parameter] = view
    for tensor in others:
        if isinstance(tensor, Handle):
            view = tensor.view_of_storage
            _replace(tensor, view.of(record.compute(view.storage)).clone())
    return model, InitialWeights(record, views)


def _check_separate(handles: Sequence[Handle]) -> None:
    """Raise NotDeferrable for two tensors on one storage, which would get memory of their own."""
    if len({each.view_of_storage.storage for each in handles}) < len(handles):
        raise NotDeferrable("two tensors of the model that share memory")


def _replace(tensor: Tensor, by: Tensor) -> None:
    """Make a tensor another one, wherever it is referred to."""
    vars(by).update({name: value for name, value in vars(tensor).items() if name not in HANDLE_ATTRIBUTES})
    try:
        torch.utils.swap_tensors(tensor, by)
    except RuntimeError as error:
        raise NotDeferrable(str(error).splitlines()[0]) from error


def _other_tensors(model: nn.Module) -> list[Tensor]:
    """Buffers, and tensors among the attributes of modules."""
    found = {id(buffer): buffer for buffer in model.buffers()}
    for module in model.modules():
        attributes = {name: value for name, value in vars(module).items() if not name.startswith("_")}
        found |= {id(each): each for each in tree_leaves(attributes) if isinstance(each, Tensor)}
    return list(found.values())


class _Recorder(EagerDispatchMode):
    """Within, large tensors that are created become handles, and what is done to them is recorded."""

    def __init__(self, record: Record) -> None:
        super().__init__()
        self._record = record
        self._backings: dict[int, torch.UntypedStorage] = {}
        """By storage; the one that was used last is the last."""
        self._largest_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        has_handles = any(isinstance(each, Handle) for each in tree_leaves((args, kwargs)))
        if not has_handles and not (func in FACTORIES and _is_large(args, kwargs)):
            return func(*args, **kwargs)
        if func in REPLACING_STORAGE:
            raise NotDeferrable(f"{func} of a weight")
        if func.is_view or torch.Tag.inplace_view in func.tags:
            return _view(func, args, kwargs)
        return self._run(func, args, kwargs)

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation on values, and record it if it writes a handle or returns a large tensor."""
        state = _generator_state(func, kwargs)
        written = _written(func, args, kwargs)
        # Before it runs, since it may write what it reads.
        arguments = tree_map_only(Tensor, _recorded, (args, {k: v for k, v in kwargs.items() if k != "generator"}))
        handles = [each for each in written if isinstance(each, Handle)]
        overwrites = _overwritten(func, args, handles)
        used: set[int] = set()

        def value(handle: Handle) -> Tensor:
            view = handle.view_of_storage
            if func in SHAPE_ONLY:
                return view.unset()
            used.add(view.storage)
            return view.of(self._backing(view.storage, used, keeps_values=view.storage != overwrites))

        real_args, real_kwargs = tree_map_only(Handle, value, (args, kwargs))
        result = func(*real_args, **real_kwargs)
        if handles:
            self._record.add(Operation(func, arguments, state, (), overwrites), handles)
            result = written[0] if len(written) == 1 else tuple(written)
        elif not written:
            result = self._with_handles(func, arguments, state, result, used)
        self._drop_backings(used)
        return result

    def _with_handles(self, func: Any, arguments: Any, state: Tensor | None, result: Any, used: set[int]) -> Any:
        """The result with handles in place of large tensors."""
        handles: list[Handle] = []
        keys: list[int | None] = []

        def handle(tensor: Tensor) -> Tensor:
            if tensor.numel() < MIN_ELEMENTS or tensor.device.type != "cpu":
                keys.append(None)
                return tensor
            meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
            key = storage_key(meta)
            keys.append(key)
            handles.append(Handle(meta))
            if func not in UNSET:  # else there are no values until the first operation writes them
                self._backings[key] = own_memory(tensor)
            self._largest_bytes = max(self._largest_bytes, tensor.nbytes)
            used.add(key)
            return handles[-1]

        result = tree_map_only(Tensor, handle, result)
        if handles:
            self._record.add(Operation(func, arguments, state, tuple(keys)), handles)
        return result

    def _backing(self, storage: int, used: set[int], *, keeps_values: bool) -> torch.UntypedStorage:
        """The values of a storage; where they need not be kept, any. `used`: the storages of the operation so far."""
        values = self._backings.pop(storage, None)
        if values is None:
            self._drop_backings(used, room_for=self._record.num_bytes(storage))
            values = self._record.compute(storage) if keeps_values else self._record.unset(storage)
        self._backings[storage] = values
        return values

    def _drop_backings(self, used: set[int], room_for: int = 0) -> None:
        """Free the values that were not used for longest, until few enough are held. `used`: those that stay."""
        held = room_for + sum(values.nbytes() for values in self._backings.values())
        for storage in [each for each in self._backings if each not in used]:
            if held <= MAX_BACKING * self._largest_bytes:
                return
            held -= self._backings.pop(storage).nbytes()


def _is_large(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether a factory function makes a large tensor in ordinary memory."""
    device, layout = kwargs.get("device"), kwargs.get("layout")
    is_ordinary = (device is None or device.type == "cpu") and layout in (None, torch.strided)
    return is_ordinary and math.prod(args[0]) >= MIN_ELEMENTS


def _generator_state(func: Any, kwargs: dict[str, Any]) -> Tensor | None:
    """The state of the generator from which an operation will draw; None: it draws nothing."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return None
    generator = kwargs.get("generator") or torch.default_generator
    return generator.get_state()


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """The arguments that an operation writes."""
    arguments = schema_arguments(func)
    given = [*args, *(kwargs.get(argument.name) for argument in arguments[len(args) :])]
    pairs = zip(arguments, given, strict=True)
    written = [value for argument, value in pairs if argument.alias_info and argument.alias_info.is_write]
    return [value for value in written if value is not None]


def _overwritten(func: Any, args: Sequence[Any], written: Sequence[Handle]) -> int | None:
    """The storage of which an operation writes each element and reads none; None: there is none."""
    if func not in OVERWRITING or not written or written[0].meta.nbytes != written[0].meta.untyped_storage().nbytes():
        return None
    storage = storage_key(written[0].meta)
    is_read = any(isinstance(each, Handle) and storage_key(each.meta) == storage for each in tree_leaves(args[1:]))
    return None if is_read else storage


def _recorded(tensor: Tensor) -> View | Tensor:
    """What the record keeps of an argument."""
    return tensor.view_of_storage if isinstance(tensor, Handle) else tensor.clone()


def _view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of an operation that returns a view of a handle, or changes its shape in place."""
    result = func(*tree_map_only(Handle, lambda handle: handle.meta, args), **kwargs)
    if torch.Tag.inplace_view in func.tags:
        change_wrapper_shape(func, args, kwargs)
        return args[0]
    return tree_map_only(Tensor, Handle, result)
