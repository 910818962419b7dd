"""Saved tensors: what autograd keeps between forward and backward.

Law: each storage counts once, however many of its views are saved.
"""

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor


class SavedStorages(dict[int, torch.UntypedStorage]):
    """Storages by address. They are held, so an address is not used twice."""

    @property
    def num_bytes(self) -> int:
        return sum(storage.nbytes() for storage in self.values())

    def add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self[storage.data_ptr()] = storage


@contextlib.contextmanager
def recording_saved(*, excluded: Iterable[Tensor] = ()) -> Iterator[SavedStorages]:
    """The storages that autograd saves within, without those of `excluded`, such as a model's weights."""
    saved, known = SavedStorages(), {tensor.untyped_storage().data_ptr() for tensor in excluded}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in known:
            saved.add(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved
