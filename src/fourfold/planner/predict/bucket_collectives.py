"""Bucket collectives: what the data axis exchanges for a bucket, and the seconds that it takes.

own   what a rank does itself, in shared memory or to encode: it computes nothing else meanwhile
sent  messages, which are under way while the rank computes
Law: which collective a bucket needs is the difference of two layouts (`axes/data/rules/zero.py`); here it is priced.
"""

from collections.abc import Sequence
from typing import NamedTuple

from fourfold.axes.data.rules.buckets import Bucket
from fourfold.axes.data.rules.zero import ShardGroups, layout_changes
from fourfold.plan.batch_norm import ELEMENT_BYTES as STATISTIC_BYTES
from fourfold.plan.batch_norm import HEADER_LENGTH, message_length
from fourfold.plan.codec import CodecSpec, Combine, codec_rounds
from fourfold.plan.lowering import Blueprint, DataGroup
from fourfold.plan.topology import GroupHosts, Topology, num_host_shards
from fourfold.planner.predict.prices import GroupShape, Prices
from fourfold.words.layout import Change


class CollectiveSeconds(NamedTuple):
    """What a collective takes on one rank."""

    own: float = 0.0
    sent: float = 0.0

    @property
    def total(self) -> float:
        return self.own + self.sent

    def __add__(self, other: "CollectiveSeconds") -> "CollectiveSeconds":  # type: ignore[override]
        return CollectiveSeconds(self.own + other.own, self.sent + other.sent)


NOTHING = CollectiveSeconds()


class GroupShapes(NamedTuple):
    """The ranks that sum gradients: all of them, those that split a bucket, those that have the same shard."""

    whole: GroupShape
    shard: GroupShape
    replicas: GroupShape


def shape_of(topology: Topology, ranks: Sequence[int], *, shares_memory: bool = False) -> GroupShape:
    """How ranks are spread over hosts."""
    by_host = topology.hosts_of(ranks)
    return GroupShape(max(map(len, by_host)), len(by_host), shares_memory)


def group_shapes(topology: Topology, ranks: Sequence[int], hosts: GroupHosts, groups: ShardGroups) -> GroupShapes:
    """The shapes of a data group. Where hosts share memory, all ranks of a host split what rests split on it."""
    whole = GroupShape(hosts.ranks_per_host, hosts.num_hosts, hosts.shares_memory)
    if hosts.shares_memory:
        num_hosts = num_host_shards(groups.shard_size, hosts.ranks_per_host)
        assert num_hosts is not None  # `shared_memory_problems`
        return GroupShapes(whole, whole._replace(hosts=num_hosts), GroupShape(1, hosts.num_hosts // num_hosts))
    size = groups.shard_size
    return GroupShapes(whole, shape_of(topology, ranks[:size]), shape_of(topology, ranks[::size]))


def collective_seconds(prices: Prices, change: Change, whole_bytes: float, group: GroupShape) -> CollectiveSeconds:
    """A collective; what ranks do themselves in shared memory is its price on one host."""
    if change == Change.NONE or group.size == 1:
        return NOTHING
    total = prices.collective(change, whole_bytes, group)
    if not group.shares_memory:
        return CollectiveSeconds(sent=total)
    own = total if group.hosts == 1 else prices.collective(change, whole_bytes, group._replace(hosts=1))
    return CollectiveSeconds(own, max(0.0, total - own))


def reduce_seconds(prices: Prices, change: Change, whole_bytes: float, shapes: GroupShapes) -> CollectiveSeconds:
    """The sum of a bucket's gradients. After a reduce-scatter, shards are also summed over the replicas."""
    if change != Change.REDUCE_SCATTER:
        return collective_seconds(prices, change, whole_bytes, shapes.whole)
    scattered = collective_seconds(prices, change, whole_bytes, shapes.shard)
    shard_bytes = whole_bytes / shapes.shard.size
    return scattered + collective_seconds(prices, Change.ALL_REDUCE, shard_bytes, shapes.replicas)


def gather_seconds(prices: Prices, change: Change, whole_bytes: float, shard: GroupShape) -> CollectiveSeconds:
    """An all-gather of weights. Ranks that share memory have them once: they only wait for each other's updates."""
    if change == Change.NONE or not shard.shares_memory:
        return collective_seconds(prices, change, whole_bytes, shard)
    meeting = collective_seconds(prices, change, 0.0, shard._replace(hosts=1))
    if shard.hosts == 1:
        return meeting
    return meeting + collective_seconds(prices, change, whole_bytes, shard)._replace(own=0.0)


class BucketCollectives:
    """What the buckets of one data group exchange."""

    def __init__(self, blueprint: Blueprint, group: DataGroup, prices: Prices) -> None:
        plan = blueprint.plan
        self._prices, self._group, self._codec = prices, group, plan.codec_spec
        self.shapes = group_shapes(blueprint.topology, group.ranks, group.hosts, plan.shard_groups)
        self._changes = layout_changes(group.resting_layouts)
        self._param_shapes = {spec.name: spec.local_shape for spec in group.stage.specs}

    def reduce(self, index: int) -> CollectiveSeconds:
        """The sum of a bucket's gradients, once."""
        bucket = self._group.stage.gradient_buckets[index]
        if self.shapes.whole.size == 1:
            return NOTHING
        if self._codec is not None:
            return self._coded(self._codec, bucket)
        after, before = self._changes.after_backward, self._changes.before_update
        return reduce_seconds(self._prices, before if after == Change.NONE else after, _size(bucket), self.shapes)

    def _coded(self, codec: CodecSpec, bucket: Bucket) -> CollectiveSeconds:
        """Messages of a codec, summed on the way or gathered, and what they take to make and read.

        Where ranks share memory, messages are gathered among one rank of each host; then the ranks of the host add up
        what they hold, in full. Of a sum of messages one rank has all of it, and the others have zeros.
        """
        total = CollectiveSeconds(own=self._prices.codec(codec, bucket.slots[-1].stop))
        whole = self.shapes.whole
        gathering = GroupShape(1, whole.hosts) if whole.shares_memory else whole
        for each in codec_rounds(codec, bucket, [self._param_shapes[slot.name] for slot in bucket.slots]):
            if each.combine is Combine.SUM:
                total += collective_seconds(self._prices, Change.ALL_REDUCE, each.num_bytes, whole)
            else:
                num_bytes = each.num_bytes * gathering.size
                total += collective_seconds(self._prices, Change.ALL_GATHER, num_bytes, gathering)
        if not whole.shares_memory:
            return total
        inside = collective_seconds(self._prices, Change.ALL_REDUCE, _size(bucket), whole._replace(hosts=1))
        return total + inside + CollectiveSeconds(own=self._prices.memory_pass(_size(bucket)))

    def gather(self, index: int) -> CollectiveSeconds:
        """The all-gather of a bucket's weights after their update."""
        bytes_ = _size(self._group.buckets[index])
        return gather_seconds(self._prices, self._changes.after_update, bytes_, self.shapes.shard)

    def unshard(self, index: int) -> CollectiveSeconds:
        """The all-gather of a bucket's weights before a use. Ranks of several hosts copy them from staging buffers."""
        if self._changes.before_use == Change.NONE:
            return NOTHING
        bytes_ = _size(self._group.buckets[index])
        seconds = gather_seconds(self._prices, self._changes.before_use, bytes_, self.shapes.shard)
        copied = self._prices.memory_pass(2 * bytes_) if self.shapes.shard.shares_memory else 0.0
        return seconds._replace(own=seconds.own + copied)

    def push(self, index: int) -> CollectiveSeconds:
        """The sum of the changes of a bucket's weights, with local steps."""
        bucket = self._group.buckets[index]
        return collective_seconds(self._prices, Change.ALL_REDUCE, _size(bucket), self.shapes.whole)


def _size(bucket: Bucket) -> int:
    return bucket.size * bucket.element_bytes


def statistics_seconds(prices: Prices, channels: Sequence[int], group: GroupShape) -> float:
    """What data ranks exchange in one forward, or one backward, for batch normalizations of so many channels.

    Each exchange is waited for at once. The last row says that the pass ends: `statistics_sent_bytes`.
    """
    if not channels or group.size == 1:
        return 0.0
    rows = [HEADER_LENGTH, *(HEADER_LENGTH + 2 * num_channels for num_channels in channels)]
    return sum(
        prices.collective(Change.ALL_GATHER, message_length(row) * STATISTIC_BYTES * group.size, group) for row in rows
    )
