"""Peak memory: the most bytes a step holds at once, by kind, on real or fake tensors.

kind     what the caller names tensors that exist already (`track`); else TEMPORARY if made inside of a backward, and
         `forward_kind` outside of one: ACTIVATION, unless the caller changes it
storage  counted once, however many views it has, from when an operation returns it until its last tensor is gone
Law: the kinds add up to the bytes of all live storages that have been seen.

Memory that an operation allocates and frees before it returns is not seen. Fake tensors have sizes but no memory, so
one process can count what a rank of any world would hold.
"""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from fourfold.torch_kit.tensor_tree import tree_leaves
from fourfold.torch_kit.torch_private import TorchDispatchMode, is_in_backward

ACTIVATION, TEMPORARY = "activations", "temporaries"


class PeakMemory(TorchDispatchMode):
    """Within: counts the results of every operation. `peak_bytes` and `bytes_by_kind` are those of the peak.

    `current_bytes`: what is held now.
    """

    forward_kind = ACTIVATION

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes, self.bytes_by_kind = 0, dict[str, int]()
        self._current_by_kind: dict[str, int] = {ACTIVATION: 0, TEMPORARY: 0}
        self.current_bytes = 0
        self._seen_storages = WeakIdKeyDictionary()

    def track(self, kind: str, tensors: Iterable[Tensor]) -> None:
        """Count tensors that exist already."""
        for tensor in tensors:
            self._count(tensor, kind)
        self.update_peak()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        kind = TEMPORARY if is_in_backward() else self.forward_kind
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._count(leaf, kind)
        self.update_peak()
        return result

    def current_bytes_of(self, kind: str) -> int:
        """What is held now, of one kind."""
        return self._current_by_kind.get(kind, 0)

    def _count(self, tensor: Tensor, kind: str) -> None:
        storage = tensor.untyped_storage()
        if storage in self._seen_storages:
            return
        size = storage.nbytes()
        self._seen_storages[storage] = None
        self._add(kind, size)
        weakref.finalize(storage, self._add, kind, -size)

    def _add(self, kind: str, size: int) -> None:
        self._current_by_kind[kind] = self._current_by_kind.get(kind, 0) + size
        self.current_bytes += size

    def update_peak(self) -> None:
        """An operation has returned."""
        if self.current_bytes > self.peak_bytes:
            self.peak_bytes, self.bytes_by_kind = self.current_bytes, dict(self._current_by_kind)
