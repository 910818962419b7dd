"""Prediction: what a plan will take, with the terms that add up to it.

term    a part of the step: computing, waiting for stages, gradients not hidden behind backward, …
made_with   what priced it: this machine as measured, or a described cluster
Law: the terms of a step add up to its seconds, and the parts of the memory to its bytes.
Law: `decode_prediction(encode_prediction(each)) == each`.

place     of the pipeline axis; its first rank stands for all of its ranks
measured  the median cost over the sampled steps, without waits
Law: predicted and measured join by (rank, action); what only one side has is in no row.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from fourfold.plan.decode import DecodeError, from_json
from fourfold.plan.plan import Plan
from fourfold.plan.simulate import TimedAction, Timeline
from fourfold.trace.cost import measure_costs
from fourfold.trace.trace_file import Trace
from fourfold.trace.utilization import CATEGORIES
from fourfold.words.errors import FourfoldError, Problem
from fourfold.words.program import parse_program

# ---- prediction ----------------------------------------------------------------------------------------------------


class StepTerms(NamedTuple):
    """Where the seconds of the slowest rank go.

    compute    forward and backward, collectives inside them excluded
    recompute  forwards that backward computes again
    tensor, context  collectives inside forward and backward
    bubble     waits for other stages, their messages included
    exposed    collectives of the data axis that no computing hides
    update     of the optimizer
    overhead   between actions and around the step
    """

    compute: float
    recompute: float
    tensor: float
    context: float
    bubble: float
    exposed: float
    update: float
    overhead: float

    @property
    def total(self) -> float:
        return sum(self)


class MemoryParts(NamedTuple):
    """Bytes that one rank holds at its peak.

    weights, gradients, states  what rests on the rank; shared memory of a host is divided among its ranks
    activations  of the microbatches in flight
    buffers      gathered weights, received messages, staging
    temporaries  of the segment that holds most
    reserve      context and fragmentation: constants of the machine
    """

    weights: float
    gradients: float
    states: float
    activations: float
    buffers: float
    temporaries: float
    reserve: float

    @property
    def total(self) -> float:
        return sum(self)


@dataclass(frozen=True)
class Prediction:
    """What one step of a plan takes.

    by_stage  the memory of a rank of each place on the pipeline axis
    timeline  by place on the pipeline axis, one rank of each; None: estimated without simulation
    """

    plan: Plan
    terms: StepTerms
    by_stage: tuple[MemoryParts, ...]
    sent_bytes: Mapping[str, float]
    """By axis: bytes that a rank sends in a step, at most."""
    timeline: Timeline | None = None

    @property
    def seconds(self) -> float:
        return self.terms.total

    @property
    def memory(self) -> MemoryParts:
        """Of the place that holds most."""
        return max(self.by_stage, key=lambda parts: parts.total)


# ---- prediction file -----------------------------------------------------------------------------------------------

PREDICTION_VERSION = 1


class PredictionError(FourfoldError):
    """A prediction that cannot be read."""


@dataclass(frozen=True)
class RecordedPrediction:
    """A prediction, and what priced it."""

    prediction: Prediction
    made_with: str


def encode_prediction(recorded: RecordedPrediction) -> bytes:
    """The prediction as the bytes of a file."""
    each = recorded.prediction
    timeline = None if each.timeline is None else {
        str(place): [(str(timed.action), timed.start, timed.end) for timed in actions]
        for place, actions in each.timeline.items()
    }  # fmt: skip
    return msgspec.json.format(
        msgspec.json.encode({
            "fourfold": PREDICTION_VERSION,
            "made_with": recorded.made_with,
            "plan": each.plan.to_toml(),
            "terms": each.terms._asdict(),
            "memory": [parts._asdict() for parts in each.by_stage],
            "sent_bytes": dict(each.sent_bytes),
            "timeline": timeline,
        }),
        indent=1,
    ) + b"\n"  # fmt: skip


def decode_prediction(data: bytes, *, where: str = "prediction.json") -> RecordedPrediction:
    """Read the prediction in a file. Raises PredictionError unless Fourfold wrote it."""
    try:
        document = from_json(data, dict[str, Any])
        timeline = document["timeline"]
        prediction = Prediction(
            Plan.from_toml(document["plan"], where=where),
            StepTerms(**document["terms"]),
            tuple(MemoryParts(**parts) for parts in document["memory"]),
            document["sent_bytes"],
            None if timeline is None else {int(place): _actions(rows) for place, rows in timeline.items()},
        )
        return RecordedPrediction(prediction, document["made_with"])
    except (DecodeError, KeyError, TypeError, ValueError, AttributeError, FourfoldError) as error:
        problem = Problem(f"no prediction of a run ({error})", "the file that fourfold train writes")
        raise PredictionError(problem, where=where) from None


def _actions(rows: list[Any]) -> tuple[TimedAction, ...]:
    """Each row: an action as text, its start, its end."""
    names = " ".join(name for name, _, _ in rows)
    actions = parse_program(f"0: {names}")[0] if rows else ()
    return tuple(TimedAction(action, start, end) for action, (_, start, end) in zip(actions, rows, strict=True))


# ---- Prediction comparison: what was predicted of a step beside what a trace measured, action by action -------------


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
