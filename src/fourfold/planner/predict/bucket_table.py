"""Bucket table: what the data axis costs on each place of the pipeline axis, for estimates without lowering.

kind    places whose buckets have the same sizes: they cost and hold as much as each other
totals  of the buckets of a place: seconds of all of them, and of the last one, which nothing hides
Law: buckets are those that lowering makes, padded for as many ranks; equal ones are priced once.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import NamedTuple

from fourfold.axes.data.rules.buckets import SHARD_ALIGNMENT, Bucket, effective_bucket_bytes, make_buckets
from fourfold.axes.data.rules.zero import request_transport
from fourfold.axes.pipeline.rules.spec import owner_of
from fourfold.plan.lowering import Blueprint, DataGroup, StageBuckets, effective_layouts, planned_layouts
from fourfold.plan.param_spec import ParamSpec
from fourfold.plan.plan import Plan
from fourfold.plan.precision import compute_specs, gradient_bucket
from fourfold.plan.topology import GroupHosts, Topology, group_hosts
from fourfold.planner.predict.bucket_collectives import CollectiveSeconds
from fourfold.planner.predict.bucket_prices import BucketPrices, PlaceSizes, place_sizes
from fourfold.planner.predict.facts import FactsSource
from fourfold.planner.predict.memory import resting_memory
from fourfold.planner.predict.prediction import MemoryParts
from fourfold.planner.predict.prices import Prices
from fourfold.planner.remembered import remembered
from fourfold.words.program import GRAD_NORM, TRUST_NORMS, USED_PARAMS, Action, Verb

BUCKET_FIELDS = ("tp", "dims", "pp", "interleave", "stages", "precision", "reduce_dtype", "bucket_bytes", "codec")
DATA_FIELDS = (
    *("tp", "dims", "precision", "reduce_dtype", "bucket_bytes", "codec"),
    *("dp", "cp", "shard", "zero", "sync", "outer_momentum", "offload", "transport", "unused"),
    *("codec_rank", "codec_density", "codec_refresh_steps"),
)
bucket_key, data_key = attrgetter(*BUCKET_FIELDS), attrgetter(*DATA_FIELDS)


class Totals(NamedTuple):
    """Seconds of a collective of all buckets of a place, of the first one's messages, and of the last one's."""

    own: float
    sent: float
    first: float = 0.0
    last: float = 0.0


class Updates(NamedTuple):
    """Seconds of all updates of a place, of the first one, and of the last one."""

    all: float
    first: float = 0.0
    last: float = 0.0


class Wait(NamedTuple):
    """Messages that begin when this fraction of a backward is left, and how long they take: those of the buckets from
    one to the last.
    """

    fraction_left: float
    sent: float


class Extras(NamedTuple):
    """Seconds that a microbatch takes in addition.

    gradients  putting gradients into their buckets: a part of computing
    """

    forward: float = 0.0
    backward: float = 0.0
    gradients: float = 0.0


class PlaceData(NamedTuple):
    """What the data axis costs and holds on a place, without activations.

    waits      of reductions: none of them ends before the longest of these
    measured   scalars that a step waits for: the seconds of the place itself, and of their sums
    gradients  seconds of a backward: with the gradients of a step's first microbatch, and with those of later ones
    """

    resting: MemoryParts
    reduce: Totals
    gather: Totals
    unshard: Totals
    push: Totals
    waits: tuple[Wait, ...]
    updates: Updates
    pull_seconds: float
    num_buckets: int
    measured: CollectiveSeconds
    gradients: tuple[float, float]


class BucketKinds(NamedTuple):
    """The kinds of places; `of_place`: which of them each place is, `first_places`: where each occurs first."""

    kinds: tuple[PlaceData, ...]
    of_place: tuple[int, ...]
    first_places: tuple[int, ...]


class _PlaceBuckets(NamedTuple):
    """The buckets of a place, without padding.

    stage  with one bucket of each size; their parameters only
    order  by bucket, the number of its size
    """

    stage: StageBuckets
    order: tuple[int, ...]
    sizes: PlaceSizes

    @property
    def signature(self) -> object:
        """Equal for places that cost and hold as much as each other."""
        made, kept = (tuple(each.values()) for each in (self.sizes.made, self.sizes.kept))
        sizes = tuple((bucket.size, bucket.dtype) for bucket in self.stage.buckets)
        return sizes, self.order, self.sizes.num_params, made, kept


class _Stages(NamedTuple):
    """The places of a plan; `kinds`: by place, the first one that is like it."""

    places: tuple[_PlaceBuckets, ...]
    kinds: tuple[int, ...]


def _place_key(plan: Plan) -> tuple[object, ...]:
    """What a place depends on besides its buckets."""
    frees_early = plan.update == "in_backward" and plan.microbatches == 1
    return (data_key(plan), frees_early, (plan.schedule, plan.pipeline_spec) if plan.is_asynchronous else None)


def _own_place(plan: Plan, place: int) -> int:
    """What a place costs and holds in particular: whether it is the last one, or which it is."""
    return place if plan.is_asynchronous else place == plan.pp - 1 > 0


class BucketTable:
    """The data axis of the plans of one search."""

    def __init__(self, source: FactsSource, prices: Prices, topology: Topology) -> None:
        self._source, self._prices, self._topology = source, prices, topology

    @remembered(lambda _, plan: (plan.tp, plan.reduce_group_size, plan.transport))
    def hosts(self, plan: Plan) -> GroupHosts:
        """The hosts of the ranks that sum gradients; those of the first place stand for all."""
        ranks = range(0, plan.tp * plan.reduce_group_size, plan.tp)
        return group_hosts(self._topology, ranks, transport=plan.transport)

    @remembered(lambda _, plan: (bucket_key(plan), _place_key(plan)))
    def of(self, plan: Plan) -> BucketKinds:
        """What the places of a plan cost."""
        hosts = self.hosts(plan)
        places, kinds = self._stages_of(plan, is_sent=hosts.num_hosts > 1 or plan.codec != "none")
        if plan.is_asynchronous:  # each place keeps as many versions of its weights as no other one
            kinds = tuple(range(plan.pp))
        first_places = tuple(dict.fromkeys(kinds))
        numbers = {place: number for number, place in enumerate(first_places)}
        data = tuple(self._place(plan, places[place], hosts) for place in first_places)
        return BucketKinds(data, tuple(numbers[place] for place in kinds), first_places)

    @remembered(lambda _, plan, *, is_sent: (bucket_key(plan), is_sent))
    def _stages_of(self, plan: Plan, *, is_sent: bool) -> _Stages:
        stored: list[list[ParamSpec]] = [[] for _ in range(plan.pp)]
        for spec in self._source.specs(plan):
            stored[owner_of(spec.stage, plan.pp)].append(spec.at(0))
        excluded = self._source.update_spec.full_precision_params
        places = tuple(_place_buckets(plan, place, own, excluded, is_sent) for place, own in enumerate(stored))
        signatures = [each.signature for each in places]
        kinds = [signatures.index(each) for each in signatures]
        if plan.pp > 1 and any(spec.is_tied for own in stored for spec in own):
            kinds[-1] = plan.pp - 1  # holds a copy of the tied weights
        return _Stages(places, tuple(kinds))

    # Pipelines of other lengths, and with other schedules, have places with the same buckets.
    @remembered(lambda _, plan, own, hosts: (own.signature, _own_place(plan, own.stage.stage), _place_key(plan)))
    def _place(self, plan: Plan, own: _PlaceBuckets, hosts: GroupHosts) -> PlaceData:
        is_sharded = plan.zero > 0 and plan.num_shards > 1
        stage = _padded(own.stage, plan.reduce_group_size) if is_sharded else own.stage
        request = request_transport(
            stage.buckets,
            stage.gradient_buckets,
            planned_layouts(plan),
            num_shards=plan.num_shards,
            num_scalars=own.sizes.num_params,
        )
        ranks = tuple(rank for host in hosts.ranks_by_host for rank in host)
        group = DataGroup(ranks, stage, hosts, effective_layouts(plan, hosts), request)
        specs = tuple(self._source.specs(plan))
        blueprint = Blueprint(plan, specs, self._topology, self._source.update_spec, (group,))
        return _place_data(blueprint, group, own, self._prices)


def _place_data(blueprint: Blueprint, group: DataGroup, own: _PlaceBuckets, prices: Prices) -> PlaceData:
    """The totals of a place. `group`: with one bucket of each size."""
    place, plan, order = group.stage.stage, blueprint.plan, own.order
    buckets = BucketPrices(blueprint, group, prices, own.sizes)
    collectives, counts = buckets.collectives, Counter(order)

    def totals(price: Callable[[int], CollectiveSeconds]) -> Totals:
        each = [price(number) for number in range(len(group.buckets))]
        own_seconds, sent = (sum(each[number][part] * count for number, count in counts.items()) for part in (0, 1))
        return Totals(own_seconds, sent, *(each[number].sent for number in ends))

    ends = (order[0], order[-1]) if order else ()  # a stage may have no weights
    updates = [buckets.update(number).update for number in range(len(group.buckets))]
    reductions = [collectives.reduce(number).sent for number in range(len(group.buckets))]
    pulled = [buckets.pull(number).update * count for number, count in counts.items()]
    first, later = (buckets.gradient_seconds_of_place(is_first=is_first) for is_first in (True, False))
    return PlaceData(
        resting=resting_memory(blueprint, group, place, order),
        reduce=totals(collectives.reduce),
        gather=totals(collectives.gather),
        unshard=totals(collectives.unshard),
        push=totals(collectives.push),
        waits=_waits([(group.buckets[number].num_bytes, reductions[number]) for number in order]),
        updates=Updates(
            sum(updates[number] * count for number, count in counts.items()), *(updates[number] for number in ends)
        ),
        pull_seconds=sum(pulled) if plan.sync == "local" else 0.0,
        num_buckets=len(order),
        measured=_measured(blueprint, buckets, place),
        gradients=(first, later),
    )


def _measured(blueprint: Blueprint, buckets: BucketPrices, place: int) -> CollectiveSeconds:
    """The scalars that updates wait for."""
    wanted = {
        GRAD_NORM: blueprint.update_spec.waits_for_norm(blueprint.plan.precision),
        USED_PARAMS: blueprint.plan.unused == "allow",
        TRUST_NORMS: blueprint.has_trust_ratios,
    }
    terms = [buckets.measure(Action(Verb.MEASURE, place, index)) for index, is_wanted in wanted.items() if is_wanted]
    return CollectiveSeconds(sum(each.update for each in terms), sum(each.exposed for each in terms))


def _waits(buckets: Sequence[tuple[int, float]]) -> tuple[Wait, ...]:
    """`buckets`: bytes and seconds of each, in order of reduction. A bucket is ready when as many bytes have gradients.

    Of the lines sent − fraction · backward only those are kept that are the highest for some backward. Without buckets,
    nothing is waited for.
    """
    total, ready = sum(num_bytes for num_bytes, _ in buckets), 0
    left = sum(seconds for _, seconds in buckets)
    hull: list[Wait] = []
    for num_bytes, seconds in buckets:
        ready += num_bytes
        wait = Wait(1.0 - ready / total, left)
        while len(hull) > 1 and _is_below(hull[-1], hull[-2], wait):
            hull.pop()
        hull.append(wait)
        left -= seconds
    return tuple(hull) or (Wait(0.0, 0.0),)


def _is_below(wait: Wait, before: Wait, after: Wait) -> bool:
    """Whether a line is nowhere above the two beside it."""
    run, rise = before.fraction_left - after.fraction_left, before.sent - after.sent
    return (before.sent - wait.sent) * run >= rise * (before.fraction_left - wait.fraction_left)


def _place_buckets(
    plan: Plan, place: int, stored: Sequence[ParamSpec], excluded: frozenset[str], is_sent: bool
) -> _PlaceBuckets:
    compute = compute_specs(stored, plan.precision, excluded=excluded)
    size = effective_bucket_bytes(compute, plan.bucket_bytes, is_inter_host=is_sent)
    buckets = make_buckets(compute, bucket_bytes=size)
    stage = StageBuckets(
        place, tuple(stored), buckets, tuple(gradient_bucket(each, plan.reduce_dtype) for each in buckets)
    )
    first_of: dict[tuple[int, str], int] = {}
    for bucket in buckets:
        first_of.setdefault((bucket.size, bucket.dtype), bucket.index)
    numbers = {kind: number for number, kind in enumerate(first_of)}
    names = {slot.name for index in first_of.values() for slot in buckets[index].slots}
    chosen = StageBuckets(
        place,
        tuple(spec for spec in stored if spec.name in names),
        tuple(stage.buckets[index] for index in first_of.values()),
        tuple(stage.gradient_buckets[index] for index in first_of.values()),
    )
    return _PlaceBuckets(chosen, tuple(numbers[each.size, each.dtype] for each in buckets), place_sizes(stage))


def _padded(stage: StageBuckets, num_shards: int) -> StageBuckets:
    """The buckets as `make_buckets` pads them for so many shards."""
    unit = num_shards * SHARD_ALIGNMENT

    def pad(bucket: Bucket) -> Bucket:
        return replace(bucket, size=-(-bucket.size // unit) * unit)

    return replace(
        stage, buckets=tuple(map(pad, stage.buckets)), gradient_buckets=tuple(map(pad, stage.gradient_buckets))
    )
