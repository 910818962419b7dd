"""Collectives of a group of ranks.

group  some ranks, for one purpose; its collectives pair up by the order in which each rank begins them
work   a collective that has begun
Law: until `wait` has returned, a collective's input may not be written and its output may not be read.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fourfold.words.layout import Change
from fourfold.words.layout import collective_sent_bytes as layout_bytes

# Torch 2.13 renamed these, and warns about the old names.
all_gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
reduce_scatter = dist.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor


DTYPES = (
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip
"""What ranks name by its index: both ends must agree."""


def always_done() -> bool:
    """`is_completed` of what sends nothing."""
    return True


class Work(NamedTuple):
    """What has begun: `wait` returns its result, `is_completed` says whether `wait` would return at once."""

    wait: Callable[[], Any]
    is_completed: Callable[[], bool] = always_done
    get_future: Callable[[], Any] | None = None
    """torch's future, by which a trace learns when it ended; None where nothing is sent."""


class Group:
    """Ranks that do collectives together, over a process group; `group` is called at every use.

    All but `broadcast` and `receive` return before they are done. The result of what has begun is `out`, or `flat`
    without one. All raise PeerError, also where they are waited for, if a rank has died.

    ranks      the global ranks of the communicator that the group is of; `members`: those of the group
    rank       this one's global rank
    reporting  within, a broken connection names the dead rank
    """

    def __init__(
        self,
        group: Callable[[], dist.ProcessGroup | None],
        ranks: Sequence[int],
        members: Sequence[int],
        rank: int,
        reporting: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._group, self._ranks, self._members, self._rank = group, ranks, members, rank
        self._reporting = reporting

    def _begin(self, out: Tensor, begin: Callable[..., dist.Work | None], *tensors: Tensor) -> Work:
        with self._reporting():
            work = begin(*tensors, group=self._group(), async_op=True)
        return self._started(work, out)

    def _started(self, work: dist.Work | None, out: Tensor) -> Work:
        assert work is not None

        def wait() -> Tensor:
            with self._reporting():
                work.wait()
            return out

        return Work(wait, work.is_completed, work.get_future)

    def all_reduce(self, flat: Tensor) -> Work:
        """Sum `flat` over the ranks, in place."""
        return self._begin(flat, dist.all_reduce, flat)

    def reduce_scatter(self, out: Tensor, flat: Tensor) -> Work:
        """Into `out`: this rank's shard of the sum of `flat`; shards are equal."""
        return self._begin(out, reduce_scatter, out, flat)

    def all_to_all(self, out: Tensor, flat: Tensor) -> Work:
        """Into `out`: every rank's part for this one, in rank order; parts are equal."""
        return self._begin(out, dist.all_to_all_single, out, flat)

    def all_gather(self, out: Tensor, shard: Tensor) -> Work:
        """Into `out`: the shards of all ranks, in rank order."""
        return self._begin(out, all_gather, out, shard)

    def broadcast(self, flat: Tensor, source: int) -> None:
        """Copy rank `source`'s values into every rank's `flat`; ranks are numbered as in the communicator. Waits."""
        with self._reporting():
            dist.broadcast(flat, src=self._ranks[source], group=self._group())

    def send(self, flat: Tensor, target: int) -> Work:
        """Begin to send to a rank, numbered as in the communicator; messages arrive in order."""
        with self._reporting():
            work = dist.isend(flat, self._ranks[target], group=self._group())
        return self._started(work, flat)

    def receive(self, flat: Tensor, source: int) -> None:
        """Wait for a rank's next message, which is as long as `flat`."""
        with self._reporting():
            dist.recv(flat, self._ranks[source], group=self._group())

    def shift(self, flat: Tensor, tag: int) -> Work:
        """Begin to send to the next member, the last one to the first: the result is what the one before has sent."""
        received, group = torch.empty_like(flat), self._group()
        index, size = self._members.index(self._rank), len(self._members)
        right, left = self._members[(index + 1) % size], self._members[(index - 1) % size]
        operations = [
            dist.P2POp(dist.isend, flat, right, group=group, tag=tag),
            dist.P2POp(dist.irecv, received, left, group=group, tag=tag),
        ]
        with self._reporting():
            works = dist.batch_isend_irecv(operations)  # one over NCCL, which joins them

        def wait() -> Tensor:
            with self._reporting():
                for work in works:
                    work.wait()
            return received

        return Work(wait, works[-1].is_completed)


def all_gather_rows(group: Group, row: Tensor, *, size: int) -> Sequence[Tensor]:
    """Every rank's tensor [n], in rank order. Waits."""
    gathered = row.new_empty(size * row.numel())
    group.all_gather(gathered, row).wait()
    return gathered.view(size, -1).unbind()


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
