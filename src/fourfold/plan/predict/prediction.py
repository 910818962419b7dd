"""Prediction: what a plan will take, with the terms that add up to it.

term    a part of the step: computing, waiting for stages, gradients not hidden behind backward, …
gap     a time in which the process computes nothing: it waits for a message, for a collective, or for other stages
tail    from the last action of the process to the end of the step
span    from a rank's first action to its last end: parts, gaps and tail
made_with   what priced it: this machine as measured, or a described cluster
Law: the terms of a step add up to its seconds, and the parts of the memory to its bytes.
Law: `decode_prediction(encode_prediction(each)) == each`.

Ranks do not wait for each other between steps: the step of each begins when its own one before has ended, so a step
takes the longest span. Qi et al. (2401.10241) count their bubbles in the same way.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from fourfold.plan.decode import DecodeError, from_json
from fourfold.plan.plan import Plan
from fourfold.plan.predict.stage_seconds import ZERO, add_terms
from fourfold.plan.rank_program import lane_of
from fourfold.plan.simulate import TimedAction, Timeline
from fourfold.words.errors import FourfoldError, Problem
from fourfold.words.program import Action, Verb, parse_program
from fourfold.words.trace_events import GATHER_LANE, REDUCE_LANE

# ---- step terms ----------------------------------------------------------------------------------------------------


class StepTerms(NamedTuple):
    """Where the seconds of the slowest rank go.

    compute    forward and backward, collectives inside them excluded
    recompute  forwards that backward computes again
    tensor, sequence  collectives inside forward and backward
    bubble     waits for other stages, their messages included
    exposed    collectives of the data axis that no computing hides
    update     of the optimizer
    overhead   between actions and around the step
    """

    compute: float
    recompute: float
    tensor: float
    sequence: float
    bubble: float
    exposed: float
    update: float
    overhead: float

    @property
    def total(self) -> float:
        return sum(self)


RECEIPT_OF = {
    Verb.FORWARD: Verb.RECEIVE_FORWARD,
    Verb.BACKWARD: Verb.RECEIVE_BACKWARD,
    Verb.BACKWARD_INPUT: Verb.RECEIVE_BACKWARD,
}


def first_start(times: Sequence[TimedAction], parts: Mapping[Action, StepTerms]) -> float:
    """When the process begins to be busy, or could: what it waits for may be weights that are still gathered."""
    first = min((timed for timed in times if timed.action in parts), key=lambda timed: timed.start, default=None)
    if first is None:
        return 0.0
    action = first.action
    received = Action(RECEIPT_OF[action.verb], action.stage, action.index) if action.verb in RECEIPT_OF else None
    messages = [timed.end for timed in times if timed.action == received]
    gathers = [timed.start for timed in times if timed.action.verb == Verb.UNSHARD]
    return min([first.start, *(messages or gathers)])


def step_terms(
    times: Sequence[TimedAction], parts: Mapping[Action, StepTerms], *, begin: float, end: float
) -> StepTerms:
    """The terms of one rank's span, from its `begin` to its `end`. `parts`: of the actions of the process itself."""
    ends = {timed.action: timed.end for timed in times}
    has_gathers = any(lane_of(action) == GATHER_LANE for action in ends)
    collective_ends = sorted(timed.end for timed in times if _is_collective(timed.action))
    terms, clock = [ZERO], begin
    for action, start, stop in times:
        if action not in parts:
            continue
        if start > clock:
            terms.append(_gap(clock, start, _exposed_from(action, ends, collective_ends, start, has_gathers)))
        terms.append(parts[action])
        # What ranks end together lasts as long as that of the last one.
        late = max(0.0, stop - start - sum(parts[action]))
        terms.append(ZERO._replace(bubble=late))
        clock = stop
    last_collective = max((each for each in collective_ends), default=0.0)
    terms.append(_gap(clock, end, (clock, min(last_collective, end))))
    return add_terms(*terms)


def _is_collective(action: Action) -> bool:
    return lane_of(action) in (REDUCE_LANE, GATHER_LANE) or action.verb == Verb.PUSH


def _exposed_from(
    action: Action, ends: Mapping[Action, float], collective_ends: Sequence[float], start: float, has_gathers: bool
) -> tuple[float, float]:
    """The part of the gap in front of an action in which it waits for collectives of the data axis."""
    if action.verb in RECEIPT_OF:
        received = ends.get(Action(RECEIPT_OF[action.verb], action.stage, action.index), 0.0)
        return (received, start) if has_gathers else (start, start)
    return 0.0, max((each for each in collective_ends if each <= start), default=0.0)


def _gap(begin: float, end: float, exposed: tuple[float, float]) -> StepTerms:
    """A gap, divided: what is not exposed is a wait for other stages."""
    first, last = (min(max(each, begin), end) for each in exposed)
    waited = max(0.0, last - first)
    return ZERO._replace(exposed=waited, bubble=end - begin - waited)


# ---- prediction ----------------------------------------------------------------------------------------------------


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
