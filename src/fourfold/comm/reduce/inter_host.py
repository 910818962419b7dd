"""Inter-host sums: the ranks of one local index on every host reduce and gather over gloo.

Shared memory joins the ranks of a host; rank i of every host then does slice i of the work between hosts.
Law: every rank begins the same collectives in the same order.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from fourfold.comm.collectives import all_gather_rows, ring_bytes
from fourfold.comm.communicator import Communicator
from fourfold.comm.meter import CommMeter
from fourfold.comm.reduce.collective_fingerprint import FingerprintCheck
from fourfold.comm.reduce.protocol import TransportSpec
from fourfold.comm.reduce.sharded_collectives import AsyncResult, ShardedCollectives
from fourfold.words.layout import SPLIT, Change


class InterHostReducer(Protocol):
    """The ranks of one local index, on all hosts or on those of one replica.

    `index` and `size` count hosts within this rank's replica, `num_hosts` counts all.
    """

    num_hosts: int
    size: int
    index: int
    replica_index: int

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


class InterHostScalars(Protocol):
    """Sums of a few float64 values over the hosts."""

    def all_reduce_async(self, values: Tensor, call: str | None) -> AsyncResult:
        """Begin a sum; the result is a list. With a call: its wait raises DivergenceError if a host is in another."""
        ...


class GroupInterHostReducer:
    """See `InterHostReducer`. `spec.num_shards` counts hosts; this rank is one of `members`."""

    def __init__(self, comm: Communicator, members: Sequence[int], spec: TransportSpec, meter: CommMeter) -> None:
        self._communicator, self._meter, self._leader, self.num_hosts = comm, meter, members[0], len(members)
        self._group = comm.get_group(members, spec.group_name("buckets"))
        self._sharded = ShardedCollectives(comm, members, num_shards=spec.num_shards)
        self.size, self.index, self.replica_index = self._sharded.size, self._sharded.index, self._sharded.replica_index
        self._miss_report_group = (
            comm.get_group(range(comm.size), "miss reports") if spec.rest.weight == SPLIT else None
        )

    def all_reduce_async(self, flat: Tensor) -> AsyncResult:
        self._meter.sent_bytes += ring_bytes(Change.ALL_REDUCE, flat, self._sharded.shard_groups.size)
        with self._communicator.report_dead_peers():
            work = self._group.all_reduce(flat)

        def wait() -> Tensor:
            with self._communicator.report_dead_peers():
                work.wait()
            return flat

        return AsyncResult(wait, work.is_completed)

    def reduce_scatter_async(self, flat: Tensor) -> AsyncResult:
        self._meter.sent_bytes += self._sharded.reduced_bytes(flat)
        with self._communicator.report_dead_peers():
            return self._sharded.reduce_scatter_async(flat)

    def all_gather_inplace_async(self, flat: Tensor) -> Callable[[], None]:
        self._meter.sent_bytes += self._sharded.gathered_bytes(flat)
        with self._communicator.report_dead_peers():
            return self._sharded.all_gather_inplace_async(flat).wait

    def all_gather_async(self, shard: Tensor, out: Tensor) -> Callable[[], None]:
        self._meter.sent_bytes += self._sharded.gathered_bytes(out)
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


class GroupInterHostScalars:
    """See `InterHostScalars`; this rank is one of `members`."""

    def __init__(self, comm: Communicator, members: Sequence[int], group_name: str, meter: CommMeter) -> None:
        self._communicator, self._meter = comm, meter
        self._group = comm.get_group(members, group_name)
        self._fingerprint_check = FingerprintCheck(self._group, members, members.index(comm.rank), torch.device("cpu"))

    def all_reduce_async(self, values: Tensor, call: str | None) -> AsyncResult:
        tensor = values if call is None else self._fingerprint_check.append_fingerprint(values, call)
        with self._communicator.report_dead_peers():
            work = self._group.all_reduce(tensor)

        def wait() -> list[float]:
            with self._meter.timed(), self._communicator.report_dead_peers():
                work.wait()
            sums = tensor.tolist()
            if call is not None:
                self._fingerprint_check.check(sums, call)
            return sums[: len(values)]

        return AsyncResult(wait, work.is_completed)
