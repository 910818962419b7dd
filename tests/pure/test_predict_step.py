"""Laws of predicted steps: terms that add up, closed forms of bubbles, and prices of which none is forgotten."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fourfold.axes.pipeline.rules.schedules import batch_actions
from fourfold.axes.pipeline.rules.spec import PipelineSpec
from fourfold.plan.codec import CodecSpec
from fourfold.plan.lowering import lower
from fourfold.plan.model_traits import ModelTraits
from fourfold.plan.param_spec import ParamSpec, UpdateSpec
from fourfold.plan.plan import Plan
from fourfold.plan.rank_program import lane_of
from fourfold.plan.topology import Topology
from fourfold.planner.predict.bucket_collectives import BucketCollectives
from fourfold.planner.predict.facts import ModelFacts, SegmentFacts
from fourfold.planner.predict.memory import predict_memory
from fourfold.planner.predict.prediction import Prediction
from fourfold.planner.predict.prices import GroupShape, Prices
from fourfold.planner.predict.step import number_step, predict_step, predicted_record
from fourfold.words.layout import Change
from fourfold.words.program import Verb
from fourfold.words.trace_events import COMPUTE_LANE
from tests.pipeline_sizes import expected_bubble
from tests.planner_cases import FREE, ChainFacts, LinearPrices, cases, compute_only, dearer


def two_hosts(plan: Plan) -> Topology:
    return Topology.regular(hosts=2, ranks_per_host=plan.mesh.size // 2, device="cuda")


@dataclass(frozen=True)
class SlowBlocks:
    """Facts whose blocks of one stage have more operations."""

    inner: ChainFacts
    blocks: range
    factor: float

    @property
    def batch_size(self) -> int:
        return self.inner.batch_size

    @property
    def update_spec(self) -> UpdateSpec:
        return self.inner.update_spec

    @property
    def traits(self) -> ModelTraits:
        return self.inner.traits

    def resized(self, batch_size: int) -> "SlowBlocks":
        return replace(self, inner=self.inner.resized(batch_size))

    def facts(self, plan: Plan) -> ModelFacts:
        facts = self.inner.facts(plan)
        return replace(facts, blocks=tuple(map(self._block, range(len(facts.blocks)), facts.blocks)))

    def _block(self, index: int, block: SegmentFacts) -> SegmentFacts:
        (operation,) = block.operations
        factor = self.factor if index in self.blocks else 1.0
        return replace(block, operations=(operation._replace(flops=operation.flops * factor),))

    def specs(self, plan: Plan) -> list[ParamSpec]:
        return self.inner.specs(plan)

    def stage_blocks(self, plan: Plan) -> tuple[range, ...]:
        return self.inner.stage_blocks(plan)


def predict(plan: Plan, prices: Prices, facts: ChainFacts | None = None, *, hosts: int = 1) -> Prediction:
    facts = facts or ChainFacts()
    topology = Topology.regular(hosts=hosts, ranks_per_host=plan.mesh.size // hosts, device="cuda")
    return predict_step(lower(plan, facts.specs(plan), topology, facts.update_spec), facts, prices)


DEARER = (
    "flops",
    "bandwidth",
    "latency",
    "network_latency",
    "network_bandwidth",
    "memory_bandwidth",
    "update_bandwidth",
)
COSTS = (*DEARER, "action_seconds", "step_seconds")


@settings(max_examples=25, deadline=None)
@given(case=cases())
def test_terms_are_where_the_seconds_of_the_longest_span_go(case):
    found = predict_step(case.blueprint, case.facts, case.prices)
    assert all(term >= 0 for term in found.terms)
    if case.plan.sync == "local":
        return  # the mean of two programs
    assert found.timeline is not None
    begins = [
        min(timed.start for timed in times if lane_of(timed.action) == COMPUTE_LANE)
        for times in found.timeline.values()
    ]
    spans = [
        max(timed.end for timed in times) - begin for begin, times in zip(begins, found.timeline.values(), strict=True)
    ]
    waits_first = Verb.UNSHARD in {timed.action.verb for timed in found.timeline[0]}
    assert found.seconds - case.prices.step_seconds >= max(spans) - 1e-9
    assert waits_first or found.seconds - case.prices.step_seconds == pytest.approx(max(spans))


@settings(max_examples=25, deadline=None)
@given(
    case=cases(),
    name=st.sampled_from(COSTS),
    factor=st.sampled_from([1.1, 3.0]),
    waiting=st.sampled_from([1.0, 0.5]),  # all of a wait counts, or ranks share cores
)
def test_what_is_dearer_never_makes_a_step_cheaper(case, name, factor, waiting):
    given_prices = replace(case.prices, waiting_share=waiting)
    before, after = (
        predict_step(case.blueprint, case.facts, prices).seconds
        for prices in (given_prices, dearer(given_prices, name, factor))
    )
    assert after >= before * (1 - 1e-9)


@settings(max_examples=25, deadline=None)
@given(case=cases(), factor=st.sampled_from([1.05, 1.5]))
def test_a_forward_or_backward_that_is_dearer_never_makes_a_step_cheaper(case, factor):
    """One stage alone: the others wait for it, or do not."""
    blocks = case.facts.stage_blocks(case.plan)
    before = predict_step(case.blueprint, case.facts, case.prices).seconds
    for stage in {0, len(blocks) - 1}:
        slow = SlowBlocks(case.facts, blocks[stage], factor)
        assert predict_step(case.blueprint, slow, case.prices).seconds >= before * (1 - 1e-9)


@pytest.mark.parametrize("fields", [{"schedule": "2bw", "microbatches": 8}, {"schedule": "pipedream"}])
@pytest.mark.parametrize("pp", [2, 4, 8])
def test_an_asynchronous_step_takes_as_long_as_its_slowest_place_computes(fields, pp):
    facts = ChainFacts(num_blocks=2 * pp + 1, batch_size=16)
    plan = Plan(pp=pp, **fields)
    terms = predict(plan, compute_only(), facts).terms
    slowest = max(len(blocks) for blocks in facts.stage_blocks(plan))
    block = facts.facts(plan).blocks[0].flops * facts.batch_size / 1e9
    assert terms.total == pytest.approx(terms.compute)
    assert slowest * 3 * block * (1 - 1e-9) <= terms.compute <= (slowest + 0.5) * 3 * block
    found = predict(plan, LinearPrices(), facts)
    assert found.timeline is not None
    program = lower(plan, facts.specs(plan), two_hosts(plan), facts.update_spec).programs().step
    for place, times in found.timeline.items():
        named = [timed.action for timed in times]
        assert named == [action for action in program[place] if action.verb != Verb.MEASURE]


@pytest.mark.parametrize(("schedule", "microbatches"), [("pipedream", 1), ("2bw", 4), ("2bw", 5)])
def test_steps_in_a_row_are_the_batches_of_an_asynchronous_schedule(schedule, microbatches):
    plan, facts = Plan(pp=4, schedule=schedule, microbatches=microbatches), ChainFacts(batch_size=16)
    program = lower(plan, facts.specs(plan), two_hosts(plan), facts.update_spec).programs().step
    spec = plan.pipeline_spec
    for place, step in itertools.product(range(4), range(7)):
        numbered = [each.action for each in number_step(program[place], spec, place, step)]
        computes = [action for action in numbered if action.verb in (Verb.FORWARD, Verb.BACKWARD)]
        assert computes == list(batch_actions(spec, step)[place])


def test_a_bucket_of_small_parameters_is_gathered_when_the_first_of_them_is_used():
    plan, facts = Plan(dp=4, zero=3), ChainFacts(num_blocks=4)
    specs = [
        ParamSpec(name, (size,), "float32", 4, param_group=size == 8)
        for block in range(4)
        for name, size in ((f"blocks.{block}.up", 1 << 20), (f"blocks.{block}.down", 8))
    ]
    blueprint = lower(plan, specs, two_hosts(plan), UpdateSpec(num_states=(2, 2)))
    small = next(bucket.index for bucket in blueprint.groups[0].buckets if bucket.param_group)
    orders = predicted_record(blueprint, [facts.facts(plan).segments]).use_orders[0]
    assert small == 3  # as the parameter that was placed in it last
    assert (orders.forward[1], orders.backward[1]) == (small, small)  # behind the large one of the same block
    assert sorted(orders.forward) == sorted(orders.backward) == list(range(5))


SCHEDULES = st.sampled_from([("gpipe", 1, None), ("1f1b", 1, None), ("interleaved", 2, None), ("interleaved", 4, None)])


@settings(max_examples=12, deadline=None)
@given(schedule=SCHEDULES, pp=st.integers(2, 32), rounds=st.integers(1, 3))
def test_bubbles_without_communication_are_the_closed_forms(schedule, pp, rounds):
    name, interleave, limit = schedule
    check_bubble(name, pp, pp * rounds, interleave, limit)


@pytest.mark.parametrize("pp", [2, 3, 4, 8, 16, 32])
@pytest.mark.parametrize("fillings", [1, 2])
def test_bubbles_of_the_zero_bubble_schedules_are_the_closed_forms(pp, fillings):
    check_bubble("zero-bubble", pp, 3 * pp, 1, None if fillings == 1 else 2 * pp - 1)


@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
def test_waits_of_ranks_that_share_cores_cost_half(schedule):
    """Four ranks on two cores: while two of them wait, the others compute twice as fast."""
    facts = ChainFacts(8, batch_size=16, end_factor=0.0)
    plan = Plan(pp=4, microbatches=4, schedule=schedule)
    blueprint = lower(plan, facts.specs(plan), Topology.regular(hosts=1, ranks_per_host=4), facts.update_spec)
    whole, half = (
        predict_step(blueprint, facts, replace(LinearPrices(bandwidth=1e6), waiting_share=share)).terms
        for share in (1.0, 0.5)
    )
    assert whole.bubble > 0
    assert half == whole._replace(bubble=whole.bubble / 2)


def check_bubble(schedule: str, pp: int, microbatches: int, interleave: int, limit: int | None) -> None:
    """Blocks alone, one in each stage: the ends cost nothing."""
    plan = Plan(pp=pp, microbatches=microbatches, schedule=schedule, interleave=interleave, max_in_flight=limit)
    facts = ChainFacts(num_blocks=pp * interleave, batch_size=microbatches, end_factor=0.0)
    terms = predict(plan, compute_only(), facts).terms
    spec = PipelineSpec(pp, microbatches, interleave, max_in_flight=limit)
    expected = expected_bubble(schedule, spec)
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


def test_tied_weights_are_sent_and_held_twice():
    plan, prices = Plan(pp=2, microbatches=4), LinearPrices()
    alone, tied = (predict(plan, prices, ChainFacts(has_tied_head=is_tied)) for is_tied in (False, True))
    num_bytes = 4.0 * 64 * 64
    message = prices.edge(num_bytes, crosses_hosts=False)
    assert alone.seconds < tied.seconds <= alone.seconds + 2 * message  # some of it while the first place would wait
    # Where messages between stages are short: the last place waits for the weight, the first one for its gradient.
    slow, message = LinearPrices(bandwidth=1e5), LinearPrices(bandwidth=1e5).edge(num_bytes, crosses_hosts=False)
    alone_slow, tied_slow = (
        predict(plan, slow, ChainFacts(tokens=1, has_tied_head=is_tied)).seconds for is_tied in (False, True)
    )
    assert alone_slow + 1.8 * message < tied_slow < alone_slow + 2.2 * message
    assert tied.by_stage[1].weights == alone.by_stage[1].weights + num_bytes
    assert tied.by_stage[1].gradients == alone.by_stage[1].gradients + num_bytes
    assert tied.by_stage[0] == alone.by_stage[0]


@pytest.mark.parametrize(("batch_size", "dp", "microbatches", "largest"), [(10, 4, 2, 3), (9, 2, 4, 5), (1, 4, 1, 1)])
def test_a_rank_with_the_most_samples_stands_for_all(batch_size, dp, microbatches, largest):
    facts = ChainFacts(batch_size=batch_size)
    plan = Plan(dp=dp, microbatches=microbatches)
    prices = LinearPrices(memory_bandwidth=FREE)
    compute = 3 * facts.facts(plan).flops * largest / prices.flops
    assert predict(plan, prices, facts).terms.compute == pytest.approx(compute)


def test_sent_bytes_are_those_of_the_place_that_sends_most():
    facts, whole = ChainFacts(batch_size=16), 4.0 * 64 * 8  # a residual of one sample
    two, four = (predict(Plan(pp=pp, dp=2, microbatches=4), LinearPrices(), facts).sent_bytes for pp in (2, 4))
    assert (two["pp"], four["pp"]) == (8 * whole, 2 * 8 * whole)  # the places in the middle send in both directions
    tensor = predict(Plan(tp=2), LinearPrices(), facts).sent_bytes
    assert tensor["tp"] == 8 * 4 * 16 * whole  # blocks; two all-reduces forward and two backward send a tensor each
    assert tensor["dp"] == tensor["cp"] == tensor["pp"] == 0.0
    data = Plan(dp=4)
    blueprint = lower(data, facts.specs(data), two_hosts(data), facts.update_spec)
    assert predict_step(blueprint, facts, LinearPrices()).sent_bytes["dp"] == blueprint.sent_bytes


@pytest.mark.parametrize(
    "fields", [{"dp": 4}, {"dp": 4, "zero": 1}, {"dp": 2, "zero": 3, "tp": 2}, {"pp": 2, "dp": 2, "zero": 2}]
)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_rests_is_a_share_of_what_a_host_holds(fields, device):
    plan, facts = Plan.from_dict(fields), ChainFacts()
    topology = Topology.regular(hosts=1, ranks_per_host=4, device=device)
    blueprint = lower(plan, facts.specs(plan), topology, facts.update_spec)
    places = predict_memory(blueprint, facts)
    received = facts.facts(plan).boundary_bytes * (16 // plan.dp) if plan.pp > 1 else 0.0
    held = [each.weights + each.gradients + each.states + each.buffers - received for each in places]
    assert sum(held) * 4 / plan.pp == pytest.approx(blueprint.host_memory.total, rel=1e-9)


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
