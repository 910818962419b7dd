"""Sharded collectives: reduce-scatter and all-gather of equal shards over a process group.

shard     the index-th of `size` equal parts of a flat tensor
received  the other ranks' addends of this rank's shard, in rank order, until they are added up
replica   ranks that hold all shards among them; the ranks of one shard index then sum it over the replicas
Law: addends are added in rank order, ((0 + 1) + 2) + …, whichever rank adds.

Over gloo a reduce-scatter is an all-to-all and a sum: gloo's own moves as many bytes as its all-reduce and takes 1.3
to 2.3 times as long (`docs/measured-notes.md`).
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fourfold.axes.data.rules.zero import ShardGroups
from fourfold.comm.collectives import Group, Work, sum_in_order
from fourfold.comm.communicator import Communicator
from fourfold.torch_kit import memory
from fourfold.words.layout import Change
from fourfold.words.noop import noop

# ---- async result --------------------------------------------------------------------------------------------------

GetFuture = Callable[[], Any]


class AsyncResult(NamedTuple):
    """A collective that has begun: `wait` returns its result, `is_done` says whether `wait` would return at once."""

    wait: Callable[[], Any]
    is_done: Callable[[], bool]


def always_done() -> bool:
    """`is_done` of a collective that sends nothing."""
    return True


# ---- sharded collectives -------------------------------------------------------------------------------------------


class _TwoStageReduce:
    """A sum over one replica's ranks, then over the replicas. Second stages begin in the order of the first ones.

    Each wait and each `is_done` also starts the second stages of earlier reductions: other ranks may wait for them.
    """

    def __init__(self, first: AsyncResult, replica_group: Group, queue: "deque[_TwoStageReduce]") -> None:
        self._first, self._replica_group, self._queue = first, replica_group, queue
        self._sum: Tensor | None = None
        self._second: Work | None = None

    def _start_next_stage(self) -> None:
        head = self._queue.popleft()
        shard = head._first.wait()
        head._sum, head._second = shard, head._replica_group.all_reduce(shard)

    def is_done(self) -> bool:
        while self._second is None:
            if not self._queue[0]._first.is_done():
                return False
            self._start_next_stage()
        return self._second.is_completed()

    def wait(self) -> Tensor:
        while self._second is None:
            self._start_next_stage()
        self._second.wait()
        assert self._sum is not None
        return self._sum


class ShardedCollectives:
    """The ranks among which flat tensors are split. Every rank must begin the same collectives in the same order.

    Reductions and gathers have a process group each, so each has an order of its own: an update inside backward may
    gather before or after the next reduction begins.
    """

    def __init__(self, comm: Communicator, members: Sequence[int], *, num_shards: int | None = None) -> None:
        """`num_shards` neighbouring members hold all shards among them; None: all members."""
        self._communicator = comm
        self.size = num_shards or len(members)
        self.shard_groups = ShardGroups(self.size, len(members) // self.size)
        index = list(members).index(comm.rank)
        self.index, self.replica_index = index % self.size, index // self.size
        if self.size > 1:
            replica = members[index - self.index : index - self.index + self.size]
            self._reduce_group, self._gather_group = (
                comm.get_group(replica, "buckets"),
                comm.get_group(replica, "weights"),
            )
        if self.shard_groups.num_replicas > 1:
            self._replica_group = comm.get_group(members[self.index :: self.size], "replicas")
        self._two_stage_queue: deque[_TwoStageReduce] = deque()
        self._free_buffers: dict[tuple[int, torch.dtype], list[Tensor]] = {}

    def local_shard(self, flat: Tensor) -> Tensor:
        """This rank's shard, a view."""
        length = flat.numel() // self.size
        return flat[self.index * length : (self.index + 1) * length]

    def reduce_scatter_async(self, flat: Tensor, on_start: Callable[[GetFuture], None] = noop) -> AsyncResult:
        """Begin to sum `flat` over the ranks; the result is this rank's shard of the sum.

        The sum lies in this rank's shard of `flat`; the rest of `flat` then holds garbage. `on_start` receives a
        function that returns the collective's future.
        """
        result = self._reduce_scatter(flat, on_start) if self.size > 1 else AsyncResult(lambda: flat, always_done)
        if self.shard_groups.num_replicas == 1:
            return result
        two_stage = _TwoStageReduce(result, self._replica_group, self._two_stage_queue)
        self._two_stage_queue.append(two_stage)
        two_stage.is_done()  # starts the second stage if the first needs no wait

        def wait() -> Tensor:
            with self._communicator.report_dead_peers():
                return two_stage.wait()

        return AsyncResult(wait, two_stage.is_done)

    def _reduce_scatter(self, flat: Tensor, on_start: Callable[[GetFuture], None]) -> AsyncResult:
        shard = self.local_shard(flat)
        if flat.device.type == "cuda":
            work = self._reduce_group.reduce_scatter(shard, flat)
            on_start(work.get_future)

            def wait() -> Tensor:
                with self._communicator.report_dead_peers():
                    work.wait()
                return shard

            return AsyncResult(wait, work.is_completed)
        received = self._acquire_buffer(flat.numel(), flat.dtype)
        work = self._reduce_group.all_to_all(received, flat)
        on_start(work.get_future)

        def wait_and_sum() -> Tensor:
            with self._communicator.report_dead_peers():
                work.wait()
            sum_in_order(received.view(self.size, -1).unbind(), out=shard)
            self._release_buffer(received)
            return shard

        return AsyncResult(wait_and_sum, work.is_completed)

    def all_gather_inplace_async(self, flat: Tensor, on_start: Callable[[GetFuture], None] = noop) -> AsyncResult:
        """Begin to gather every rank's shard of `flat`, in place. `on_start`: as above."""
        if flat.device.type == "cuda":
            return self._start_gather(self.local_shard(flat), flat, on_start)
        # A copy: gloo does not promise that the input may be a part of the output.
        shard = self._copy_to_buffer(self.local_shard(flat))
        gathered = self._start_gather(shard, flat, on_start)

        def wait_and_release() -> None:
            gathered.wait()
            self._release_buffer(shard)

        return AsyncResult(wait_and_release, gathered.is_done)

    def all_gather_async(
        self, shard: Tensor, out: Tensor, on_start: Callable[[GetFuture], None] = noop
    ) -> Callable[[], None]:
        """Begin to gather every rank's shard into `out`. Returns the wait. `on_start`: as above."""
        return self._start_gather(shard, out, on_start).wait

    def _start_gather(self, shard: Tensor, out: Tensor, on_start: Callable[[GetFuture], None]) -> AsyncResult:
        work = self._gather_group.all_gather(out, shard)
        on_start(work.get_future)

        def wait() -> None:
            with self._communicator.report_dead_peers():
                work.wait()

        return AsyncResult(wait, work.is_completed)

    def reduced_bytes(self, flat: Tensor) -> float:
        """Bytes this rank sends to reduce a flat tensor, by the ring formula."""
        return self.shard_groups.reduce_sent_bytes(Change.REDUCE_SCATTER, flat.numel() * flat.element_size())

    def gathered_bytes(self, flat: Tensor) -> float:
        """Bytes this rank sends to gather the shards of a flat tensor, by the ring formula."""
        return self.shard_groups.all_gather_sent_bytes(Change.ALL_GATHER, flat.numel() * flat.element_size())

    def _copy_to_buffer(self, shard: Tensor) -> Tensor:
        return self._acquire_buffer(shard.numel(), shard.dtype).copy_(shard)

    def _acquire_buffer(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        free = self._free_buffers.setdefault((num_elements, dtype), [])
        return free.pop() if free else memory.allocate_private(num_elements, dtype, torch.device("cpu"))

    def _release_buffer(self, flat: Tensor) -> None:
        self._free_buffers[flat.numel(), flat.dtype].append(flat)
