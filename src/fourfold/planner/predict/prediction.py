"""Prediction: what a plan will take, with the terms that add up to it.

term    a part of the step: computing, waiting for stages, gradients not hidden behind backward, …
made_with   what priced it: this machine as measured, or a described cluster
Law: the terms of a step add up to its seconds, and the parts of the memory to its bytes.
Law: `decode_prediction(encode_prediction(each)) == each`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from fourfold.plan.decode import DecodeError, from_json
from fourfold.plan.plan import Plan
from fourfold.plan.simulate import TimedAction, Timeline
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
