"""Split: reduce-scatter and all-gather of equal shares over a group.

share     the index-th of `size` equal stretches of a flat
received  the other ranks' addends of this rank's share, in rank order, until they are added up
replica   ranks that have all shares among them; who have the same share sum it over the replicas
Law: whoever adds, the addends are added in rank order: ((0 + 1) + 2) + …

Over gloo a reduce-scatter is an all-to-all and a sum: gloo's own moves as many bytes as its all-reduce and takes 1.3
to 2.3 times as long (`docs/measured.md`).
"""

from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fourfold.parts import memory
from fourfold.parts.comm.collectives import Group, Work, sum_in_order
from fourfold.parts.comm.communicator import Communicator
from fourfold.parts.comm.reduce.async_result import AsyncResult, GetFuture, always_done, noop
from fourfold.plan.data import ShardGroups
from fourfold.words.layout import Change


class _TwoStageReduce:
    """A sum over one replica's ranks that is then summed over the replicas; all ranks do so in the order of scatters.

    Every look at one of them sends on those before it, whose second sums others may be waiting for.
    """

    def __init__(self, first: AsyncResult, replicas: Group, before: "deque[_TwoStageReduce]") -> None:
        self._first, self._replica_group, self._queue = first, replicas, before
        self._sum: Tensor | None = None
        self._second: Work | None = None

    def _start_next_stage(self) -> None:
        head = self._queue.popleft()
        share = head._sum = head._first.wait()
        head._second = head._replica_group.all_reduce(share)

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
    """The ranks among which flats are split. Every rank must begin the same changes in the same order.

    Sums and gathers are two orders: an update in backward may come before or after a launch, as it happens.
    """

    def __init__(self, ranks: Communicator, members: Sequence[int], *, num_shards: int | None = None) -> None:
        """`shard` neighbours of the members have all shares among them (None: all members)."""
        self._communicator = ranks
        self.size = num_shards or len(members)
        self.shard_groups = ShardGroups(self.size, len(members) // self.size)
        own = list(members).index(ranks.rank) if ranks.rank in members else -1
        self.index, self.replica_index = own % self.size, own // self.size
        # Every rank asks for every group.
        for first in range(0, len(members) if self.size > 1 else 0, self.size):
            some = list(members[first : first + self.size])
            sums, gathers = ranks.get_group(some, "buckets"), ranks.get_group(some, "weights")
            if ranks.rank in some:
                self._reduce_group, self._gather_group = sums, gathers
        for place in range(self.size if self.shard_groups.num_replicas > 1 else 0):
            same = list(members[place :: self.size])
            replicas = ranks.get_group(same, "replicas")
            if ranks.rank in same:
                self._replica_group = replicas
        self._two_stage_queue: deque[_TwoStageReduce] = deque()
        self._free_buffers: dict[tuple[int, torch.dtype], list[Tensor]] = {}

    def local_shard(self, flat: Tensor) -> Tensor:
        """This rank's share, a view."""
        length = flat.numel() // self.size
        return flat[self.index * length : (self.index + 1) * length]

    def reduce_scatter_async(self, flat: Tensor, on_start: Callable[[GetFuture], None] = noop) -> AsyncResult:
        """Begin to sum `flat` over the ranks; what lands is this rank's share of the sum.

        The sum lies in this rank's share of `flat`, the rest of which is no longer of any use. `begun` is told of the
        collective's future.
        """
        flight = self._reduce_scatter(flat, on_start) if self.size > 1 else AsyncResult(lambda: flat, always_done)
        if self.shard_groups.num_replicas == 1:
            return flight
        onward = _TwoStageReduce(flight, self._replica_group, self._two_stage_queue)
        self._two_stage_queue.append(onward)
        onward.is_done()  # there may be nothing to wait for

        def wait() -> Tensor:
            with self._communicator.report_dead_peers():
                return onward.wait()

        return AsyncResult(wait, onward.is_done)

    def _reduce_scatter(self, flat: Tensor, on_start: Callable[[GetFuture], None]) -> AsyncResult:
        mine = self.local_shard(flat)
        if flat.device.type == "cuda":
            work = self._reduce_group.reduce_scatter(mine, flat)
            on_start(work.get_future)

            def wait() -> Tensor:
                with self._communicator.report_dead_peers():
                    work.wait()
                return mine

            return AsyncResult(wait, work.is_completed)
        received = self._acquire_buffer(flat.numel(), flat.dtype)
        work = self._reduce_group.all_to_all(received, flat)
        on_start(work.get_future)

        def wait_and_sum() -> Tensor:
            with self._communicator.report_dead_peers():
                work.wait()
            sum_in_order(received.view(self.size, -1).unbind(), out=mine)
            self._release_buffer(received)
            return mine

        return AsyncResult(wait_and_sum, work.is_completed)

    def all_gather_inplace_async(self, flat: Tensor) -> Callable[[], None]:
        """Begin to bring every rank's share of `flat` to all; the returned function waits."""
        if flat.device.type == "cuda":
            return self.all_gather_async(self.local_shard(flat), flat)
        # A copy: gloo does not promise that the input may be a part of the output.
        mine = self._copy_to_buffer(self.local_shard(flat))
        land = self.all_gather_async(mine, flat)

        def wait_and_release() -> None:
            land()
            self._release_buffer(mine)

        return wait_and_release

    def all_gather_async(self, shard: Tensor, out: Tensor) -> Callable[[], None]:
        """Begin to bring every rank's share to all, into `out`; the returned function waits."""
        work = self._gather_group.all_gather(out, shard)

        def wait() -> None:
            with self._communicator.report_dead_peers():
                work.wait()

        return wait

    def reduced_bytes(self, flat: Tensor) -> float:
        """Bytes this rank sends to sum a flat, as by ring."""
        return self.shard_groups.reduce_sent_bytes(Change.REDUCE_SCATTER, flat.numel() * flat.element_size())

    def gathered_bytes(self, flat: Tensor) -> float:
        """Bytes this rank sends to bring the shares of a flat together, as by ring."""
        return self.shard_groups.all_gather_sent_bytes(Change.ALL_GATHER, flat.numel() * flat.element_size())

    def _copy_to_buffer(self, part: Tensor) -> Tensor:
        staged = self._acquire_buffer(part.numel(), part.dtype)
        return staged.copy_(part)

    def _acquire_buffer(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        free = self._free_buffers.setdefault((num_elements, dtype), [])
        return free.pop() if free else memory.allocate_private(num_elements, dtype, torch.device("cpu"))

    def _release_buffer(self, flat: Tensor) -> None:
        self._free_buffers[flat.numel(), flat.dtype].append(flat)
