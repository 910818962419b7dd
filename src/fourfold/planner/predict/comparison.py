"""Prediction comparison: what was predicted of a step beside what a trace measured, action by action.

place     of the pipeline axis; its first rank stands for all of its ranks
measured  the median cost over the sampled steps, without waits
Law: predicted and measured join by (rank, action); what only one side has is in no row.
"""

from collections.abc import Mapping
from typing import NamedTuple

from fourfold.plan.simulate import Timeline
from fourfold.planner.predict.prediction import Prediction
from fourfold.trace.cost import measure_costs
from fourfold.trace.step_breakdown import CATEGORIES
from fourfold.trace.trace_file import Trace


class ActionDifference(NamedTuple):
    """An action of a rank, in seconds."""

    rank: int
    action: str
    category: str
    predicted: float
    measured: float


class CategoryDifference(NamedTuple):
    """All actions of a kind: seconds of a step, means over the ranks that were compared."""

    category: str
    predicted: float
    measured: float


def timeline_by_rank(prediction: Prediction) -> Timeline:
    """The predicted timeline with the first rank of each place in place of its number."""
    mesh = prediction.plan.mesh
    timeline = prediction.timeline or {}
    return {mesh.rank_at({"pp": place}): actions for place, actions in timeline.items()}


def compare_prediction(trace: Trace, prediction: Prediction) -> list[ActionDifference]:
    """The actions of the first rank of each place, in the order in which they were predicted."""
    costs = measure_costs(trace)
    return [
        ActionDifference(
            rank,
            str(timed.action),
            CATEGORIES[timed.action.verb],
            timed.end - timed.start,
            costs.seconds[rank, str(timed.action)],
        )
        for rank, actions in timeline_by_rank(prediction).items()
        for timed in actions
        if (rank, str(timed.action)) in costs.seconds
    ]


def by_category(differences: list[ActionDifference]) -> list[CategoryDifference]:
    """The differences, summed by kind of action."""
    num_ranks = max(1, len({each.rank for each in differences}))
    sums: dict[str, tuple[float, float]] = {}
    for each in differences:
        predicted, measured = sums.get(each.category, (0.0, 0.0))
        sums[each.category] = predicted + each.predicted, measured + each.measured
    return [
        CategoryDifference(name, predicted / num_ranks, measured / num_ranks)
        for name, (predicted, measured) in sums.items()
    ]


def is_of_plan(prediction: Prediction, fields: Mapping[str, object]) -> bool:
    """Whether a prediction is of the plan with these fields, the rest at their defaults."""
    return prediction.plan == type(prediction.plan).from_dict(
        {name: value for name, value in fields.items() if name != "version"}, where="the plan of the run"
    )
