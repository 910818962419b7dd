"""Prediction file: what a run was predicted to take, in its folder, so that its report can set it beside the measured.

made_with   what priced it: this machine as measured, or a described cluster
Law: `decode_prediction(encode_prediction(each)) == each`.
"""

from dataclasses import dataclass
from typing import Any

import msgspec

from fourfold.plan.decode import DecodeError, from_json
from fourfold.plan.plan import Plan
from fourfold.plan.predict.prediction import MemoryParts, Prediction, StepTerms
from fourfold.plan.simulate import TimedAction
from fourfold.words.errors import FourfoldError, Problem
from fourfold.words.program import parse_program

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
