"""Collectives of a group of ranks.

group  some ranks, for one purpose; its collectives pair up by the order in which each rank begins them
work   a collective that has begun
Law: until `wait` has returned, a collective's input may not be written and its output may not be read.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from fourfold.words.layout import Change
from fourfold.words.layout import collective_sent_bytes as layout_bytes

# Torch 2.13 renamed these, and warns about the old names.
all_gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
reduce_scatter = dist.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor


class Work(Protocol):
    """A collective that has begun; torch.distributed's own has these methods too."""

    def wait(self) -> Any: ...

    def is_completed(self) -> bool: ...

    def get_future(self) -> Any: ...


class Group(Protocol):
    """Ranks that do collectives together. All but `broadcast` return before they are done."""

    def all_reduce(self, flat: Tensor) -> Work:
        """Sum `flat` over the ranks, in place."""
        ...

    def reduce_scatter(self, out: Tensor, flat: Tensor) -> Work:
        """Into `out`: this rank's shard of the sum of `flat`; shards are equal."""
        ...

    def all_to_all(self, out: Tensor, flat: Tensor) -> Work:
        """Into `out`: every rank's part for this one, in rank order; parts are equal."""
        ...

    def all_gather(self, out: Tensor, shard: Tensor) -> Work:
        """Into `out`: the shards of all ranks, in rank order."""
        ...

    def broadcast(self, flat: Tensor, source: int) -> None:
        """Copy rank `source`'s values into every rank's `flat`; ranks are numbered as in the communicator. Waits."""
        ...

    def send(self, flat: Tensor, target: int) -> Work:
        """Begin to send to a rank, numbered as in the communicator; messages arrive in order."""
        ...

    def receive(self, flat: Tensor, source: int) -> None:
        """Wait for a rank's next message, which is as long as `flat`."""
        ...


class TorchGroup:
    """The group over a process group of torch.distributed; `group` is called at every use.

    `ranks` are the global ranks of the communicator that the group is of.
    """

    def __init__(self, group: Callable[[], dist.ProcessGroup | None], ranks: Sequence[int]) -> None:
        self._group, self._ranks = group, ranks

    def all_reduce(self, flat: Tensor) -> Work:
        return _require_work(dist.all_reduce(flat, group=self._group(), async_op=True))

    def reduce_scatter(self, out: Tensor, flat: Tensor) -> Work:
        return _require_work(reduce_scatter(out, flat, group=self._group(), async_op=True))

    def all_to_all(self, out: Tensor, flat: Tensor) -> Work:
        return _require_work(dist.all_to_all_single(out, flat, group=self._group(), async_op=True))

    def all_gather(self, out: Tensor, shard: Tensor) -> Work:
        return _require_work(all_gather(out, shard, group=self._group(), async_op=True))

    def broadcast(self, flat: Tensor, source: int) -> None:
        dist.broadcast(flat, src=self._ranks[source], group=self._group())

    def send(self, flat: Tensor, target: int) -> Work:
        return _require_work(dist.isend(flat, self._ranks[target], group=self._group()))

    def receive(self, flat: Tensor, source: int) -> None:
        dist.recv(flat, self._ranks[source], group=self._group())


def all_gather_rows(group: Group, row: Tensor, *, size: int) -> Sequence[Tensor]:
    """Every rank's tensor [n], in rank order. Waits."""
    gathered = row.new_empty(size * row.numel())
    group.all_gather(gathered, row).wait()
    return gathered.view(size, -1).unbind()


def _require_work(work: dist.Work | None) -> dist.Work:
    assert work is not None
    return work


def sum_in_order(parts: Sequence[Tensor], *, out: Tensor) -> None:
    """Add the parts in their order; `out` may be one of them."""
    total = parts[0]
    if len(parts) == 1:
        if out is not total:
            out.copy_(total)
        return
    for number, part in enumerate(parts[1:], 1):
        # Only the last sum goes to `out`, which may be an addend that is yet to be added.
        total = torch.add(total, part, out=out if number == len(parts) - 1 else None)


def ring_bytes(collective: Change, flat: Tensor, size: int) -> float:
    """Bytes each of `size` ranks sends in a collective on `flat`, by the ring formula."""
    return layout_bytes(collective, whole_bytes=flat.numel() * flat.element_size(), size=size)
