"""Deferred initialization: a model is made with weights that take no memory; each is computed when it is asked for.

handle   stands for a large tensor that the model has created: shape, strides and device, and no values
record   the operations that wrote to handles, with the states of the random generator before those that draw
backing  the values of a handle's storage; dropped when others are needed, and computed again from the record
Law: the values are those that the same function makes without this, bit for bit, and the generator ends in the same
state. While a model is made, and while a weight is computed, at most MAX_BACKING of the largest tensor is held.
An operation of which it is not known that it gives the same values whenever it is run again raises NotDeferrable.

The operations run for real, each once while the model is made: the values may decide what is done next, as in
`nn.init.trunc_normal_`. They are run again from the last one that wrote a storage without reading it; what they read is
computed in the same way, and freed.

Source: torchdistx's deferred_init.
"""

import copy
import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fourfold.plan.param_spec import TensorShard
from fourfold.torch_kit.memory import allocate_private
from fourfold.torch_kit.torch_dispatch import (
    SET_DATA,
    EagerDispatchMode,
    alias_names,
    attach_hooks_again,
    change_wrapper_shape,
    make_wrapper_subclass,
    schema_arguments,
    schema_returns,
)
from fourfold.torch_kit.torch_private import (
    DisableTorchFunctionSubclass,
    storage_key,
    tree_leaves,
    tree_map_only,
)

# ---- operations that make values -----------------------------------------------------------------------------------

aten = torch.ops.aten
FACTORIES = {
    aten.empty.memory_format, aten.empty_strided.default, aten.zeros.default, aten.ones.default, aten.full.default,
    aten.rand.default, aten.rand.generator, aten.randn.default, aten.randn.generator,
}  # fmt: skip
OVERWRITING = {
    aten.normal_.default, aten.uniform_.default, aten.random_.default, aten.exponential_.default,
    aten.log_normal_.default, aten.cauchy_.default, aten.geometric_.default, aten.bernoulli_.float,
    aten.zero_.default, aten.fill_.Scalar, aten.copy_.default,
}  # fmt: skip
# These leave the values of their result open.
UNSET = {aten.empty.memory_format, aten.empty_strided.default, aten.new_empty.default, aten.empty_like.default}
# These use the shape of a tensor and none of its values.
SHAPE_ONLY = {
    aten.new_empty.default, aten.new_zeros.default, aten.new_ones.default, aten.new_full.default,
    aten.empty_like.default, aten.zeros_like.default, aten.ones_like.default, aten.full_like.default,
    aten.rand_like.default, aten.randn_like.default,
}  # fmt: skip
# These change the memory of a tensor, not its values: in every overload.
REPLACING_STORAGE = {aten.set_, aten.resize_, aten.resize_as_}
# These write running statistics, and their schemas do not say so.
UNDECLARED_WRITES = {aten.native_batch_norm, aten.cudnn_batch_norm, aten.miopen_batch_norm}
KNOWN_NAMESPACES = {"aten", "prims"}


class NotDeferrable(Exception):
    """What a model does while it is made cannot be recorded; the message says what."""


def check_recordable(function: Any) -> None:
    """Raise NotDeferrable for an operation of weights of which the schema does not tell the whole effect."""
    if function.namespace not in KNOWN_NAMESPACES:
        # It may draw, send or write without a word: torch's own operations have tags for that.
        raise NotDeferrable(f"{function}, an operation that is not torch's, of a weight")
    if function.overloadpacket in REPLACING_STORAGE | UNDECLARED_WRITES:
        raise NotDeferrable(f"{function} of a weight")


def split_generator(
    function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], Tensor | None]:
    """The arguments without a generator, and the state from which the operation will draw; None: it draws nothing."""
    given = _by_name(function, args, kwargs)
    generator = given.pop("generator", None) or torch.default_generator
    state = generator.get_state() if torch.Tag.nondeterministic_seeded in function.tags else None
    names = [argument.name for argument in schema_arguments(function)[: len(args)]]
    positional = names.index("generator") if "generator" in names else len(args)  # `rrelu_with_noise` takes it so
    return tuple(args[:positional]), {name: given[name] for name in given if name not in names[:positional]}, state


def _by_name(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    names = [argument.name for argument in schema_arguments(function)]
    return dict(zip(names, args, strict=False)) | dict(kwargs)


def written_arguments(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that an operation writes: tensors and lists of tensors, by name."""
    given = _by_name(function, args, kwargs)
    is_write = {each.name for each in schema_arguments(function) if each.alias_info and each.alias_info.is_write}
    return {name: value for name, value in given.items() if name in is_write and value is not None}


def returned(function: Any, result: Any, written: Mapping[str, Any], replace: Callable[[Any], Any]) -> Any:
    """What an operation returns: the arguments that it wrote where its schema says so, all else replaced."""
    returns = schema_returns(function)
    if not returns:
        return None
    names = {alias_names(each): each.name for each in schema_arguments(function) if each.name in written}
    values = result if len(returns) > 1 else (result,)
    kept = tuple(
        written[names[alias_names(each)]] if alias_names(each) in names else replace(value)
        for each, value in zip(returns, values, strict=True)
    )
    return kept if len(returns) > 1 else kept[0]


def fills(tensor: Tensor) -> bool:
    """Whether each element of a tensor's storage is one of its elements."""
    reached = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1):
        if stride != reached:
            return False
        reached *= size
    return tensor.nbytes == tensor.untyped_storage().nbytes()


def overload_with_generator(function: Any) -> Any:
    """The operation that draws the same numbers from a generator that it is given. Raises NotDeferrable."""
    needed = sorted(_signature(function))
    for name in function.overloadpacket.overloads():
        overload = getattr(function.overloadpacket, name)
        others = [each for each in _signature(overload) if each[0] != "generator"]
        if any(each.name == "generator" for each in schema_arguments(overload)) and sorted(others) == needed:
            return overload
    raise NotDeferrable(f"{function} of a weight, which draws and takes no generator")


def _signature(function: Any) -> list[tuple[str, str]]:
    return [(each.name, str(each.type)) for each in schema_arguments(function) if each.name != "generator"]


def run_from(state: Tensor | None, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation, with a generator in this state if it draws."""
    if state is None:
        return function(*args, **kwargs)
    generator = torch.Generator()
    generator.set_state(state)
    return overload_with_generator(function)(*args, **kwargs, generator=generator)


# ---- initialization record -----------------------------------------------------------------------------------------

HANDLE_ATTRIBUTES = {"meta", "_is_param"}
"""What torch and `Handle` keep on a handle; all other attributes are the model's."""


@dataclasses.dataclass(frozen=True)
class View:
    """A handle, as a view of its storage."""

    storage: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    def of(self, backing: torch.UntypedStorage) -> Tensor:
        return torch.empty(0, dtype=self.dtype).set_(backing, self.offset, self.shape, self.stride)

    def unset(self) -> Tensor:
        """A tensor of this shape, with any values."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype)


class Handle(Tensor):
    """Stands for a tensor on the CPU, and looks like one: models may ask for the device.

    meta  a tensor of the same shape on the meta device; two handles have one storage if their tensors have
    """

    meta: Tensor

    @staticmethod
    def __new__(cls, meta: Tensor) -> "Handle":
        handle = make_wrapper_subclass(cls, meta, device=torch.device("cpu"))
        handle.meta = meta
        return handle

    @property
    def view_of_storage(self) -> View:
        meta = self.meta
        return View(storage_key(meta), meta.dtype, meta.shape, meta.stride(), int(meta.storage_offset()))

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copied = self.detach().clone()
        result = nn.Parameter(copied, self.requires_grad) if isinstance(self, nn.Parameter) else copied
        others = {name: value for name, value in vars(self).items() if name not in HANDLE_ATTRIBUTES}
        vars(result).update(copy.deepcopy(others, memo))
        memo[id(self)] = result
        return result

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == SET_DATA:
            handle, data = args
            if not isinstance(data, Handle):
                raise NotDeferrable("a weight that gets data with values")
            handle.meta = data.meta
        with DisableTorchFunctionSubclass():  # results that have values are no handles
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotDeferrable(f"{func} of a weight, after the model was made")  # while it is made, the recorder sees it


class Operation(NamedTuple):
    """One operation that has written or returned a storage.

    arguments   (args, kwargs), with a `View` for each handle
    generator   the state of the random generator before it; None: it draws nothing
    results     the storages of the new tensors that it returned, None for those that are no handles
    overwrites  the storage of which it writes each element and reads none; None: there is none
    """

    function: Any
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    generator: Tensor | None
    results: tuple[int | None, ...] = ()
    overwrites: int | None = None


class Record:
    """The operations that wrote to handles; computes the values."""

    def __init__(self) -> None:
        self._operations: list[Operation] = []
        self._writes: dict[int, list[int]] = {}
        """By storage: the numbers of the operations that wrote it."""
        self._storages: dict[int, torch.UntypedStorage] = {}
        """Those of the handles. While they are kept, no other storage gets their keys."""

    def add(self, operation: Operation, handles: Iterable[Handle]) -> None:
        """`handles`: those that the operation has written or returned."""
        storages = {storage_key(handle.meta): handle.meta.untyped_storage() for handle in handles}
        self._storages |= storages
        for key in storages:  # once, also where it has written two views of it
            self._writes.setdefault(key, []).append(len(self._operations))
        self._operations.append(operation)

    def compute(self, storage: int, before: int | None = None) -> torch.UntypedStorage:
        """The values of a storage, as they were before an operation; None: after the last one."""
        writes = [number for number in self._writes[storage] if before is None or number < before]
        fresh = [number for number in writes if self._is_fresh(number, storage)]
        values = torch.UntypedStorage(0)
        for number in writes[writes.index(fresh[-1]) :]:
            values = self._run(number, storage, values)
        return values

    def num_bytes(self, storage: int) -> int:
        return self._storages[storage].nbytes()

    def unset(self, storage: int) -> torch.UntypedStorage:
        """Memory for the values of a storage."""
        return _allocate(self.num_bytes(storage))

    def _is_fresh(self, number: int, storage: int) -> bool:
        """Whether an operation writes a storage without reading it."""
        operation = self._operations[number]
        return storage in operation.results or storage == operation.overwrites

    def _run(self, number: int, storage: int, values: torch.UntypedStorage) -> torch.UntypedStorage:
        """Run an operation again that has written a storage, which had these values; returns the new ones."""
        operation = self._operations[number]
        if operation.overwrites == storage and not values.nbytes():
            values = self.unset(storage)
        backings = {storage: values}

        def value(view: View) -> Tensor:
            if operation.function in SHAPE_ONLY:
                return view.unset()
            if view.storage not in backings:
                backings[view.storage] = self.compute(view.storage, number)
            return view.of(backings[view.storage])

        if operation.function in UNSET:
            return self.unset(storage)
        args, kwargs = tree_map_only(View, value, _own_arguments(operation))
        result = run_from(operation.generator, operation.function, args, kwargs)
        if storage not in operation.results:
            return values
        new: list[Any] = []
        returned(operation.function, result, written_arguments(operation.function, args, kwargs), new.append)
        tensors = [each for each in tree_leaves(new) if isinstance(each, Tensor)]
        return own_memory(tensors[operation.results.index(storage)])


def _own_arguments(operation: Operation) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Its arguments; if it writes a tensor that is no handle, with copies of such tensors: it may run again."""
    written = written_arguments(operation.function, *operation.arguments)
    if not any(isinstance(each, Tensor) for each in tree_leaves(written)):
        return operation.arguments
    return tree_map_only(Tensor, Tensor.clone, operation.arguments)


def own_memory(tensor: Tensor) -> torch.UntypedStorage:
    """A storage with the elements of a tensor, in memory that goes back to the system when it is freed.

    Freed memory of the allocator's would not: large aligned blocks come and go here, and each leaves a gap that is a
    little too small for the next one.
    """
    source = tensor.untyped_storage()
    storage = _allocate(source.nbytes())
    storage.copy_(source)
    return storage


def _allocate(num_bytes: int) -> torch.UntypedStorage:
    return allocate_private(num_bytes, torch.uint8, torch.device("cpu")).untyped_storage()


# ---- deferred initialization ---------------------------------------------------------------------------------------


MIN_ELEMENTS = 2**15  # of a handle; smaller tensors are made at once
MAX_BACKING = 1.75  # of the largest storage: a whole tensor, and the masks that its initialization may need


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

    def part(self, parameter: nn.Parameter, shard: TensorShard) -> Tensor | None:
        """A shard of a parameter, if it can be had without the whole one; the same on all ranks that hold it."""
        return None


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
    attach_hooks_again(tensor)


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
        if has_handles:
            check_recordable(func)
        if func.is_view or torch.Tag.inplace_view in func.tags:
            return _view(func, args, kwargs)
        return self._run(func, args, kwargs)

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation on values, and record it if it writes a handle or returns a large tensor."""
        recorded_args, recorded_kwargs, state = split_generator(func, args, kwargs)
        # Before it runs, since it may write what it reads.
        arguments = tree_map_only(Tensor, _recorded, (recorded_args, recorded_kwargs))
        written = written_arguments(func, args, kwargs)
        _check_plain_arguments(func, args, kwargs, written)
        written_handles = [each for each in tree_leaves(written) if isinstance(each, Handle)]
        overwrites = _overwritten(func, args, written_handles)
        used: set[int] = set()
        given: list[tuple[Handle, Tensor]] = []

        def value(handle: Handle) -> Tensor:
            view = handle.view_of_storage
            if func in SHAPE_ONLY:
                return view.unset()
            used.add(view.storage)
            backing = self._backing(view.storage, used, keeps_values=view.storage != overwrites)
            given.append((handle, view.of(backing)))
            return given[-1][1]

        new: list[Tensor] = []

        def replace(tensor: Tensor) -> Tensor:
            new.append(self._large_as_handle(func, tensor, used))
            return new[-1]

        real_args, real_kwargs = tree_map_only(Handle, value, (args, kwargs))
        result = func(*real_args, **real_kwargs)
        _check_memory(func, given, result, written)
        result = returned(func, result, written, lambda each: tree_map_only(Tensor, replace, each))
        handles = [*written_handles, *(each for each in new if isinstance(each, Handle))]
        if handles:
            if state is not None:
                overload_with_generator(func)  # raises if its draw cannot be repeated
            keys = tuple(storage_key(each.meta) if isinstance(each, Handle) else None for each in new)
            self._record.add(Operation(func, arguments, state, keys, overwrites), handles)
        self._drop_backings(used)
        return result

    def _large_as_handle(self, func: Any, tensor: Tensor, used: set[int]) -> Tensor:
        """A handle in place of a large result."""
        if tensor.numel() < MIN_ELEMENTS or tensor.device.type != "cpu":
            return tensor
        handle = Handle(torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta"))
        key = storage_key(handle.meta)
        if func not in UNSET:  # else there are no values until the first operation writes them
            self._backings[key] = own_memory(tensor)
        self._largest_bytes = max(self._largest_bytes, tensor.nbytes)
        used.add(key)
        return handle

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


def _check_plain_arguments(func: Any, args: Any, kwargs: Any, written: Mapping[str, Any]) -> None:
    """Raise NotDeferrable for an operation that writes a handle and another tensor, which it also reads elsewhere.

    The record keeps a copy of each argument.
    """
    leaves = tree_leaves(written)
    if all(isinstance(each, Handle) for each in leaves) or not any(isinstance(each, Handle) for each in leaves):
        return
    plain = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor) and not isinstance(each, Handle)]
    keys = Counter(map(storage_key, plain))
    if any(keys[storage_key(each)] > 1 for each in leaves if not isinstance(each, Handle)):
        raise NotDeferrable(f"{func}, which reads and writes a tensor beside a weight")


def _check_memory(func: Any, given: Sequence[tuple[Handle, Tensor]], result: Any, written: Mapping[str, Any]) -> None:
    """Raise NotDeferrable if an operation has changed the shape of a handle's values, or returns them as new ones."""
    for handle, real in given:
        meta = handle.meta
        if (real.shape, real.stride(), real.untyped_storage().nbytes()) != (
            meta.shape, meta.stride(), meta.untyped_storage().nbytes(),
        ):  # fmt: skip
            raise NotDeferrable(f"{func}, which gives a weight another shape")
    new: list[Any] = []
    returned(func, result, written, new.append)
    storages = {storage_key(real) for _, real in given}
    if any(isinstance(each, Tensor) and storage_key(each) in storages for each in tree_leaves(new)):
        raise NotDeferrable(f"{func}, which returns a weight as a new tensor")


def _overwritten(func: Any, args: Sequence[Any], written: Sequence[Handle]) -> int | None:
    """The storage of which an operation writes each element and reads none; None: there is none."""
    if func not in OVERWRITING or not written or not fills(written[0].meta):
        return None
    storage = storage_key(written[0].meta)
    is_read = any(isinstance(each, Handle) and storage_key(each.meta) == storage for each in tree_leaves(args[1:]))
    return None if is_read else storage


def _recorded(tensor: Tensor) -> View | Tensor:
    """What the record keeps of an argument."""
    return tensor.view_of_storage if isinstance(tensor, Handle) else tensor.clone()


def _view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of an operation that returns a view of a handle, or changes its shape in place."""
    metas = tree_map_only(Handle, lambda handle: handle.meta, args)
    result = func(*metas, **kwargs)
    if torch.Tag.inplace_view in func.tags:
        change_wrapper_shape(func, args, kwargs)
        return args[0]
    storages = {storage_key(each) for each in tree_leaves(metas) if isinstance(each, Tensor)}
    if any(storage_key(each) not in storages for each in tree_leaves(result)):
        raise NotDeferrable(f"{func} of a weight, which copies it")  # as `reshape` may, under `torch.inference_mode`
    return tree_map_only(Tensor, Handle, result)
