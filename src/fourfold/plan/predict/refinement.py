"""Refinement: what a run's trace says about a calibration.

ratio  seconds that forwards, backwards or updates of the run took, over those that were predicted for them
Law: refined by a trace, a calibration predicts for the same plan the seconds that the trace has, and its other cuts
stay as they were measured.
"""

import dataclasses
from typing import NamedTuple

from fourfold.plan.cost import measure_costs
from fourfold.plan.predict.calibration import Calibration, CalibrationError, Cut, SegmentRecord
from fourfold.plan.predict.prediction import Prediction
from fourfold.plan.trace_file import Trace
from fourfold.words.errors import Problem
from fourfold.words.program import Verb

MOST = 2.0
"""A ratio above it, or below its inverse, is not of this machine, or not of a quiet one."""
PASSES: dict[str, tuple[Verb, ...]] = {
    "forward": (Verb.FORWARD,),
    "backward": (Verb.BACKWARD, Verb.BACKWARD_INPUT, Verb.BACKWARD_WEIGHT),
    "update": (Verb.UPDATE,),
}


class Ratios(NamedTuple):
    """Seconds in the trace over those predicted; 1 where the trace has none."""

    forward: float
    backward: float
    update: float


class Refined(NamedTuple):
    """The refined calibration, and by how much its seconds changed."""

    calibration: Calibration
    ratios: Ratios


def measure_ratios(trace: Trace, predicted: Prediction) -> Ratios:
    """Of a run's trace, and of the prediction for its plan. Raises CalibrationError for another plan."""
    costs = measure_costs(trace).seconds
    assert predicted.timeline is not None, "predictions that are simulated have a timeline"
    expected = {str(timed.action): timed.end - timed.start for each in predicted.timeline.values() for timed in each}
    if unknown := sorted({name for _, name in costs} - set(expected)):
        got = f"a trace with {', '.join(unknown[:3])}"
        need = "the program of the plan that was predicted"
        raise CalibrationError(Problem(got, need, "the trace of a run with this plan"), where="the trace")
    ratios = {}
    for kind, verbs in PASSES.items():
        own = {key: value for key, value in costs.items() if key[1][0] in verbs}
        total = sum(expected[name] for _, name in own)
        ratios[kind] = sum(own.values()) / total if total else 1.0
    return Ratios(**ratios)


def refine(calibration: Calibration, trace: Trace, predicted: Prediction) -> Refined:
    """The calibration with the seconds that a trace has, for segments that are cut as in its plan.

    predicted  for the plan of the trace, from this calibration
    Raises CalibrationError if the trace is of another plan, or contradicts the calibration.
    """
    ratios = measure_ratios(trace, predicted)
    problems = [
        Problem(f"a {kind} of {ratio:.2f} × what was measured", f"at most {MOST:g} × more or less", "measure again")
        for kind, ratio in ratios._asdict().items()
        if not 1 / MOST <= ratio <= MOST
    ]
    if problems:
        raise CalibrationError(problems, where="the trace")
    cut, is_divided = Cut.of(predicted.plan), predicted.plan.divides_backward
    segments = tuple(
        _scaled(each, ratios) if each.cut == cut and (each.second_half is not None) is is_divided else each
        for each in calibration.segments
    )
    updates = {name: curve.times(ratios.update) for name, curve in calibration.updates.items()}
    return Refined(dataclasses.replace(calibration, segments=segments, updates=updates), ratios)


def _scaled(record: SegmentRecord, ratios: Ratios) -> SegmentRecord:
    half = record.second_half
    return dataclasses.replace(
        record,
        forward=record.forward.times(ratios.forward),
        backward=record.backward.times(ratios.backward),
        second_half=None if half is None else half.times(ratios.backward),
    )
