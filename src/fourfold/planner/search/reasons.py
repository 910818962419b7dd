"""Reasons: what one plan saves against another, by the terms of a step.

saving  of a term: the other plan's seconds less the plan's own; negative: the plan spends more there
Law: the savings of two plans add up to the difference of their steps.
"""

from typing import NamedTuple

from fourfold.planner.predict.prediction import Prediction, StepTerms
from fourfold.words.units import format_three_digits

TERM_TEXTS = {
    "compute": "computing",
    "recompute": "computing activations again",
    "tensor": "collectives of tensor ranks",
    "context": "messages of context ranks",
    "bubble": "waits for other stages",
    "exposed": "gradients and weights that no computing hides",
    "update": "the update",
    "overhead": "time around actions",
}


class Saving(NamedTuple):
    """Of one term, in seconds."""

    term: str
    seconds: float


def savings(plan: Prediction, other: Prediction) -> tuple[Saving, ...]:
    """What a plan saves against another one, the largest saving first."""
    pairs = zip(StepTerms._fields, plan.terms, other.terms, strict=True)
    return tuple(sorted((Saving(term, theirs - own) for term, own, theirs in pairs), key=lambda each: -each.seconds))


def reason(plan: Prediction, other: Prediction) -> str:
    """Why a plan is faster than another, in one line, such as "3.2 s less: 4.0 s of waits for other stages"."""
    saved = savings(plan, other)
    most, least = saved[0], saved[-1]
    difference = other.seconds - plan.seconds
    if most.seconds <= 0.0 or difference <= 0.0:
        return f"{_seconds(-difference)} more" if difference < 0.0 else "as fast"
    text = f"{_seconds(difference)} less: {_seconds(most.seconds)} less of {TERM_TEXTS[most.term]}"
    if least.seconds < -0.1 * most.seconds:
        text += f", {_seconds(-least.seconds)} more of {TERM_TEXTS[least.term]}"
    return text


def _seconds(value: float) -> str:
    if value >= 1.0:
        return f"{format_three_digits(value)} s"
    return f"{format_three_digits(value * 1e3)} ms" if value >= 1e-3 else f"{format_three_digits(value * 1e6)} µs"
