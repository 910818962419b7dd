"""Step terms: where the seconds of a rank go, from its simulated timeline.

gap   a time in which the process computes nothing: it waits for a message, for a collective, or for other stages
tail  from the last action of the process to the end of the step
span  from a rank's first action to its last end
Law: parts, gaps and tail add up to the span.

Ranks do not wait for each other between steps: the step of each begins when its own one before has ended, so a step
takes the longest span. Qi et al. (2401.10241) count their bubbles in the same way.
"""

from collections.abc import Mapping, Sequence

from fourfold.plan.predict.prediction import StepTerms
from fourfold.plan.predict.stage_seconds import ZERO, add_terms
from fourfold.plan.rank_program import lane_of
from fourfold.plan.simulate import TimedAction
from fourfold.words.program import Action, Verb
from fourfold.words.trace_events import GATHER_LANE, REDUCE_LANE

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
