"""Sharded collectives: reduce-scatter and all-gather of equal shards over a process group.

shard     the index-th of `size` equal parts of a flat tensor
received  the other ranks' addends of this rank's shard, in rank order, until they are added up
replica   ranks that hold all shards among them; the ranks of one shard index then sum it over the replicas
Law: addends are added in rank order, ((0 + 1) + 2) + …, whichever rank adds.

Over gloo a reduce-scatter is an all-to-all and a sum: gloo's own moves as many bytes as its all-reduce and takes 1.3
to 2.3 times as long (`docs/measured-notes.md`).
"""

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from fourfold.axes.data.rules.zero import ShardGroups
from fourfold.comm.collectives import Group, Work, all_gather_rows, ring_bytes, sum_in_order
from fourfold.comm.communicator import Communicator
from fourfold.comm.meter import CommMeter
from fourfold.comm.reduce.protocol import TransportSpec
from fourfold.torch_kit import memory
from fourfold.words.layout import SPLIT, Change


class _TwoStageReduce:
    """A sum over one replica's ranks, then over the replicas. Second stages begin in the order of the first ones.

    Each wait and each `is_completed` also starts the second stages of earlier reductions: other ranks may wait for
    them.
    """

    def __init__(self, first: Work, replica_group: Group, queue: "deque[_TwoStageReduce]") -> None:
        self._first, self._replica_group, self._queue = first, replica_group, queue
        self._second: Work | None = None

    def _start_next_stage(self) -> None:
        head = self._queue.popleft()
        head._second = head._replica_group.all_reduce(head._first.wait())

    def is_completed(self) -> bool:
        while self._second is None:
            if not self._queue[0]._first.is_completed():
                return False
            self._start_next_stage()
        return self._second.is_completed()

    def wait(self) -> Tensor:
        while self._second is None:
            self._start_next_stage()
        return self._second.wait()


class ShardedCollectives:
    """Some ranks, among which flat tensors are split: all of a communicator, or one of each host.

    Every rank must begin the same collectives in the same order. Reductions and gathers have a process group each, so
    each has an order of its own: an update inside backward may gather before or after the next reduction begins.

    num_members    how many ranks there are
    size, index    of those that hold all shards among them, and this rank's among these
    replica_index  which of those that hold all shards this rank is one of
    """

    def __init__(self, comm: Communicator, members: Sequence[int], spec: TransportSpec, meter: CommMeter) -> None:
        """`spec.num_shards` neighbouring members hold all shards among them; None: all members."""
        self._communicator, self._meter, self._leader = comm, meter, members[0]
        self.num_members = len(members)
        self.size = spec.num_shards or len(members)
        self._shard_groups = ShardGroups(self.size, len(members) // self.size)
        index = list(members).index(comm.rank)
        self.index, self.replica_index = index % self.size, index // self.size
        self._group = comm.get_group(members, spec.group_name("buckets"))
        if self.size > 1:
            replica = members[index - self.index : index - self.index + self.size]
            self._reduce_group, self._gather_group = (comm.get_group(replica, name) for name in ("buckets", "weights"))
        if self._shard_groups.num_replicas > 1:
            self._replica_group = comm.get_group(members[self.index :: self.size], "replicas")
        if spec.rest.weight == SPLIT:
            self._miss_report_group = comm.get_group(range(comm.size), "miss reports")
        self._two_stage_queue: deque[_TwoStageReduce] = deque()
        self._free_buffers: dict[tuple[int, torch.dtype], list[Tensor]] = {}

    def local_shard(self, flat: Tensor) -> Tensor:
        """This rank's shard, a view."""
        length = flat.numel() // self.size
        return flat[self.index * length : (self.index + 1) * length]

    # ---- over all members ----------------------------------------------------------------------------

    def all_reduce_async(self, flat: Tensor) -> Work:
        """Begin to sum `flat` over all members, in place; the result is `flat`."""
        self._meter.sent_bytes += ring_bytes(Change.ALL_REDUCE, flat, self.num_members)
        return self._group.all_reduce(flat)

    def broadcast(self, flat: Tensor) -> None:
        """Bring the first member's values to all. Waits."""
        self._group.broadcast(flat, self._leader)

    def all_gather_ints(self, row: Sequence[int]) -> list[list[int]]:
        """The rows of all ranks of the communicator, in rank order. Waits."""
        flat = torch.tensor(row, device=self._communicator.device)
        rows = all_gather_rows(self._miss_report_group, flat, size=self._communicator.size)
        return [each.tolist() for each in rows]

    # ---- shards --------------------------------------------------------------------------------------

    def reduce_scatter_async(self, flat: Tensor) -> Work:
        """Begin to sum `flat` over the members; the result is this rank's shard of the sum.

        The sum lies in this rank's shard of `flat`; the rest of `flat` then holds garbage.
        """
        self._meter.sent_bytes += self._shard_groups.reduce_sent_bytes(Change.REDUCE_SCATTER, flat.nbytes)
        result = self._reduce_scatter(flat) if self.size > 1 else Work(lambda: flat)
        if self._shard_groups.num_replicas == 1:
            return result
        two_stage = _TwoStageReduce(result, self._replica_group, self._two_stage_queue)
        self._two_stage_queue.append(two_stage)
        two_stage.is_completed()  # starts the second stage if the first needs no wait
        return Work(two_stage.wait, two_stage.is_completed, result.get_future)

    def _reduce_scatter(self, flat: Tensor) -> Work:
        shard = self.local_shard(flat)
        if flat.device.type == "cuda":
            return self._reduce_group.reduce_scatter(shard, flat)
        received = self._acquire_buffer(flat.numel(), flat.dtype)
        work = self._reduce_group.all_to_all(received, flat)

        def wait_and_sum() -> Tensor:
            work.wait()
            sum_in_order(received.view(self.size, -1).unbind(), out=shard)
            self._release_buffer(received)
            return shard

        return work._replace(wait=wait_and_sum)

    def all_gather_inplace_async(self, flat: Tensor) -> Work:
        """Begin to gather every rank's shard of `flat`, in place."""
        if flat.device.type == "cuda":
            return self.all_gather_async(self.local_shard(flat), flat)
        # A copy: gloo does not promise that the input may be a part of the output.
        shard = self._acquire_buffer(flat.numel() // self.size, flat.dtype).copy_(self.local_shard(flat))
        work = self.all_gather_async(shard, flat)

        def wait_and_release() -> None:
            work.wait()
            self._release_buffer(shard)

        return work._replace(wait=wait_and_release)

    def all_gather_async(self, shard: Tensor, out: Tensor) -> Work:
        """Begin to gather every rank's shard into `out`."""
        self._meter.sent_bytes += self._shard_groups.all_gather_sent_bytes(Change.ALL_GATHER, out.nbytes)
        return self._gather_group.all_gather(out, shard)

    def _acquire_buffer(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        free = self._free_buffers.setdefault((num_elements, dtype), [])
        return free.pop() if free else memory.allocate_private(num_elements, dtype, torch.device("cpu"))

    def _release_buffer(self, flat: Tensor) -> None:
        self._free_buffers[flat.numel(), flat.dtype].append(flat)
