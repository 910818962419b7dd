"""Groups: ranks that do collectives together, and what each collective is.

group  some ranks, for one purpose; its collectives pair up by the order in which each rank begins them
work   a collective on its way
Law: begun is not ended: what goes in may not be written, nor what comes out read, before `wait` has returned.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from fourfold.words.layout import Change
from fourfold.words.layout import collective_sent_bytes as layout_bytes

# Torch 2.13 has renamed these, and warns of the names before.
all_gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
reduce_scatter = dist.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor


class Work(Protocol):
    """A collective on its way, as torch.distributed has them."""

    def wait(self) -> Any: ...

    def is_completed(self) -> bool: ...

    def get_future(self) -> Any: ...


class Group(Protocol):
    """Ranks that do collectives together."""

    def all_reduce(self, flat: Tensor) -> Work:
        """The sum of all ranks' flats, in place."""
        ...

    def reduce_scatter(self, out: Tensor, flat: Tensor) -> Work:
        """Into `part`: this rank's equal share of the sum of the flats."""
        ...

    def all_to_all(self, out: Tensor, flat: Tensor) -> Work:
        """Into `received`: every rank's stretch for this one, in rank order; stretches are equal."""
        ...

    def all_gather(self, out: Tensor, shard: Tensor) -> Work:
        """Into `everyone`: the parts of all ranks, in rank order."""
        ...

    def broadcast(self, flat: Tensor, source: int) -> None:
        """What global rank `source` has, everywhere, in place. Waits."""
        ...


class TorchGroup:
    """The group over a process group of torch.distributed."""

    def __init__(self, group: Callable[[], dist.ProcessGroup | None]) -> None:
        self._group = group

    def all_reduce(self, flat: Tensor) -> Work:
        return _require_work(dist.all_reduce(flat, group=self._group(), async_op=True))

    def reduce_scatter(self, out: Tensor, flat: Tensor) -> Work:
        return _require_work(reduce_scatter(out, flat, group=self._group(), async_op=True))

    def all_to_all(self, out: Tensor, flat: Tensor) -> Work:
        return _require_work(dist.all_to_all_single(out, flat, group=self._group(), async_op=True))

    def all_gather(self, out: Tensor, shard: Tensor) -> Work:
        return _require_work(all_gather(out, shard, group=self._group(), async_op=True))

    def broadcast(self, flat: Tensor, source: int) -> None:
        dist.broadcast(flat, src=source, group=self._group())


def all_gather_rows(group: Group, mine: Tensor, *, size: int) -> Sequence[Tensor]:
    """Every rank's tensor [n], in rank order. Waits."""
    everyone = mine.new_empty(size * mine.numel())
    group.all_gather(everyone, mine).wait()
    return everyone.view(size, -1).unbind()


def _require_work(work: dist.Work | None) -> dist.Work:
    assert work is not None
    return work


def sum_in_order(parts: Sequence[Tensor], *, out: Tensor) -> None:
    """The sum of the parts, in their order whoever adds; `out` may be one of them."""
    total = parts[0]
    if len(parts) == 1:
        if out is not total:
            out.copy_(total)
        return
    for number, part in enumerate(parts[1:], 1):
        # Only the last sum lands in `out`: that may be an addend which is still to come.
        total = torch.add(total, part, out=out if number == len(parts) - 1 else None)


def ring_bytes(collective: Change, flat: Tensor, size: int) -> float:
    """Bytes each of `size` ranks sends to change the layout of `flat`."""
    return layout_bytes(collective, whole_bytes=flat.numel() * flat.element_size(), size=size)
