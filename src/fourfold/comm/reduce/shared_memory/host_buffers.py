"""Host buffers: the gradient buffers of all ranks of a host, as one of them sees them.

slice   the part of every bucket that one rank sums, in rank order, into its own buffer
Law: no cache line of a buffer is written by two ranks.
"""

from collections.abc import Sequence

from torch import Tensor

from fourfold.comm.collectives import sum_in_order
from fourfold.comm.reduce.protocol import BucketSlice
from fourfold.comm.reduce.shared_memory.flag_waits import MappedHost
from fourfold.comm.reduce.shared_memory.layout import view_grad_buffers
from fourfold.orders.sample_order import shard_range


class HostBuffers:
    """The buffers by rank and bucket, and the slices of each bucket by rank.

    `num_hosts` and `host_index`: of the hosts that split what the ranks of one host sum.
    """

    def __init__(self, host: MappedHost, *, num_hosts: int = 1, host_index: int = 0) -> None:
        size = host.ranks.size
        self._all = [view_grad_buffers(host.mapping, host.layout, region) for region in range(size)]
        self._index, self._num_hosts, self._host_index = host.ranks.index, num_hosts, host_index
        self.own: Sequence[Tensor] = self._all[self._index]
        """This rank's buffer of each bucket."""
        self._slices = [[_rank_slice(length, size, i) for i in range(size)] for length in host.layout.sizes]
        self.own_slices = [slices[self._index] for slices in self._slices]
        """[start, stop) of this rank's slice of each bucket, in elements."""
        self.num_shards = size * num_hosts

    def sum_range(self, bucket: int, start: int, stop: int) -> Tensor:
        """The sum of [start, stop) over this host's ranks, in this rank's buffer."""
        addends = [buffers[bucket][start:stop] for buffers in self._all]
        sum_in_order(addends, out=addends[self._index])
        return addends[self._index]

    def sum_slice(self, bucket: int) -> Tensor:
        """The sum of this rank's slice."""
        return self.sum_range(bucket, *self.own_slices[bucket])

    def host_shard(self, local_sum: Tensor) -> Tensor:
        """This host's shard of this rank's slice."""
        return local_sum[slice(*shard_range(0, local_sum.numel(), self._num_hosts, self._host_index))]

    def own_shard(self, bucket: int) -> BucketSlice:
        """This rank's shard of the bucket: of its slice, what is this host's."""
        start, stop = shard_range(*self.own_slices[bucket], self._num_hosts, self._host_index)
        return BucketSlice(start, stop, self.own[bucket][start:stop])

    def views(self, bucket: int) -> Sequence[BucketSlice]:
        """Every rank's slice of a bucket, where that rank puts the sum."""
        return [
            BucketSlice(start, stop, self._all[peer][bucket][start:stop])
            for peer, (start, stop) in enumerate(self._slices[bucket])
            if stop > start
        ]

    def scale_slices(self, factor: float) -> None:
        """Multiply this rank's slice of every bucket."""
        for buffer, (start, stop) in zip(self.own, self.own_slices, strict=True):
            buffer[start:stop].mul_(factor)

    def copy_from_peers(self, bucket: int) -> None:
        """Copy the other ranks' slices into this rank's buffer."""
        for peer, (start, stop) in enumerate(self._slices[bucket]):
            if peer != self._index:
                self.own[bucket][start:stop].copy_(self._all[peer][bucket][start:stop])


def _rank_slice(length: int, size: int, index: int) -> tuple[int, int]:
    """[start, stop) of a rank's slice; cut at multiples of 32 elements, so that no cache line has two writers."""
    blocks = -(-length // 32)
    return min(length, blocks * index // size * 32), min(length, blocks * (index + 1) // size * 32)
