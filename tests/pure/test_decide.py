"""Laws of the planner: what is asked stays, more memory and cheaper actions never hurt, and no baseline is better."""

import dataclasses
import math

import pytest
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st

from fourfold.plan.ask import Ask
from fourfold.plan.plan import Plan
from fourfold.planner.predict.prediction import Prediction
from fourfold.planner.search.answer import MAX_SIMULATED, choose, decide_among, simplicity
from fourfold.planner.search.baselines import price_baselines
from fourfold.planner.search.decision import Decision, Refused, reason, savings
from fourfold.planner.search.space import groups, variants
from fourfold.words.errors import PlanError
from tests.decide_cases import FakePricing, Model, Rates, make_case, question

ROWS = st.tuples(st.sampled_from([0.5, 1.0, 4.0]), st.sampled_from([1.0, 4.0]), st.sampled_from([0.2, 2.0]))
MODELS = st.builds(Model, st.lists(ROWS, min_size=1, max_size=4).map(tuple), ROWS, ROWS, heads=st.just(4))
PRICES = st.sampled_from([0.0, 0.02, 0.3, 2.0])
RATES = st.builds(Rates, *[st.sampled_from([0.02, 0.3, 2.0])] * 2, *[PRICES] * 7)  # a step takes some time
CASES = st.builds(
    make_case,
    devices=st.sampled_from([1, 2, 4]),
    per_host=st.sampled_from([2, 4]),
    batch=st.sampled_from([4, 6]),
    model=MODELS,
    clip=st.sampled_from([None, 1.0]),
)
ASKS = st.fixed_dictionaries(
    {},
    optional={
        "pp": st.sampled_from([1, 2]),
        "tp": st.sampled_from([1, 2]),
        "zero": st.sampled_from([0, 1, 3]),
        "recompute": st.sampled_from(["none", "full"]),
        "stages": st.just("even"),
        "microbatches": st.sampled_from([1, 2]),
        "update": st.sampled_from(["after", "in_backward"]),
        "schedule": st.sampled_from(["1f1b", "interleaved", "zero-bubble"]),
    },
).map(lambda fields: Ask(**fields))
RATE_NAMES = [field.name for field in dataclasses.fields(Rates)]
LIMITS = st.sampled_from([15.0, 30.0, 60.0, math.inf])
ERRORS = st.sampled_from([0.0, 0.05, 0.3])
FEW = settings(max_examples=12, deadline=None, phases=[Phase.explicit, Phase.generate])  # to shrink takes minutes


def decide(ask: Ask, pricing: FakePricing, limit: float = math.inf, error: float = 0.05) -> Decision | None:
    """None: nothing is legal, or nothing fits."""
    try:
        return decide_among(question(pricing, ask, limit, error=error))
    except PlanError:
        return None


def fits_model(plan: Plan, pricing: FakePricing) -> bool:
    try:
        pricing.floor(plan)
    except PlanError:
        return False
    return not pricing.problems(plan)


@FEW
@given(CASES, RATES, ASKS, LIMITS, ERRORS)
def test_the_answer_has_what_is_pinned_fits_and_is_no_slower_than_a_baseline(pricing, rates, ask, limit, error):
    pricing.rates = rates
    decision = decide(ask, pricing, limit, error)
    assume(decision is not None)
    assert decision is not None
    for name, value in ask.pinned.items():
        assert getattr(decision.answer.plan, name) == value
    assert decision.answer.memory.total <= limit
    assert decision.answer.plan.mesh.size == pricing.space.num_devices
    comparable = [each for each in decision.baselines.values() if isinstance(each, Prediction)]
    assert all(decision.answer.seconds <= each.seconds for each in comparable)
    assert decision.answer.seconds <= decision.fastest.seconds * (1 + error)
    assert all(
        simplicity(decision.answer.plan) <= simplicity(each.plan)
        for each in decision.equals
        if all(each.seconds <= other.seconds for other in comparable)
    )


@FEW
@given(CASES, RATES, ASKS, st.sampled_from([0.0, 0.05]), st.tuples(LIMITS, LIMITS))
def test_more_memory_never_gives_a_slower_answer(pricing, rates, ask, error, limits):
    pricing.rates = rates
    less, more = (decide(ask, pricing, limit, error) for limit in sorted(limits))
    if less is not None:
        assert more is not None
        assert more.fastest.seconds <= less.fastest.seconds * (1 + 1e-12)
        assert more.answer.seconds <= less.answer.seconds * (1 + error + 1e-12)


@FEW
@given(CASES, RATES, ASKS, st.sampled_from([0.0, 0.05]), st.sampled_from(RATE_NAMES), st.floats(0.0, 2.0))
def test_a_dearer_action_never_gives_a_faster_answer(pricing, rates, ask, error, name, more):
    pricing.rates = rates
    before = decide(ask, pricing, error=error)
    pricing.rates = dataclasses.replace(rates, **{name: getattr(rates, name) + more})
    after = decide(ask, pricing, error=error)
    if before is not None:
        assert after is not None
        assert after.fastest.seconds >= before.fastest.seconds * (1 - 1e-12)
        assert after.answer.seconds * (1 + error + 1e-12) >= before.answer.seconds


@FEW
@given(CASES, RATES, st.sampled_from([0.02, 0.08]))
def test_the_error_of_the_estimate_hides_no_plan_beyond_the_bound(pricing, rates, wobble):
    pricing.rates, pricing.wobble = rates, wobble
    ask = Ask(stages="even")
    decision = decide(ask, pricing, error=0.0)
    assert decision is not None
    seen = set(pricing.simulated)
    # One device has plans for several among its baselines, such as zero 3, which are no answers to this ask.
    everything = [each for group in groups(ask, pricing.space) for each in variants(group, ask, pricing.space)]
    legal = [plan for plan in map(Plan.from_dict, everything) if fits_model(plan, pricing)]
    truth = min(pricing.simulate(plan).seconds for plan in legal)
    ratio = min(pricing.simulate(plan).seconds / pricing.estimate(plan).seconds for plan in seen)
    if len(seen) < MAX_SIMULATED:
        known = [pricing.estimate(plan).seconds for plan in seen]
        unseen = [pricing.estimate(plan).seconds for plan in set(legal) - seen]
        told_apart = [each for each in unseen if not any(math.isclose(each, other) for other in known)]
        assert all(each * ratio >= decision.fastest.seconds for each in told_apart)
    # No estimate is further above its simulation than those that have been seen, except for what the wobble adds.
    hidden = max(1.0, ratio / (1 - wobble))
    assert decision.fastest.seconds / truth <= (1 + decision.bound) * hidden + 1e-9


def test_the_bound_counts_plans_that_were_left_out():
    pricing = make_case(devices=1)
    pricing.wobble = 0.05
    kept = [pricing.estimate(Plan(microbatches=count)) for count in (1, 2)]
    cutoff = max(each.seconds for each in kept) * 1.001
    exact = question(pricing, Ask(), error=0.0)
    alone, among = choose(kept, [], exact), choose(kept, [], exact, cutoff=cutoff)
    assert alone.bound == 0.0
    ratio = min(1.0, *(pricing.simulate(each.plan).seconds / each.seconds for each in kept))
    fastest = min(each.seconds for each in among.ranked)
    assert among.bound == pytest.approx(max(0.0, fastest / (cutoff * ratio) - 1))
    assert choose(kept, [], exact, cutoff=cutoff / 2).bound > 0.5


def test_baselines_are_always_priced():
    pricing = make_case(devices=8, per_host=4, batch=16, model=Model(((1.0, 4.0, 1.0),) * 8))
    found = price_baselines(question(pricing, Ask()))
    data = {f"data parallelism, zero {zero}": Plan(dp=8, zero=zero) for zero in range(4)}
    assert {name: each.plan for name, each in found.items() if name in data} == data
    meshes = {name: each.plan.mesh for name, each in found.items()}
    assert meshes["tensor parallelism in a node"] == Plan(tp=4, dp=2).mesh
    assert meshes["1F1B alone"] == Plan(pp=8).mesh
    assert meshes["Megatron's layout"] == Plan(tp=4, dp=2).mesh
    # With less memory, Megatron's layout is a pipeline of nodes.
    limit = found["Megatron's layout"].memory.total / 1.6  # type: ignore[union-attr]
    smaller = price_baselines(question(pricing, Ask(), limit))
    assert smaller["Megatron's layout"].plan.mesh == Plan(tp=4, pp=2).mesh
    assert isinstance(smaller["data parallelism, zero 0"], Refused)


def test_baselines_are_what_they_are_called():
    whole = make_case(devices=4, per_host=4, batch=16, model=Model(((1.0, 4.0, 1.0),), heads=1))
    found = price_baselines(question(whole, Ask()))
    refused = found["tensor parallelism in a node"]
    assert isinstance(refused, Refused)
    assert refused.problems
    assert "1F1B alone" not in found
    assert found["Megatron's layout"].plan.mesh == Plan(dp=4).mesh
    alone = make_case(devices=1)
    assert list(price_baselines(question(alone, Ask()))) == ["one device"]


@pytest.mark.parametrize(
    "pinned",
    [
        {"shard": 2},
        {"shard": 2, "zero": 3},
        {"shard": 2, "dp": 4, "tp": 2},  # of no baseline, and with zero = 0, which is tried first, of no plan
        {"ulysses": 2},
        {"schedule": "pipedream", "pp": 2},
    ],
)
def test_an_ask_may_pin_a_field_that_most_baselines_cannot_have(pinned):
    decision = decide(Ask(**pinned), make_case(devices=8 if "tp" in pinned else 4))
    assert decision is not None
    assert {name: getattr(decision.answer.plan, name) for name in pinned} == pinned


def test_a_baseline_that_differs_from_the_ask_is_refused_with_its_price():
    pricing = make_case(devices=4, per_host=4)
    decision = decide(Ask(zero=1, tp=2), pricing)
    assert decision is not None
    plain = decision.baselines["data parallelism, zero 0"]
    assert isinstance(plain, Refused)
    assert {problem.got for problem in plain.problems} == {"zero = 0", "tp = 1", "dp = 4"} - {"dp = 4"}
    assert plain.prediction is not None
    assert plain.prediction.plan == Plan(dp=4)


def test_refused_plans_say_what_would_fit():
    # Much is exposed, so that splitting is slow, and whole states do not fit.
    pricing = make_case(devices=4, per_host=4)
    pricing.rates = Rates(gather=0.5)
    whole = pricing.estimate(Plan(dp=4)).memory.total
    decision = decide(Ask(pp=1, tp=1, cp=1), pricing, limit=whole * 0.7, error=0.0)
    assert decision is not None
    refused = decision.baselines["data parallelism, zero 0"]
    assert isinstance(refused, Refused)
    assert refused.excess_bytes > 0
    changes = {change.field: change for change in refused.changes}
    assert changes["memory"].value >= refused.prediction.memory.total  # type: ignore[operator, union-attr]
    for change in refused.changes:
        if change.prediction is not None:
            assert change.prediction.memory.total <= whole * 0.7
            assert getattr(change.prediction.plan, change.field, change.value) == change.value
    assert {"memory"} < set(changes)


def test_where_nothing_fits_the_error_says_the_least_that_would():
    pricing = make_case(devices=2, per_host=2)
    with pytest.raises(PlanError) as error:
        decide_among(question(pricing, Ask(tp=1, pp=1, cp=1, zero=0), 45.0))
    text = str(error.value)
    assert "no plan fits" in text
    assert "states" in text
    assert "memory = " in text
    assert "zero = " in text
    with pytest.raises(PlanError, match="devices = 4"):
        decide_among(question(pricing, Ask(tp=1, pp=1, cp=1, zero=3), 30.0))


def test_where_nothing_is_legal_the_cause_comes_first_and_each_remedy_once():
    pricing = make_case(devices=8, per_host=8)
    pricing.space = pricing.space._replace(batch_size=7)
    with pytest.raises(PlanError) as error:
        decide_among(question(pricing, Ask(pp=1, cp=1)))
    assert error.value.problems[0].got.startswith("batch_size = 7, dp = 8")
    with pytest.raises(PlanError) as error:
        decide_among(question(pricing, Ask(shard=3)))
    remedies = [each.attempt for each in error.value.problems]
    assert len(set(remedies)) == len(remedies)


def test_savings_add_up_to_the_difference():
    pricing = make_case(devices=4)
    one, other = pricing.estimate(Plan(dp=4)), pricing.estimate(Plan(pp=4, microbatches=4))
    assert sum(each.seconds for each in savings(one, other)) == pytest.approx(other.seconds - one.seconds)
    assert "less of waits for other stages" in reason(one, other)
    assert "more" in reason(other, one)
    assert reason(one, one) == "as fast"
