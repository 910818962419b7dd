"""Laws of predicted steps: terms that add up, closed forms of bubbles, and prices of which none is forgotten."""

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fourfold.plan.codec import CodecSpec
from fourfold.plan.lowering import lower
from fourfold.plan.pipeline.bubble import expected_bubble
from fourfold.plan.pipeline.spec import PipelineSpec
from fourfold.plan.plan import Plan
from fourfold.plan.predict.collectives import BucketCollectives
from fourfold.plan.predict.prediction import Prediction
from fourfold.plan.predict.prices import GroupShape, Prices
from fourfold.plan.predict.step import predict_step
from fourfold.plan.topology import Topology
from fourfold.plan.update_spec import UpdateSpec
from fourfold.words.layout import Change
from tests.planner_cases import FREE, ChainFacts, LinearPrices, compute_only


def predict(plan: Plan, prices: Prices, facts: ChainFacts | None = None, *, hosts: int = 1) -> Prediction:
    facts = facts or ChainFacts()
    topology = Topology.regular(hosts=hosts, ranks_per_host=plan.mesh.size // hosts, device="cuda")
    return predict_step(lower(plan, facts.specs(plan), topology, facts.update_spec), facts, prices)


SCHEDULES = st.sampled_from([("gpipe", 1, None), ("1f1b", 1, None), ("interleaved", 2, None), ("interleaved", 4, None)])


@settings(max_examples=25, deadline=None)
@given(schedule=SCHEDULES, pp=st.integers(2, 32), rounds=st.integers(1, 3))
def test_bubbles_without_communication_are_the_closed_forms(schedule, pp, rounds):
    name, interleave, limit = schedule
    check_bubble(name, pp, pp * rounds, interleave, limit)


@pytest.mark.parametrize("pp", [2, 3, 4, 8, 16, 32])
@pytest.mark.parametrize("fillings", [1, 2])
def test_bubbles_of_the_zero_bubble_schedules_are_the_closed_forms(pp, fillings):
    check_bubble("zero-bubble", pp, 3 * pp, 1, None if fillings == 1 else 2 * pp - 1)


def check_bubble(schedule: str, pp: int, microbatches: int, interleave: int, limit: int | None) -> None:
    """Blocks alone, one in each stage: the ends cost nothing."""
    plan = Plan(pp=pp, microbatches=microbatches, schedule=schedule, interleave=interleave, max_in_flight=limit)
    facts = ChainFacts(num_blocks=pp * interleave, batch_size=microbatches, end_factor=0.0)
    terms = predict(plan, compute_only(), facts).terms
    spec = PipelineSpec(pp, microbatches, interleave, max_in_flight=limit)
    expected = expected_bubble(schedule, spec)
    assert expected is not None
    assert terms.compute > 0
    assert terms.bubble / terms.compute == pytest.approx(expected, rel=0.005, abs=1e-9)
    assert terms.total == pytest.approx(terms.compute + terms.bubble)


def test_a_step_of_one_rank_is_computing_update_and_overhead():
    prices = LinearPrices(action_seconds=1e-4, step_seconds=1e-3)
    facts = ChainFacts()
    terms = predict(Plan(), prices, facts).terms
    num_bytes = sum(spec.num_bytes for spec in facts.specs(Plan()))
    flops = facts.facts(Plan()).flops * facts.batch_size
    assert terms.compute == pytest.approx(3 * flops / prices.flops)
    assert terms.update == pytest.approx(4 * num_bytes / prices.update_bandwidth)  # weights, gradients, two states
    assert terms.overhead == pytest.approx(1e-3 + 4 * 1e-4)  # forward, loss, backward, one update
    assert terms.total == pytest.approx(terms.compute + terms.update + terms.overhead)


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_data_parallel_alone_is_computing_and_what_is_exposed(zero):
    prices = LinearPrices(update_bandwidth=FREE)
    plan = Plan(dp=4, zero=zero, bucket_bytes=1 << 14)
    facts = ChainFacts()
    terms = predict(plan, prices, facts).terms
    assert terms.bubble == pytest.approx(0.0, abs=1e-12)
    assert terms.total == pytest.approx(terms.compute + terms.exposed + terms.update)
    assert 0 < terms.exposed < sum(prices.collective(*each) for each in _collectives(plan, facts))


def _collectives(plan: Plan, facts: ChainFacts) -> Iterator[tuple[Change, float, GroupShape]]:
    """More than all that is exchanged."""
    for spec in facts.specs(plan):
        yield Change.ALL_REDUCE, spec.num_bytes, GroupShape(4)
        yield Change.ALL_GATHER, spec.num_bytes, GroupShape(4)


def test_a_clip_is_priced():
    plain, clipped = (
        predict(Plan(pp=2, microbatches=4), LinearPrices(), ChainFacts(update_spec=UpdateSpec(clip, num_states=(2,))))
        for clip in (None, 1.0)
    )
    assert clipped.seconds > plain.seconds


@pytest.mark.parametrize(("reduce_dtype", "gradient_bytes", "converted_bytes"), [("keep", 4, 0), ("bf16", 2, 2 + 4)])
def test_gradients_of_another_dtype_are_converted_before_the_update(reduce_dtype, gradient_bytes, converted_bytes):
    facts, prices = ChainFacts(), LinearPrices()
    terms = predict(Plan(dp=2, reduce_dtype=reduce_dtype), prices, facts).terms
    elements = sum(spec.num_elements for spec in facts.specs(Plan()))
    updated, converted = elements * (4 + gradient_bytes + 2 * 4), elements * converted_bytes
    assert terms.update == pytest.approx(updated / prices.update_bandwidth + converted / prices.memory_bandwidth)


@pytest.mark.parametrize(("momentum", "passes"), [(0.0, 12), (0.9, 12 + 8)])
def test_an_outer_update_makes_every_pass_once_in_as_many_steps(momentum, passes):
    facts, prices = ChainFacts(), LinearPrices()
    plan = Plan(dp=2, sync="local", local_steps=4, outer_momentum=momentum)
    outer = predict(plan, prices, facts).terms.update - predict(Plan(dp=2), prices, facts).terms.update
    elements = sum(spec.num_elements for spec in facts.specs(Plan()))
    assert outer == pytest.approx(passes * 4 * elements / prices.memory_bandwidth / 4)


@pytest.mark.parametrize("shares_memory", [True, False])
def test_ranks_that_share_memory_also_add_up_what_a_codec_has_sent(shares_memory):
    """Gathered messages stay within a host; its ranks add up whole gradients, after a pass that clears or copies."""
    facts, prices, plan = ChainFacts(), LinearPrices(), Plan(dp=2, codec="topk", codec_density=0.5)
    topology = Topology.regular(hosts=1, ranks_per_host=2, has_shared_memory=shares_memory)
    blueprint = lower(plan, facts.specs(plan), topology, facts.update_spec)
    group = blueprint.groups[0]
    costs = [BucketCollectives(blueprint, group, prices).reduce(bucket.index) for bucket in group.buckets]
    for bucket, cost in zip(group.buckets, costs, strict=True):
        elements, size = bucket.slots[-1].stop, bucket.size * bucket.element_bytes
        coded = prices.codec(CodecSpec("topk"), elements)
        shape = GroupShape(2, 1, shares_memory)
        inside = prices.collective(Change.ALL_REDUCE, size, shape) + prices.memory_pass(size)
        assert cost.own == pytest.approx(coded + (inside if shares_memory else 0.0))
        assert (cost.sent > 0.0) is not shares_memory


@pytest.mark.parametrize(("schedule", "passes"), [("1f1b", 3), ("zero-bubble", 0)])
def test_later_microbatches_add_their_gradients_in_passes_of_their_own_unless_backwards_are_divided(schedule, passes):
    facts, free = ChainFacts(), LinearPrices(FREE, FREE, 0.0, 0.0, FREE, 1e9, FREE)
    terms = predict(Plan(pp=2, microbatches=4, schedule=schedule), free, facts).terms
    # Both stages have as many gradients, and add them three times.
    of_a_stage = sum(spec.num_bytes for spec in facts.specs(Plan(pp=2)) if spec.stage == 1)
    assert terms.compute == pytest.approx(3 * passes * of_a_stage / 1e9, abs=1e-12)
