"""Laws of the planner with the real prediction: what it keeps, what it answers, and how estimates compare."""

import dataclasses
import itertools
import math

import pytest
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st

from fourfold.plan.ask import Ask
from fourfold.plan.check import combination_problems, model_trait_problems
from fourfold.plan.model_traits import ModelTraits
from fourfold.plan.plan import Plan
from fourfold.planner.predict.clusters import Cluster, ProductEfficiency, Tier
from fourfold.planner.predict.prediction import Prediction
from fourfold.planner.search.answer import best_baseline_on, decide
from fourfold.planner.search.decision import Decision
from fourfold.planner.search.search import PREDICTION_ERROR, Question, search
from fourfold.planner.search.space import Space, groups, make_space, variants
from fourfold.planner.search.step_pricing import StepPricing
from fourfold.words.errors import PlanError
from tests.planner_cases import ChainFacts, LinearPrices, dearer

NETWORK = Tier(1e-4, 1e7)
SMALL = Cluster(
    "small", "cuda", 2, 2, 1e9, {"float32": 1e9}, 1e9, ProductEfficiency(1.0, 0.0), Tier(1e-5, 1e8), NETWORK
)
SOURCES = st.builds(
    ChainFacts,
    num_blocks=st.integers(1, 5),
    width=st.just(16),
    batch_size=st.sampled_from([4, 8]),
    tokens=st.sampled_from([8, 64]),
    end_factor=st.sampled_from([0.25, 2.0]),
    has_bare_blocks=st.booleans(),
)
PRICES = st.builds(
    LinearPrices,
    flops=st.sampled_from([1e7, 1e9]),
    bandwidth=st.sampled_from([1e7, 1e9]),
    latency=st.sampled_from([1e-6, 1e-3]),
    network_bandwidth=st.sampled_from([1e6, 1e8]),
    action_seconds=st.sampled_from([0.0, 1e-4]),
    overlap_slowdown=st.sampled_from([1.0, 1.2]),
)
ASKS = st.fixed_dictionaries(
    {},
    optional={
        "tp": st.sampled_from([1, 2]),
        "zero": st.sampled_from([0, 1, 2, 3]),
        "recompute": st.sampled_from(["none", "full"]),
        "update": st.sampled_from(["after", "in_backward"]),
        "schedule": st.sampled_from(["1f1b", "interleaved", "zero-bubble"]),
    },
).map(lambda fields: Ask(**fields))
RATE_NAMES = [field.name for field in dataclasses.fields(LinearPrices)]
FEW = settings(max_examples=8, deadline=None, phases=[Phase.explicit, Phase.generate])  # to shrink takes minutes


def space_of(source: ChainFacts, cluster: Cluster = SMALL) -> Space:
    return make_space(
        source.facts(Plan()),
        num_devices=cluster.num_devices,
        devices_per_host=cluster.devices_per_host,
        batch_size=source.batch_size,
        clip=source.update_spec.clip,
    )


def enumerate_all(ask: Ask, pricing: StepPricing, space: Space) -> dict[Plan, Prediction]:
    """The estimate of every legal plan with even stages."""
    found = {}
    for group in groups(ask, space):
        for fields in variants(group, ask, space):
            plan = Plan.from_dict(fields)
            if combination_problems(plan, clip=space.clip):
                continue
            try:
                found[plan] = pricing.estimate(plan)
            except PlanError:
                continue
    return {plan: each for plan, each in found.items() if not pricing.problems(plan)}


def try_decide(ask: Ask, source: ChainFacts, prices: LinearPrices, error: float = 0.0) -> Decision | None:
    """None: nothing fits."""
    try:
        return decide(ask, source, prices, SMALL, error=error)
    except PlanError:
        return None


@FEW
@given(SOURCES, PRICES, ASKS, st.sampled_from([0.3, 0.6, 1.5]), st.sampled_from([1.0, 1.1]))
def test_the_optimum_is_that_of_a_full_enumeration(source, prices, ask, fraction, margin):
    pricing, space = StepPricing(source, prices, SMALL), space_of(source)
    everything = enumerate_all(ask, pricing, space)
    assume(everything)
    limit = fraction * max(each.memory.total for each in everything.values())
    fits = {plan: each for plan, each in everything.items() if each.memory.total <= limit}
    found = search(Question(ask, space, pricing, limit), margin=margin)
    even = {each.plan for each in found.kept if each.plan.stages == "even"}
    assert even == {plan for plan, each in fits.items() if each.seconds <= found.best * margin}
    assert found.best <= min((each.seconds for each in fits.values()), default=math.inf)


@FEW
@given(SOURCES, PRICES, ASKS)
def test_no_plan_is_estimated_or_simulated_below_its_floor(source, prices, ask):
    pricing, space = StepPricing(source, prices, SMALL), space_of(source)
    for index, (plan, estimated) in enumerate(enumerate_all(ask, pricing, space).items()):
        assert estimated.seconds >= pricing.floor(plan) * (1 - 1e-9)
        if index % 50 == 0:
            assert pricing.simulate(plan).seconds >= pricing.floor(plan) * (1 - 1e-9)


@FEW
@given(SOURCES, PRICES, ASKS, st.sampled_from([0.0, 0.05]))
def test_the_answer_keeps_what_is_pinned_and_is_no_slower_than_a_baseline(source, prices, ask, error):
    decision = try_decide(ask, source, prices, error)
    assume(decision is not None)
    assert decision is not None
    assert all(getattr(decision.answer.plan, name) == value for name, value in ask.pinned.items())
    assert decision.answer.plan.mesh.size == 4
    assert decision.answer.timeline is not None
    fitting = [each for each in decision.baselines.values() if isinstance(each, Prediction)]
    assert all(decision.answer.seconds <= each.seconds for each in fitting)


@FEW
@given(SOURCES, PRICES, ASKS, st.floats(0.2, 0.9))
def test_more_memory_never_gives_a_slower_answer(source, prices, ask, fraction):
    enough = try_decide(ask, source, prices)
    assume(enough is not None)
    assert enough is not None
    memory = max(1, int(fraction * enough.answer.memory.total))
    less = try_decide(ask.with_changes(memory=memory), source, prices)
    if less is not None:
        # Beyond what the estimate hides, which the decision says.
        assert enough.fastest.seconds <= less.fastest.seconds * (1 + enough.bound + 1e-9)


@FEW
@given(SOURCES, PRICES, ASKS, st.sampled_from(RATE_NAMES), st.floats(1.0, 3.0))
def test_a_dearer_action_never_gives_a_faster_answer(source, prices, ask, name, factor):
    before, after = (try_decide(ask, source, each) for each in (prices, dearer(prices, name, factor)))
    assert (before is None) == (after is None)
    if before is not None and after is not None:
        assert after.fastest.seconds >= before.fastest.seconds / (1 + before.bound + 1e-9)


@FEW
@given(
    st.sampled_from(
        [
            ModelTraits(batch_norms=("norm",)),
            ModelTraits(renormalized=("embedding",)),
            ModelTraits(frequency_scaled=("embedding",)),
            ModelTraits(compiled=("block",)),
            ModelTraits(has_own_loss=True),
        ]
    ),
    st.sampled_from([{}, {"batch_norm": "sync"}, {"batch_norm": "local"}]),
    st.sampled_from([4, 6, 7]),
)
def test_no_plan_is_answered_that_a_training_would_refuse(traits, pinned, batch_size):
    source = ChainFacts(num_blocks=4, width=16, batch_size=batch_size, traits=traits)
    decision = try_decide(Ask(**pinned), source, LinearPrices())
    assume(decision is not None)
    assert decision is not None
    priced = [each for each in decision.baselines.values() if isinstance(each, Prediction)]
    for each in (*decision.ranked, *decision.front, *decision.refused, *priced):
        assert not model_trait_problems(each.plan, traits)
        assert batch_size % (each.plan.dp * each.plan.microbatches) == 0


def test_fewer_devices_are_priced_with_what_is_pinned():
    source, free = ChainFacts(num_blocks=1, width=16, batch_size=4), LinearPrices(latency=10.0)
    alone = best_baseline_on(1, Ask(zero=0), source, free, SMALL)
    assert alone is not None
    assert alone.plan.mesh.size == 1
    assert alone.seconds < decide(Ask(zero=0), source, free, SMALL).answer.seconds
    assert best_baseline_on(1, Ask(tp=2), source, free, SMALL) is None
    assert best_baseline_on(2, Ask(tp=2), source, free, SMALL) is not None
    assert best_baseline_on(2, Ask(memory=1), source, free, SMALL) is None


def test_the_error_of_predictions_is_known_where_the_cluster_gives_one():
    source, ask = ChainFacts(num_blocks=2, width=16, batch_size=4), Ask(tp=1, cp=1, zero=0)
    compared = dataclasses.replace(SMALL, prediction_error=0.03)
    never, known = (decide(ask, source, LinearPrices(), each) for each in (SMALL, compared))
    assert (never.is_error_known, never.error) == (False, PREDICTION_ERROR)
    assert (known.is_error_known, known.error) == (True, 0.03)


def test_stages_follow_the_clock_and_not_the_number_of_blocks():
    source = ChainFacts(num_blocks=8, width=16, batch_size=16, tokens=64, end_factor=6.0)
    prices = LinearPrices(flops=1e6, latency=0.0, network_latency=0.0, bandwidth=1e12, network_bandwidth=1e12)
    pins = {"pp": 4, "dp": 1, "tp": 1, "microbatches": 16, "schedule": "1f1b", "recompute": "none"}
    decision = decide(Ask(**pins), source, prices, SMALL, error=0.0)
    even = decide(Ask(**pins, stages="even"), source, prices, SMALL, error=0.0)
    assert decision.fastest.seconds <= even.fastest.seconds
    counts = [each for each in itertools.product(range(1, 6), repeat=4) if sum(each) == 8]
    plans = [Plan.from_dict({**pins, "stages": ",".join(map(str, each))}) for each in counts]
    pricing = StepPricing(source, prices, SMALL)
    best = min(pricing.simulate(plan).seconds for plan in plans)
    assert decision.fastest.seconds == pytest.approx(best)


def test_more_devices_than_the_cluster_has_hosts_for_are_refused():
    with pytest.raises(PlanError, match="devices"):
        decide(Ask(devices=3), ChainFacts(), LinearPrices(), SMALL)
    assert decide(Ask(devices=2), ChainFacts(), LinearPrices(), SMALL).answer.plan.mesh.size == 2
    assert decide(Ask(devices=8), ChainFacts(), LinearPrices(), SMALL).answer.plan.mesh.size == 8
