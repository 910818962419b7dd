"""Decision: the answer to an ask, and everything that is needed to say why.

baseline   a plan that an expert would write without a search; what a field is left open in it, is the best there
refused    a plan that cannot be carried out, does not fit, or has not what the ask pins
change     of one field, of `devices` or of `memory`: with it, a refused plan would fit
Law: nothing in a decision is slower than predicted of it, and the answer is not slower than any baseline that fits.

saving  of a term: the other plan's seconds less the plan's own; negative: the plan spends more there
Law: the savings of two plans add up to the difference of their steps.
best  the fastest plan so far that fits and has what the ask pins, as estimated or simulated
Law: nothing here changes the answer.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from fourfold.plan.plan import Plan
from fourfold.planner.predict.prediction import Prediction, StepTerms
from fourfold.words.errors import Problem
from fourfold.words.units import format_step_seconds


@dataclass(frozen=True)
class Change:
    """What would make a refused plan fit.

    field, value  of a plan; or "devices"; or "memory", in bytes
    prediction    of the changed plan; None: it is the same plan, with more memory
    """

    field: str
    value: object
    prediction: Prediction | None = None


@dataclass(frozen=True)
class Refused:
    """A plan that is not to be had.

    problems    why it cannot be carried out, or differs from what the ask pins; empty: it does not fit
    prediction  what it would take; None: it cannot be carried out
    limit_bytes  what a rank may hold
    changes     the nearest that fit, at most one of a field, one of `memory` and one of `devices`
    """

    plan: Plan
    limit_bytes: float
    problems: tuple[Problem, ...] = ()
    prediction: Prediction | None = None
    changes: tuple[Change, ...] = ()

    @property
    def excess_bytes(self) -> float:
        """What a rank would hold beyond the limit; 0: it fits."""
        return 0.0 if self.prediction is None else max(0.0, self.prediction.memory.total - self.limit_bytes)


@dataclass(frozen=True)
class Decision:
    """What was found.

    ranked          simulated plans that fit: the answer, then the others by their seconds
    baselines       by name
    refused         the fastest plans that do not fit
    front           estimated plans of which none is slower and holds more than another, fastest first
    error           predictions that are closer than this fraction count as equal
    is_error_known  predictions for this machine were compared with runs, and miss by about as much
    bound           no plan that was only estimated is faster than the fastest simulated one by more than this fraction,
                    provided that the estimate is as good for it as for the simulated ones
    num_considered  plans that were estimated
    num_unseen      groups of plans that the search had no time for
    fewer           the best baseline on fewer devices, by their number, where one fits and has what the ask pins
    host_order      the hosts, by index, in the order in which the answer's ranks are numbered; empty: hosts are equal
    """

    ranked: tuple[Prediction, ...]
    baselines: Mapping[str, Prediction | Refused]
    refused: tuple[Refused, ...]
    front: tuple[Prediction, ...]
    error: float
    bound: float
    num_considered: int
    num_unseen: int = 0
    host_order: tuple[int, ...] = ()
    is_error_known: bool = False
    fewer: Mapping[int, Prediction] = field(default_factory=dict)

    @property
    def answer(self) -> Prediction:
        return self.ranked[0]

    @property
    def fastest(self) -> Prediction:
        return min(self.ranked, key=lambda prediction: prediction.seconds)

    @property
    def equals(self) -> tuple[Prediction, ...]:
        """The plans that are called equal: as fast as the fastest one, within the error."""
        limit = self.fastest.seconds * (1 + self.error)
        return tuple(prediction for prediction in self.ranked if prediction.seconds <= limit)


# ---- Reasons: what one plan saves against another, by the terms of a step -------------------------------------------

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
        return f"{format_step_seconds(-difference)} more" if difference < 0.0 else "as fast"
    text = (
        f"{format_step_seconds(difference)} less: {format_step_seconds(most.seconds)} less of {TERM_TEXTS[most.term]}"
    )
    if least.seconds < -0.1 * most.seconds:
        text += f", {format_step_seconds(-least.seconds)} more of {TERM_TEXTS[least.term]}"
    return text


# ---- Progress: how far a decision is. The planner writes it; who waits for the answer reads it, from another thread -


@dataclass
class Progress:
    """doing: for people; empty: nothing is to be shown. `total`: steps of it; 0: their number is not known."""

    doing: str = ""
    done: int = 0
    total: int = 0
    best: Prediction | None = None

    def begin(self, doing: str, total: int = 0) -> None:
        self.doing, self.done, self.total = doing, 0, total

    def offer(self, found: Prediction) -> None:
        """A plan that may be the best so far."""
        if self.best is None or found.seconds < self.best.seconds:
            self.best = found
