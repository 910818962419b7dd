"""A calibration that the trace of a run refines."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold.plan.lowering import lower
from fourfold.plan.plan import Plan
from fourfold.plan.predict.calibrated_prices import CalibratedPrices
from fourfold.plan.predict.calibration import Calibration, CalibrationError
from fourfold.plan.predict.prediction import Prediction
from fourfold.plan.predict.refinement import measure_ratios, refine
from fourfold.plan.predict.step import predict_step
from fourfold.plan.topology import Topology
from fourfold.plan.trace_file import Event, Trace
from fourfold.plan.update_spec import UpdateSpec
from fourfold.words.program import Verb
from fourfold.words.trace_events import COMPUTE_LANE, REDUCE_LANE
from tests.planner_cases import ChainFacts
from tests.pure.test_calibration import calibration, record

FACTORS = {"F": 1.2, "B": 1.5, "U": 0.8}
DATA, TENSOR = Plan(dp=2), Plan(tp=2)


def calibrated() -> Calibration:
    return dataclasses.replace(calibration(record(DATA), record(TENSOR)), between_actions=0.0, around_step=0.0)


def predict(plan: Plan, of: Calibration) -> Prediction:
    facts = ChainFacts(update_spec=UpdateSpec(optimizer="AdamW", num_states=(2,)))
    blueprint = lower(plan, facts.specs(plan), Topology.regular(hosts=1, ranks_per_host=2), facts.update_spec)
    return predict_step(blueprint, facts, CalibratedPrices(of))


def trace_of(predicted: Prediction, factors: dict[str, float]) -> Trace:
    """Two ranks that ran what was predicted, some verbs slower or faster; nothing waits."""
    assert predicted.timeline is not None
    timed = predicted.timeline[0]
    events, now = [], 0.0
    for each in timed:
        seconds = (each.end - each.start) * factors.get(each.action.verb.value, 1.0)
        lane = REDUCE_LANE if each.action.verb == Verb.REDUCE else COMPUTE_LANE
        events.append(Event(0, 1, str(each.action), lane, now, now + seconds))
        now += seconds
    program = tuple(each.action for each in timed)
    both = tuple(each._replace(rank=rank) for rank in range(2) for each in events)
    return Trace({0: program, 1: program}, both, predicted.plan.mesh)


def test_the_ratios_are_those_of_the_trace():
    predicted = predict(DATA, calibrated())
    ratios = measure_ratios(trace_of(predicted, FACTORS), predicted)
    assert tuple(ratios) == pytest.approx((1.2, 1.5, 0.8))


@given(st.floats(0.6, 1.9), st.floats(0.6, 1.9), st.floats(0.6, 1.9))
def test_a_plan_is_predicted_as_its_trace_was(forward: float, backward: float, update: float):
    before = predict(DATA, calibrated())
    trace = trace_of(before, {"F": forward, "B": backward, "U": update})
    after = predict(DATA, refine(calibrated(), trace, before).calibration)
    ratios = measure_ratios(trace, after)
    assert ratios.forward == pytest.approx(1.0, abs=1e-3)  # the ends are priced by their operations
    assert ratios.update == pytest.approx(1.0)
    # A backward also stores gradients, whose price a trace does not tell apart.
    assert abs(ratios.backward - 1.0) <= abs(backward - 1.0) + 1e-9


def test_other_cuts_stay_as_they_were_measured():
    before = predict(DATA, calibrated())
    refined = refine(calibrated(), trace_of(before, FACTORS), before).calibration
    assert refined.segments[1] == calibrated().segments[1]
    assert refined.segments[0] != calibrated().segments[0]
    assert refined.collectives == calibrated().collectives


def test_a_trace_of_another_plan_is_refused():
    before = predict(Plan(pp=2, microbatches=4), calibrated())
    other = predict(DATA, calibrated())
    with pytest.raises(CalibrationError, match="program"):
        measure_ratios(trace_of(before, {}), other)


def test_a_trace_that_contradicts_the_calibration_is_refused_with_all_its_ratios():
    before = predict(DATA, calibrated())
    with pytest.raises(CalibrationError) as raised:
        refine(calibrated(), trace_of(before, {"F": 3.0, "U": 0.1}), before)
    assert [problem.got.split()[1] for problem in raised.value.problems] == ["forward", "update"]
