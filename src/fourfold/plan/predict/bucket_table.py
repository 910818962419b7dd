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

from fourfold.plan.data.buckets import SHARD_ALIGNMENT, Bucket, effective_bucket_bytes, make_buckets
from fourfold.plan.data.transport_request import request_transport
from fourfold.plan.lowering import Blueprint, DataGroup, StageBuckets, effective_layouts, planned_layouts
from fourfold.plan.param_spec import ParamSpec
from fourfold.plan.plan import Plan
from fourfold.plan.precision import compute_specs, gradient_bucket
from fourfold.plan.predict.bucket_prices import BucketPrices
from fourfold.plan.predict.collectives import NOTHING, CollectiveSeconds
from fourfold.plan.predict.facts import FactsSource
from fourfold.plan.predict.memory import resting_memory
from fourfold.plan.predict.prediction import MemoryParts
from fourfold.plan.predict.prices import Prices
from fourfold.plan.predict.stage_seconds import ZERO
from fourfold.plan.topology import GroupHosts, Topology, group_hosts
from fourfold.words.program import GRAD_NORM, TRUST_NORMS, USED_PARAMS, Action, Verb

BUCKET_FIELDS = ("tp", "dims", "pp", "interleave", "stages", "precision", "reduce_dtype", "bucket_bytes", "codec")
DATA_FIELDS = (
    *BUCKET_FIELDS,
    *("dp", "sp", "shard", "zero", "update", "sync", "outer_momentum", "offload", "transport", "schedule", "unused"),
    *("codec_rank", "codec_density", "codec_refresh_steps"),
)
bucket_key, data_key = attrgetter(*BUCKET_FIELDS), attrgetter(*DATA_FIELDS)


class Totals(NamedTuple):
    """Seconds of a collective of all buckets of a place, of the first one's messages, and of the last one's."""

    own: float
    sent: float
    first: float
    last: float


class Wait(NamedTuple):
    """Messages that begin when this fraction of a backward is left, and how long they take: those of the buckets from
    one to the last.
    """

    fraction_left: float
    sent: float


class PlaceData(NamedTuple):
    """What the data axis costs and holds on a place, without activations.

    waits      of reductions: none of them ends before the longest of these
    updates    the seconds of all updates, of the first and of the last one
    measured   scalars that a step waits for: the seconds of the place itself, and of their sums
    gradients  seconds of a backward: with the gradients of a step's first microbatch, and with those of later ones
    """

    resting: MemoryParts
    reduce: Totals
    gather: Totals
    unshard: Totals
    push: Totals
    waits: tuple[Wait, ...]
    updates: tuple[float, float, float]
    pull_seconds: float
    num_buckets: int
    measured: CollectiveSeconds
    gradients: tuple[float, float]
    resting_bytes: float


class BucketKinds(NamedTuple):
    """The kinds of places; `of_place`: which of them each place is, `first_places`: where each occurs first."""

    kinds: tuple[PlaceData, ...]
    of_place: tuple[int, ...]
    first_places: tuple[int, ...]


class BucketTable:
    """The data axis of the plans of one search."""

    def __init__(self, source: FactsSource, prices: Prices, topology: Topology) -> None:
        self._source, self._prices, self._topology = source, prices, topology
        self._hosts: dict[tuple[int, int, str], GroupHosts] = {}
        self._buckets: dict[tuple[object, ...], list[StageBuckets]] = {}
        self._data: dict[tuple[object, ...], BucketKinds] = {}

    def of(self, plan: Plan) -> BucketKinds:
        """What the places of a plan cost."""
        key = (*data_key(plan), plan.microbatches == 1, plan.mesh.size)
        if key not in self._data:
            self._data[key] = self._make(plan)
        return self._data[key]

    def hosts(self, plan: Plan) -> GroupHosts:
        """The hosts of the ranks that sum gradients; those of the first place stand for all."""
        key = plan.tp, plan.reduce_group_size, plan.transport
        if key not in self._hosts:
            ranks = range(0, plan.tp * plan.reduce_group_size, plan.tp)
            self._hosts[key] = group_hosts(self._topology, ranks, transport=plan.transport)
        return self._hosts[key]

    def _make(self, plan: Plan) -> BucketKinds:
        hosts = self.hosts(plan)
        stages = self._stages(plan, is_sent=hosts.num_hosts > 1 or plan.codec != "none")
        is_tied = plan.pp > 1 and any(spec.is_tied for spec in self._source.specs(plan))
        keys = [
            (_signature(each), is_tied and each.stage == plan.pp - 1, plan.is_asynchronous and each.stage)
            for each in stages
        ]
        numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
        first_places = [keys.index(key) for key in numbers]
        kinds = tuple(self._place(plan, stages[place], hosts) for place in first_places)
        return BucketKinds(kinds, tuple(numbers[key] for key in keys), tuple(first_places))

    def _stages(self, plan: Plan, *, is_sent: bool) -> list[StageBuckets]:
        """By place, its buckets without padding."""
        key = (*bucket_key(plan), is_sent)
        if key not in self._buckets:
            specs = self._source.specs(plan)
            stored: list[list[ParamSpec]] = [[] for _ in range(plan.pp)]
            for spec in specs:
                stored[spec.stage % plan.pp].append(spec.at(0))
            excluded = self._source.update_spec.full_precision_params
            self._buckets[key] = [_stage(plan, place, own, excluded, is_sent) for place, own in enumerate(stored)]
        return self._buckets[key]

    def _place(self, plan: Plan, stage: StageBuckets, hosts: GroupHosts) -> PlaceData:
        planned = planned_layouts(plan)
        is_sharded = plan.zero > 0 and plan.num_shards > 1
        padded = _padded(stage, plan.reduce_group_size) if is_sharded else stage
        request = request_transport(
            padded.buckets, padded.gradient_buckets, planned, num_shards=plan.num_shards, num_scalars=len(stage.specs)
        )
        ranks = tuple(rank for host in hosts.ranks_by_host for rank in host)
        group = DataGroup(ranks, padded, hosts, effective_layouts(plan, hosts), request)
        specs = tuple(self._source.specs(plan))
        blueprint = Blueprint(plan, specs, self._topology, self._source.update_spec, (group,))
        return _place_data(blueprint, group, self._prices)


def _place_data(blueprint: Blueprint, group: DataGroup, prices: Prices) -> PlaceData:
    """The totals of a place."""
    place, plan = group.stage.stage, blueprint.plan
    buckets = BucketPrices(blueprint, group, prices)
    collectives = buckets.collectives
    counts = Counter(_size(bucket) for bucket in group.buckets)
    index_of = {_size(bucket): bucket.index for bucket in group.buckets}
    step = blueprint.step_spec(group)
    measured = NOTHING
    for index, is_wanted in {
        GRAD_NORM: step.has_clip,
        USED_PARAMS: step.allows_unused,
        TRUST_NORMS: step.has_trust_ratios,
    }.items():
        terms = buckets.measure(Action(Verb.MEASURE, place, index)) if is_wanted else ZERO
        measured += CollectiveSeconds(terms.update, terms.exposed)

    def totals(price: Callable[[int], CollectiveSeconds]) -> Totals:
        each = {size: price(index) for size, index in index_of.items()}
        own, sent = (sum(each[size][part] * count for size, count in counts.items()) for part in (0, 1))
        return Totals(own, sent, *(each[_size(group.buckets[index])].sent for index in (0, -1)))

    updates = {size: buckets.update(index).update for size, index in index_of.items()}
    reductions = {size: collectives.reduce(index).sent for size, index in index_of.items()}
    pulled = [buckets.pull(index_of[size]).update * count for size, count in counts.items()]
    gradients = [buckets.gradient_seconds_of_place(is_first=is_first) for is_first in (True, False)]
    resting = resting_memory(blueprint, group, place)
    return PlaceData(
        resting=resting,
        resting_bytes=resting.total,
        reduce=totals(collectives.reduce),
        gather=totals(collectives.gather),
        unshard=totals(collectives.unshard),
        push=totals(collectives.push),
        waits=_waits([(bucket.num_bytes, reductions[_size(bucket)]) for bucket in group.buckets]),
        updates=(
            sum(updates[size] * count for size, count in counts.items()),
            updates[_size(group.buckets[0])],
            updates[_size(group.buckets[-1])],
        ),
        pull_seconds=sum(pulled) if plan.sync == "local" else 0.0,
        num_buckets=len(group.buckets),
        measured=measured,
        gradients=(gradients[0], gradients[1]),
    )


def _waits(buckets: Sequence[tuple[int, float]]) -> tuple[Wait, ...]:
    """`buckets`: bytes and seconds of each, in order of reduction. A bucket is ready when as many bytes have gradients.

    Of the lines sent − fraction · backward only those are kept that are the highest for some backward.
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
    return tuple(hull)


def _is_below(wait: Wait, before: Wait, after: Wait) -> bool:
    """Whether a line is nowhere above the two beside it."""
    run, rise = before.fraction_left - after.fraction_left, before.sent - after.sent
    return (before.sent - wait.sent) * run >= rise * (before.fraction_left - wait.fraction_left)


def _size(bucket: Bucket) -> tuple[int, str]:
    return bucket.size, bucket.dtype


def _stage(
    plan: Plan, place: int, stored: Sequence[ParamSpec], excluded: frozenset[str], is_sent: bool
) -> StageBuckets:
    compute = compute_specs(stored, plan.precision, excluded=excluded)
    size = effective_bucket_bytes(compute, plan.bucket_bytes, is_inter_host=is_sent)
    buckets = make_buckets(compute, bucket_bytes=size)
    return StageBuckets(
        place, tuple(stored), buckets, tuple(gradient_bucket(each, plan.reduce_dtype) for each in buckets)
    )


def _padded(stage: StageBuckets, num_shards: int) -> StageBuckets:
    """The buckets as `make_buckets` pads them for so many shards."""
    unit = num_shards * SHARD_ALIGNMENT

    def pad(bucket: Bucket) -> Bucket:
        return replace(bucket, size=-(-bucket.size // unit) * unit)

    return replace(
        stage, buckets=tuple(map(pad, stage.buckets)), gradient_buckets=tuple(map(pad, stage.gradient_buckets))
    )


def _signature(stage: StageBuckets) -> tuple[tuple[int, str, str], ...]:
    return tuple(
        (bucket.size, bucket.dtype, gradient.dtype)
        for bucket, gradient in zip(stage.buckets, stage.gradient_buckets, strict=True)
    )
