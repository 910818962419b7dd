"""Laws of the search: what it keeps is what a full enumeration keeps."""

import itertools
import math

from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from fourfold.plan.ask import Ask
from fourfold.plan.check import combination_problems
from fourfold.plan.plan import Plan
from fourfold.planner.predict.prediction import Prediction
from fourfold.planner.search.decision import Progress
from fourfold.planner.search.search import CUT_FIELDS, FRONT_RANGE, search
from fourfold.planner.search.space import groups, variants
from fourfold.words.errors import PlanError
from tests.decide_cases import FakePricing, Model, Rates, make_case, question

ROWS = st.tuples(st.sampled_from([0.5, 1.0, 4.0]), st.sampled_from([1.0, 4.0]), st.sampled_from([0.2, 2.0]))
MODELS = st.builds(Model, st.lists(ROWS, min_size=1, max_size=4).map(tuple), ROWS, ROWS, heads=st.sampled_from([2, 4]))
RATES = st.builds(Rates, *[st.sampled_from([0.02, 0.3, 2.0])] * 2, *[st.sampled_from([0.0, 0.02, 0.3, 2.0])] * 7)
CASES = st.builds(
    make_case,
    devices=st.sampled_from([1, 2, 4, 6]),
    per_host=st.sampled_from([2, 4]),
    batch=st.sampled_from([2, 6, 8]),
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
        "update": st.sampled_from(["after", "in_backward"]),
        "schedule": st.sampled_from(["1f1b", "zero-bubble"]),
    },
).map(lambda fields: Ask(**fields))


def enumerate_all(ask: Ask, pricing: FakePricing) -> dict[Plan, Prediction]:
    """The estimate of every legal plan with even stages."""
    found = {}
    for group in groups(ask, pricing.space):
        for fields in variants(group, ask, pricing.space):
            try:
                plan = Plan.from_dict(fields)
                predicted = pricing.estimate(plan)
            except PlanError:
                continue
            if not combination_problems(plan, clip=pricing.space.clip):
                found[plan] = predicted
    return found


@settings(max_examples=15, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(CASES, RATES, ASKS, st.sampled_from([8.0, 20.0, 60.0, math.inf]), st.sampled_from([1.0, 1.1]))
def test_the_kept_plans_are_those_of_a_full_enumeration(pricing, rates, ask, limit, margin):
    pricing.rates = rates
    fits = {plan: each for plan, each in enumerate_all(ask, pricing).items() if each.memory.total <= limit}
    found = search(question(pricing, ask, limit), margin=margin)
    # Other divisions than the even one can only make the best plan faster.
    even = {each.plan for each in found.kept if each.plan.stages == "even"}
    wanted = {plan for plan, each in fits.items() if each.seconds <= found.best * margin}
    assert even == wanted
    if "stages" in ask.pinned:
        assert math.isclose(found.best, min((each.seconds for each in fits.values()), default=math.inf))


@settings(max_examples=15, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(CASES, ASKS)
def test_what_is_pinned_stays_in_every_plan(pricing, ask):
    plans: list[Plan] = [
        Plan.from_dict(each)
        for group in itertools.islice(groups(ask, pricing.space), 20)
        for each in itertools.islice(variants(group, ask, pricing.space), 20)
    ]
    for plan in plans:
        assert all(getattr(plan, name) == value for name, value in ask.pinned.items())
        assert plan.mesh.size == pricing.space.num_devices


def test_no_plan_of_a_mesh_that_is_too_slow_is_estimated():
    # Facts of activations, which estimates need, take most of the time of a question about a task.
    pricing = make_case(devices=6, per_host=4, batch=8, model=Model(), clip=None)
    pricing.rates = Rates(tensor=20.0)
    progress = Progress()
    found = search(question(pricing, Ask(), progress=progress), margin=1.1)
    slow = [plan for plan in pricing.estimated if pricing.floor(plan) > FRONT_RANGE * found.best * 1.1]
    assert pricing.estimated
    assert slow == []
    assert progress.done == progress.total > 0
    assert progress.best is not None
    assert progress.best.seconds == found.best


def test_a_search_without_time_ends_with_what_is_known_and_counts_what_it_left_out():
    pricing = make_case(devices=4)
    whole = search(question(pricing, Ask()), margin=1.1)
    without_time = question(pricing, Ask(), deadline=0.0)
    late = search(without_time, margin=1.1, best=whole.best)
    assert (late.kept, whole.num_unseen) == ([], 0)
    assert late.num_unseen == len(list(groups(Ask(), pricing.space)))
    first = search(without_time, margin=1.1)  # nothing is known yet: until there is a plan
    assert first.kept
    assert 0 < first.num_unseen < late.num_unseen


def test_what_cut_samples_keep_is_asked_for_only_where_a_plan_may_be_kept():
    # The floors of all cuts are within the margin: sums of gradients, which no floor has, take most of a step.
    pricing = make_case(devices=8, per_host=8, batch=8, model=Model(), clip=1.0)
    pricing.rates = Rates(tensor=0.0, context=0.0, reduce=2.0, gather=2.0)
    ask = Ask(stages="even")
    search(question(pricing, ask), margin=1.1)
    asked, pricing.estimated = pricing.estimated, []
    seconds = {plan: each.seconds for plan, each in enumerate_all(ask, pricing).items()}
    limit = 1.1 * min(seconds[plan] for plan in asked if plan.cp == 1)
    fast = {_cut(plan) for plan, each in seconds.items() if each <= limit}
    assert {_cut(plan) for plan in asked if plan.cp > 1} <= fast


def _cut(plan: Plan) -> tuple[object, ...]:
    return tuple(getattr(plan, name) for name in CUT_FIELDS)
