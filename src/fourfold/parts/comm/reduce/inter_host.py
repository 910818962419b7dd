"""Inter-host sums: the ranks of one local index on every host reduce and gather over gloo.

Shared memory joins the ranks of a host; rank i of every host then does slice i of the work between hosts.
Law: every rank begins the same collectives in the same order.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from fourfold.parts.comm.collectives import all_gather_rows, ring_bytes
from fourfold.parts.comm.communicator import Communicator
from fourfold.parts.comm.reduce.async_result import AsyncResult
from fourfold.parts.comm.reduce.fingerprint_check import FingerprintCheck
from fourfold.parts.comm.reduce.sharded_collectives import ShardedCollectives
from fourfold.parts.comm.reduce.transport_spec import TransportSpec
from fourfold.words.layout import SPLIT, Change


class InterHostReducer(Protocol):
    """The ranks of one local index, on all hosts or on those of one replica.

    `index` and `size` count hosts within this rank's replica.
    """

    size: int
    index: int
    replica_index: int
    sent_bytes: float

    def all_reduce_async(self, flat: Tensor) -> AsyncResult:
        """Begin an all-reduce in place; the result is `flat`."""
        ...

    def reduce_scatter_async(self, flat: Tensor) -> AsyncResult:
        """Begin a reduce-scatter; the result is this host's shard of the sum."""
        ...

    def all_gather_inplace_async(self, flat: Tensor) -> Callable[[], None]:
        """Begin an all-gather of the hosts' shards, in place. Returns the wait."""
        ...

    def all_gather_async(self, shard: Tensor, out: Tensor) -> Callable[[], None]:
        """Begin an all-gather of the hosts' shards, into `out`. Returns the wait."""
        ...

    def all_gather_ints(self, row: Sequence[int]) -> list[list[int]]:
        """The rows of all ranks of all hosts, in rank order. Waits."""
        ...

    def broadcast(self, flat: Tensor) -> None:
        """Bring the first host's values to all hosts. Waits."""
        ...

    def all_reduce_scalars(self, values: Sequence[float], call: str | None = None) -> list[float]:
        """Sums over the hosts. Waits. With a call: raises DivergenceError if another host is in another call."""
        ...


class GroupInterHostReducer:
    """See `InterHostReducer`. `spec.num_shards` counts hosts. Every rank makes those of all local indices."""

    def __init__(self, comm: Communicator, members: Sequence[int], spec: TransportSpec) -> None:
        self._communicator = comm
        self._group = comm.get_group(members, spec.group_name("buckets"))
        self._scalars_group = comm.get_group(members, spec.group_name("scalars"))
        self._leader, self.sent_bytes = members[0], 0.0
        index = list(members).index(comm.rank) if comm.rank in members else -1
        self._sharded = ShardedCollectives(comm, members, num_shards=spec.num_shards)
        self.size, self.index, self.replica_index = self._sharded.size, self._sharded.index, self._sharded.replica_index
        self._miss_report_group = comm.get_group(range(comm.size), "pleas") if spec.rest.weight == SPLIT else None
        self._fingerprint_check = FingerprintCheck(self._scalars_group, members, index, torch.device("cpu"))

    def all_reduce_async(self, flat: Tensor) -> AsyncResult:
        self.sent_bytes += ring_bytes(Change.ALL_REDUCE, flat, self._sharded.shard_groups.size)
        with self._communicator.report_dead_peers():
            work = self._group.all_reduce(flat)

        def wait() -> Tensor:
            with self._communicator.report_dead_peers():
                work.wait()
            return flat

        return AsyncResult(wait, work.is_completed)

    def reduce_scatter_async(self, flat: Tensor) -> AsyncResult:
        self.sent_bytes += self._sharded.reduced_bytes(flat)
        with self._communicator.report_dead_peers():
            return self._sharded.reduce_scatter_async(flat)

    def all_gather_inplace_async(self, flat: Tensor) -> Callable[[], None]:
        self.sent_bytes += self._sharded.gathered_bytes(flat)
        with self._communicator.report_dead_peers():
            return self._sharded.all_gather_inplace_async(flat)

    def all_gather_async(self, shard: Tensor, out: Tensor) -> Callable[[], None]:
        self.sent_bytes += self._sharded.gathered_bytes(out)
        with self._communicator.report_dead_peers():
            return self._sharded.all_gather_async(shard, out)

    def all_gather_ints(self, row: Sequence[int]) -> list[list[int]]:
        assert self._miss_report_group is not None
        with self._communicator.report_dead_peers():
            return [
                each.tolist()
                for each in all_gather_rows(self._miss_report_group, torch.tensor(row), size=self._communicator.size)
            ]

    def broadcast(self, flat: Tensor) -> None:
        with self._communicator.report_dead_peers():
            self._group.broadcast(flat, self._leader)

    def all_reduce_scalars(self, values: Sequence[float], call: str | None = None) -> list[float]:
        tensor = torch.tensor(values, dtype=torch.float64)
        if call is not None:
            tensor = self._fingerprint_check.append_fingerprint(tensor, call)
        with self._communicator.report_dead_peers():
            self._scalars_group.all_reduce(tensor).wait()
        sums = tensor.tolist()
        if call is not None:
            self._fingerprint_check.check(sums, call)
        return sums[: len(values)]
