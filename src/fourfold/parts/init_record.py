"""Initialization record: what was done to tensors that take no memory, and their values when they are asked for.

handle   stands for a large tensor that a model has created: shape, strides and device, and no values
record   the operations that wrote to handles, with the states of the random generator before those that draw
Law: a value is that which the same operations gave, bit for bit. Operations are run again from the last one that wrote
a storage without reading it; what they read is computed in the same way, and freed.

Source: torchdistx's deferred_init.
"""

import copy
import dataclasses
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fourfold.parts.init_operations import SHAPE_ONLY, UNSET, NotDeferrable, returned, run_from, written_arguments
from fourfold.parts.memory import allocate_private
from fourfold.parts.torch_dispatch import SET_DATA, make_wrapper_subclass
from fourfold.parts.torch_private import (
    DisableTorchFunctionSubclass,
    storage_key,
    tree_leaves,
    tree_map_only,
)

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
