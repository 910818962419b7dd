"""Laws of the search over single layers: it never loses, it ends, and on small spaces it finds what is best."""

import itertools
import math

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from fourfold.axes.tensor.rules.dims import marked_dims
from fourfold.plan.ask import Ask
from fourfold.plan.plan import Plan
from fourfold.planner.search.answer import decide_among
from fourfold.planner.search.layers import search_layers
from tests.decide_cases import Model, Rates, make_case, question

MODEL = Model(
    ((1.0, 4.0, 1.0), (8.0, 1.0, 1.0), (1.0, 4.0, 1.0), (2.0, 8.0, 1.0), (1.0, 1.0, 1.0)), dims=("heads", "mlp")
)
DIMS = dict.fromkeys(MODEL.dims, True)
PINNED = {"pp": 2, "dp": 1, "cp": 1, "tp": 2, "zero": 0, "recompute": "none", "microbatches": 4}
PINNED |= {"sequence_parallel": False, "update": "after", "schedule": "1f1b", "interleave": 1}
PINNED |= {"max_in_flight": None, "shard": None}


@pytest.mark.parametrize("tensor", [0.0, 0.4, 3.0])
def test_it_finds_the_best_stages_and_dims_of_a_small_model(tensor):
    pricing = make_case(devices=4, model=MODEL)
    pricing.rates = Rates(tensor=tensor)
    start = pricing.estimate(Plan.from_dict(PINNED))
    texts = [f"{count},{5 - count}" for count in range(1, 5)]
    dims = ["", "heads:tp", "mlp:tp", "heads:tp mlp:tp"]
    plans = [Plan.from_dict({**PINNED, "stages": s, "dims": d}) for s, d in itertools.product(texts, dims)]
    best = min(pricing.estimate(plan).seconds for plan in plans)
    found = search_layers([start], question(pricing, Ask(**PINNED), dims=DIMS), budget=200, seed=3)
    assert found[-1].seconds == pytest.approx(best)
    assert best < start.seconds


@settings(max_examples=12, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(
    st.integers(0, 99),
    st.sampled_from([0.0, 0.3, 3.0]),
    st.sampled_from([40.0, math.inf]),
    st.sampled_from([{}, {"tp": 2}, {"microbatches": 4}, {"recompute": "none"}]),
)
def test_it_is_not_slower_than_its_starts_and_depends_on_the_seed_alone(seed, rate, limit, pins):
    pricing = make_case(devices=4, model=MODEL)
    pricing.rates = Rates(tensor=rate, context=rate)
    plans = [Plan(dp=2, tp=2, zero=3, microbatches=4), Plan(pp=2, tp=2, microbatches=4)]
    starts = [found for plan in plans if (found := pricing.estimate(plan)).memory.total <= limit]
    ask = Ask(**pins)
    asked = question(pricing, ask, limit, dims=DIMS)
    first, again = (search_layers(starts, asked, budget=80, seed=seed) for _ in range(2))
    assert [each.plan for each in first] == [each.plan for each in again]
    assert first[-1].seconds <= min(each.seconds for each in starts)
    for each in first[1:]:
        assert each.memory.total <= limit
        assert not pricing.problems(each.plan)
        assert all(getattr(each.plan, name) == value for name, value in pins.items())
        assert each.plan.mesh.size == 4


def test_what_is_pinned_does_not_move():
    pricing = make_case(devices=4, model=MODEL)
    start = pricing.estimate(Plan.from_dict({**PINNED, "stages": "1,4"}))
    found = search_layers([start], question(pricing, Ask(**PINNED, stages="1,4", dims=""), dims=DIMS), budget=100)
    assert found == (start,)


def test_it_ends_when_half_of_the_budget_brings_nothing():
    pricing = make_case(devices=1, model=Model())
    start = pricing.estimate(Plan())
    pricing.estimated.clear()
    fixed = dict.fromkeys(("zero", "update", "recompute"))
    ask = Ask(**{name: getattr(Plan(), name) for name in fixed})
    search_layers([start], question(pricing, ask), budget=100)
    assert len(pricing.estimated) <= 51


def test_a_planner_that_searches_layers_is_not_slower_than_without():
    pricing = make_case(devices=4, model=MODEL)
    pricing.rates = Rates(tensor=0.6)
    ask = Ask(**{**PINNED, "stages": "even"})
    plain = decide_among(question(pricing, ask.with_changes(dims=""), error=0.0))
    searched = decide_among(question(pricing, ask, dims=DIMS, error=0.0))
    assert searched.answer.seconds < plain.answer.seconds
    assert searched.answer.plan.dims


def test_the_dims_of_rules_say_which_are_split_by_default():
    rules = {"*.up": "mlp:tp, model", "*.down": "model, mlp:tp", "head": "vocab, model", "*.norm": "replicated"}
    assert marked_dims(rules) == {"mlp": True, "model": False, "vocab": False}
