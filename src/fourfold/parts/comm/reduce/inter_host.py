"""TODO."""

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
    """The ranks of the same local index on all hosts, or on those of one replica, and which of these this one is."""

    size: int
    index: int
    replica_index: int
    sent_bytes: float

    def all_reduce_async(self, flat: torch.Tensor) -> AsyncResult:
        """Begin an all-reduce in place; what lands is `flat`."""
        ...

    def reduce_scatter_async(self, flat: torch.Tensor) -> AsyncResult:
        """Begin a reduce-scatter; what lands is this host's share of the sum."""
        ...

    def all_gather_inplace_async(self, flat: torch.Tensor) -> Callable[[], None]:
        """Begin an all-gather in place of the hosts' shares; the returned function waits for it."""
        ...

    def all_gather_async(self, shard: torch.Tensor, out: torch.Tensor) -> Callable[[], None]:
        """Begin an all-gather of the hosts' shares; the returned function waits for it."""
        ...

    def all_gather_ints(self, row: Sequence[int]) -> list[list[int]]:
        """The rows of all ranks of all hosts, in rank order."""
        ...

    def broadcast(self, flat: torch.Tensor) -> None:
        """Bring the first host's values to all."""
        ...

    def all_reduce_scalars(self, values: Sequence[float], call: str | None = None) -> list[float]:
        """Sums over the hosts. With a call: raises DivergenceError where another host is in another one."""
        ...


class GroupInterHostReducer:
    """The ranks of one local index on every host, over gloo; see `shared.Between`. `use.shard` counts hosts."""

    def __init__(self, ranks: Communicator, members: Sequence[int], spec: TransportSpec) -> None:
        self._communicator = ranks
        self._group = ranks.get_group(members, spec.group_name("buckets"))
        self._scalars_group = ranks.get_group(members, spec.group_name("scalars"))
        self._leader, self.sent_bytes = members[0], 0.0
        index = list(members).index(ranks.rank) if ranks.rank in members else -1
        self._sharded = ShardedCollectives(ranks, members, num_shards=spec.num_shards)
        self.size, self.index, self.replica_index = self._sharded.size, self._sharded.index, self._sharded.replica_index
        self._miss_report_group = ranks.get_group(range(ranks.size), "pleas") if spec.rest.weight == SPLIT else None
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
