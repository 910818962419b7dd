"""Roofline prices: the laws of prices, on random clusters and operations."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold.plan.codec import CODECS, CodecSpec
from fourfold.plan.plan import Plan
from fourfold.planner.predict.clusters import Cluster, ProductEfficiency, RooflinePrices, Tier
from fourfold.planner.predict.facts import Collective, Operation, OperationKind, SegmentFacts
from fourfold.planner.predict.prices import GroupShape, Prices
from fourfold.words.errors import PlanError
from fourfold.words.layout import Change, collective_sent_bytes

CHANGES = [Change.ALL_REDUCE, Change.REDUCE_SCATTER, Change.ALL_GATHER, Change.ALL_TO_ALL]
NOTHING_SENT = [Change.NONE, Change.VIEW, Change.MASK, Change.PAD]
fractions = st.floats(0.05, 1.0)


@st.composite
def clusters(draw, *, has_latency=True) -> Cluster:
    def tier(slowest: float, fastest: float) -> Tier:
        latency = draw(st.floats(0.0, 1e-3)) if has_latency else 0.0
        return Tier(latency, draw(st.floats(slowest, fastest)), draw(fractions), draw(fractions))

    return Cluster(
        "drawn",
        "cuda",
        devices_per_host=draw(st.integers(1, 8)),
        hosts=16,
        memory_bytes=80e9,
        flops_per_second={"float32": draw(st.floats(1e12, 1e14)), "bfloat16": draw(st.floats(1e13, 1e15))},
        memory_bandwidth=draw(st.floats(1e11, 3e12)),
        products=ProductEfficiency(draw(fractions), draw(st.floats(0.0, 1e10))),
        host=tier(1e9, 5e11),
        network=tier(1e8, 5e10),
        launch_seconds=draw(st.floats(0.0, 1e-4)),
        overlap_slowdown=draw(st.floats(1.0, 2.0)),
    )


@st.composite
def operations(draw) -> Operation:
    kind = draw(st.sampled_from(list(OperationKind)))
    is_arithmetic = kind not in (OperationKind.POINTWISE, OperationKind.LOOKUP)
    has_weight = draw(st.booleans()) if is_arithmetic else kind is OperationKind.LOOKUP
    return Operation(
        kind,
        flops=draw(st.floats(1e3, 1e13)) if is_arithmetic else 0.0,
        moved_bytes=draw(st.floats(1.0, 1e10)),
        weight_bytes=draw(st.floats(0.0, 1e9)) if has_weight else 0.0,
        has_weight=has_weight,
    )


def segment(*operations: Operation, collectives: tuple[Collective, ...] = (), name: str = "blocks.0") -> SegmentFacts:
    return SegmentFacts(name, (), operations, dict.fromkeys(("none", "selective", "full"), 0.0), collectives)


collectives = st.builds(
    Collective,
    st.sampled_from(["tp", "cp"]),
    st.sampled_from(CHANGES),
    st.floats(1.0, 1e9),
    forward=st.integers(0, 3),
    backward=st.integers(0, 3),
    recompute=st.integers(1, 3),
    selective=st.integers(0, 1),
)
segments = st.builds(
    lambda each, sent, name: segment(*each, collectives=tuple(sent), name=name),
    st.lists(operations(), max_size=5),
    st.lists(collectives, max_size=3),
    st.sampled_from(["", "blocks.0"]),
)
plans = st.builds(
    lambda cp, tp, recompute, precision: Plan(cp=cp, tp=tp, recompute=recompute, precision=precision),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 8]),
    st.sampled_from(["none", "selective", "full"]),
    st.sampled_from(["keep", "bf16"]),
)
groups = st.builds(GroupShape, st.integers(1, 8), st.integers(1, 16))
amounts = st.floats(0.0, 1e10)


def test_roofline_prices_are_prices():
    cluster = Cluster("x", "cuda", 1, 1, 1.0, {}, 1.0, ProductEfficiency(1.0, 0.0), Tier(0.0, 1.0), None)
    prices: Prices = RooflinePrices(cluster)
    assert prices.collective(Change.ALL_REDUCE, 1e9, GroupShape(1)) == 0.0


# ---- more never costs less ------------------------------------------------------------------------


@given(clusters(), segments, plans, st.floats(0.01, 100.0), st.floats(1.0, 10.0))
def test_more_samples_never_cost_less(cluster, facts, plan, num_samples, factor):
    prices = RooflinePrices(cluster)
    fewer, more = (prices.segment(facts, plan, each) for each in (num_samples, num_samples * factor))
    assert all(a >= 0 for a in fewer)
    assert all(b >= a * (1 - 1e-12) for a, b in zip(fewer, more, strict=True))


@given(clusters(), segments, operations(), plans, st.floats(0.01, 100.0))
def test_another_operation_never_costs_less(cluster, facts, operation, plan, num_samples):
    prices = RooflinePrices(cluster)
    longer = dataclasses.replace(facts, operations=(*facts.operations, operation))
    before, after = (prices.segment(each, plan, num_samples) for each in (facts, longer))
    assert all(b >= a for a, b in zip(before, after, strict=True))
    assert sum(after) > sum(before)


@given(clusters(), segments, plans, st.floats(0.01, 100.0))
def test_recomputing_more_never_costs_less_and_only_in_backward(cluster, facts, plan, num_samples):
    prices = RooflinePrices(cluster)
    none, selective, full = (
        prices.segment(facts, dataclasses.replace(plan, recompute=each), num_samples)
        for each in ("none", "selective", "full")
    )
    assert none.forward == selective.forward == full.forward
    assert none.backward_weight == selective.backward_weight == full.backward_weight
    assert none.backward_input <= selective.backward_input <= full.backward_input
    if not facts.name:  # an end is never computed again
        assert none == full


@given(clusters(), st.sampled_from(CHANGES), groups, amounts, amounts)
def test_more_bytes_never_cost_less(cluster, change, group, num_bytes, extra):
    prices = RooflinePrices(cluster)
    assert prices.collective(change, num_bytes, group) <= prices.collective(change, num_bytes + extra, group)
    for crosses in (False, True):
        fewer, more = (prices.edge(each, crosses_hosts=crosses) for each in (num_bytes, num_bytes + extra))
        assert fewer <= more
    assert prices.memory_pass(num_bytes) <= prices.memory_pass(num_bytes + extra)
    assert prices.update("AdamW", 1.0, num_bytes) <= prices.update("AdamW", 1.0, num_bytes + extra)
    assert prices.offload(num_bytes) <= prices.offload(num_bytes + extra)
    for kind in CODECS:
        codec = CodecSpec(kind)
        assert prices.codec(codec, num_bytes) <= prices.codec(codec, num_bytes + extra)


@given(clusters(), st.sampled_from([Change.ALL_REDUCE, Change.REDUCE_SCATTER, Change.ALL_GATHER]), groups, amounts)
def test_more_hosts_or_more_ranks_of_a_host_never_cost_less(cluster, change, group, num_bytes):
    prices = RooflinePrices(cluster)

    def cost(ranks_per_host: int, hosts: int = 1) -> float:
        return prices.collective(change, num_bytes, GroupShape(ranks_per_host, hosts))

    assert cost(group.ranks_per_host, group.hosts) <= cost(group.ranks_per_host, group.hosts + 1) * (1 + 1e-12)
    assert cost(group.ranks_per_host) <= cost(group.ranks_per_host + 1)


@given(clusters(), st.sampled_from([*CHANGES, *NOTHING_SENT]), amounts)
def test_one_rank_sends_nothing(cluster, change, num_bytes):
    assert RooflinePrices(cluster).collective(change, num_bytes, GroupShape(1)) == 0.0


@given(clusters(), st.sampled_from(NOTHING_SENT), groups, amounts)
def test_what_sends_nothing_takes_no_time(cluster, change, group, num_bytes):
    assert RooflinePrices(cluster).collective(change, num_bytes, group) == 0.0


# ---- oracles --------------------------------------------------------------------------------------


@given(clusters(has_latency=False), st.sampled_from(CHANGES), st.integers(2, 8), st.floats(1.0, 1e10))
def test_within_a_host_a_collective_takes_the_bytes_that_a_rank_sends(cluster, change, size, num_bytes):
    sent = collective_sent_bytes(change, whole_bytes=1, size=size) * num_bytes
    expected = sent / (cluster.host.bandwidth * cluster.host.efficiency)
    assert RooflinePrices(cluster).collective(change, num_bytes, GroupShape(size)) == pytest.approx(expected)


@given(clusters(has_latency=False), st.integers(1, 8), st.integers(2, 16), st.floats(1.0, 1e10))
def test_an_all_reduce_of_hosts_is_one_within_each_and_one_of_parts_between_them(cluster, ranks, hosts, num_bytes):
    prices = RooflinePrices(cluster)
    inside = prices.collective(Change.ALL_REDUCE, num_bytes, GroupShape(ranks))
    between = prices.collective(Change.ALL_REDUCE, num_bytes / ranks, GroupShape(1, hosts))
    whole = prices.collective(Change.ALL_REDUCE, num_bytes, GroupShape(ranks, hosts))
    assert whole == pytest.approx(inside + between)


@given(clusters(), operations(), st.floats(0.1, 10.0))
def test_an_operation_is_bounded_by_its_arithmetic_or_its_traffic(cluster, operation, num_samples):
    prices, plan = RooflinePrices(cluster, dtype="bfloat16"), Plan()
    seconds = prices.segment(segment(operation), plan, num_samples).forward
    moved = num_samples * operation.moved_bytes + operation.weight_bytes
    peak = cluster.flops_per_second["bfloat16"]
    flops = num_samples * operation.flops
    arithmetic = flops / (peak * cluster.products.of(flops)) if flops else 0.0
    assert seconds == pytest.approx(max(arithmetic, moved / cluster.memory_bandwidth, cluster.launch_seconds))


@given(clusters(), operations(), st.floats(0.1, 10.0))
def test_a_backward_takes_two_forwards_of_arithmetic(cluster, operation, num_samples):
    one = RooflinePrices(cluster).segment(segment(operation), Plan(), num_samples)
    assert one.backward == pytest.approx((2.0 if operation.flops else 1.5) * one.forward)
    assert (one.backward_weight > 0) == operation.has_weight


def test_tensor_ranks_are_neighbours_and_sequence_ranks_lie_a_tensor_group_apart():
    cluster = Cluster("x", "cuda", 8, 4, 1.0, {}, 1.0, ProductEfficiency(1.0, 0.0), Tier(0.0, 1.0), Tier(0.0, 1.0))
    prices = RooflinePrices(cluster)
    assert prices.axis_group("tp", Plan(tp=4, cp=4, dp=2)) == GroupShape(4)
    assert prices.axis_group("cp", Plan(tp=4, cp=4, dp=2)) == GroupShape(2, 2)
    assert prices.axis_group("dp", Plan(tp=4, cp=4, dp=2)) == GroupShape(1, 2)
    assert prices.axis_group("tp", Plan(tp=16)) == GroupShape(8, 2)
    assert prices.axis_group("pp", Plan(tp=2, dp=2, pp=2)) == GroupShape(2)


def test_selective_recompute_keeps_products_with_weights_and_fused_attention():
    cluster = Cluster("x", "cuda", 1, 1, 1.0, {"float32": 1.0}, 1.0, ProductEfficiency(1.0, 0.0), Tier(0.0, 1.0), None)
    prices = RooflinePrices(cluster)
    linear = Operation(OperationKind.PRODUCT, 3.0, 0.0, has_weight=True)
    fused = Operation(OperationKind.ATTENTION, 5.0, 0.0)
    scores, norm = Operation(OperationKind.PRODUCT, 7.0, 0.0), Operation(OperationKind.POINTWISE, 0.0, 11.0)
    kept, again = segment(linear, fused), segment(scores, norm)
    selective, none = Plan(recompute="selective"), Plan()
    assert prices.segment(kept, selective, 1.0) == prices.segment(kept, none, 1.0)
    difference = prices.segment(again, selective, 1.0).backward_input - prices.segment(again, none, 1.0).backward_input
    assert difference == pytest.approx(18.0)


def test_a_plan_computes_at_the_peak_of_its_precision():
    cluster = Cluster("x", "cuda", 1, 1, 1.0, {"bfloat16": 2.0}, 1.0, ProductEfficiency(1.0, 0.0), Tier(0.0, 1.0), None)
    prices = RooflinePrices(cluster)
    assert prices.peak(Plan(precision="bf16")) == 2.0
    with pytest.raises(PlanError, match='try precision = "bf16"'):
        prices.peak(Plan())
    assert RooflinePrices(cluster, dtype="bfloat16").peak(Plan()) == 2.0
