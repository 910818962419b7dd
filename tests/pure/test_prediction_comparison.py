"""Laws of predicted beside measured: they join by the name of the action, and nothing is made up for either."""

import dataclasses

import pytest

from fourfold.plan.plan import Plan
from fourfold.plan.simulate import TimedAction
from fourfold.planner.predict.prediction import (
    Prediction,
    RecordedPrediction,
    by_category,
    compare_prediction,
    encode_prediction,
    is_of_plan,
    timeline_by_rank,
)
from fourfold.report import run_record
from fourfold.report.page import describe_run
from fourfold.trace.cost import measure_costs
from fourfold.words.program import Action, Verb
from tests.decision_cases import BEST, prediction
from tests.recorded_traces import trace
from tests.report_data import make_run, visible_text

TIMES = (
    (Verb.FORWARD, 0, 0.0, 1.25),
    (Verb.BACKWARD, 0, 1.25, 4.25),
    (Verb.REDUCE, 0, 3.0, 4.0),
    (Verb.UPDATE, 0, 4.25, 5.0),
    (Verb.UPDATE, 7, 5.0, 6.0),  # of a bucket that the run does not have
)


def predicted() -> Prediction:
    """A prediction of two data ranks, of which one place has the times above."""
    actions = tuple(TimedAction(Action(verb, 0, index), start, end) for verb, index, start, end in TIMES)
    return dataclasses.replace(prediction(Plan(dp=2), compute=6000.0), timeline={0: actions})


def test_predicted_and_measured_join_by_rank_and_action():
    rows = {each.action: each for each in compare_prediction(trace(), predicted())}
    assert list(rows) == ["F0.0", "B0.0", "R0.0", "U0.0"]
    costs = measure_costs(trace())
    for row in rows.values():
        assert row.rank == 0
        assert row.measured == costs.seconds[0, row.action]
    assert (rows["F0.0"].predicted, rows["F0.0"].measured) == (1.25, 1.0)


def test_kinds_of_actions_are_sums_of_their_actions():
    rows = compare_prediction(trace(), predicted())
    kinds = by_category(rows)
    assert sum(each.predicted for each in kinds) == pytest.approx(sum(each.predicted for each in rows))
    assert sum(each.measured for each in kinds) == pytest.approx(sum(each.measured for each in rows))
    assert [each.category for each in kinds] == ["forward", "backward", "reduce", "update"]


def test_the_first_rank_of_a_place_stands_for_it():
    plan = Plan(pp=2, dp=3)
    both = dataclasses.replace(prediction(plan), timeline={0: (), 1: ()})
    assert list(timeline_by_rank(both)) == [0, 3]


def test_a_prediction_of_another_plan_is_not_shown():
    assert is_of_plan(BEST, {"version": 1, "dp": 4, "zero": 1})
    assert not is_of_plan(BEST, {"version": 1, "dp": 4})


def test_the_report_sets_predicted_beside_measured(tmp_path):
    run = make_run(tmp_path / "run")
    plan = Plan.from_toml((run / "plan.toml").read_text())
    without = visible_text(describe_run(run_record.read_run(run)))
    assert "predicted" not in without.lower()
    recorded = RecordedPrediction(dataclasses.replace(predicted(), plan=plan), "this machine, as measured")
    (run / "prediction.json").write_bytes(encode_prediction(recorded))
    record = dataclasses.replace(run_record.read_run(run), trace=trace())
    text = visible_text(describe_run(record))
    assert "One step, predicted and measured" in text
    assert "with this machine, as measured" in text
    for cell in ("1250.000", "1000.000", "+250.000"):
        assert cell in text
    other = dataclasses.replace(recorded, prediction=dataclasses.replace(recorded.prediction, plan=Plan(dp=64)))
    (run / "prediction.json").write_bytes(encode_prediction(other))
    assert "predicted" not in visible_text(describe_run(run_record.read_run(run))).lower()
