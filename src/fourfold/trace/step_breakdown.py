"""Step breakdown: what the seconds of a step were spent on, by category.

category    forward, backward, measure, update, average, data, waiting, between actions
background  categories of what runs while the process does something else: reduce, gather, unshard, send
Law: every category but those in the background is the process's own time, and they add up to the step.
"""

from collections.abc import Iterator

from fourfold.plan.rank_program import SENDS
from fourfold.trace.rank_events import COLLECTIVE_LANES, Interval, RankEvents
from fourfold.trace.trace_file import DATA_SPAN, STEP_SPAN, Trace, is_action
from fourfold.words.program import Verb

COMPUTE_CATEGORIES = {
    Verb.FORWARD: "forward",
    Verb.BACKWARD: "backward",
    Verb.BACKWARD_INPUT: "backward",
    Verb.BACKWARD_WEIGHT: "backward",
    Verb.MEASURE: "measure",
    Verb.UPDATE: "update",
}
DATA_TIME, WAITING_TIME, OTHER_TIME, REDUCE_TIME = "data", "waiting", "between actions", "reduce"
AVERAGE_TIME, GATHER_TIME, UNSHARD_TIME, SEND_TIME = "average", "gather", "unshard", "send"
BACKGROUND_TIMES = (REDUCE_TIME, GATHER_TIME, UNSHARD_TIME, SEND_TIME)
CATEGORIES = {
    **COMPUTE_CATEGORIES,
    **dict.fromkeys((*SENDS, Verb.TIE, Verb.TIE_GRADIENT), SEND_TIME),
    Verb.REDUCE: REDUCE_TIME,
    Verb.UNSHARD: UNSHARD_TIME,
    Verb.GATHER: GATHER_TIME,
    Verb.PUSH: AVERAGE_TIME,
    Verb.PULL: AVERAGE_TIME,
}


def seconds_by_category(trace: Trace) -> dict[str, float]:
    """Seconds of a step by category: means over sampled steps and ranks.

    Background categories are not part of the sum: they overlap with the others.
    """
    own = [DATA_TIME, *COMPUTE_CATEGORIES.values(), AVERAGE_TIME, WAITING_TIME, OTHER_TIME]
    names = [*own, *BACKGROUND_TIMES]
    sums = dict.fromkeys(names, 0.0)
    num_samples = 0
    for step in trace.steps:
        for rank in trace.ranks:
            events = RankEvents(trace.events_of(step=step, rank=rank))
            step_seconds = sum(event.seconds for event in events.events if event.name == STEP_SPAN)
            spent = {WAITING_TIME: sum(event.seconds for event in events.waits)}
            for category, seconds in _spans(events):
                spent[category] = spent.get(category, 0.0) + seconds
            known = sum(seconds for category, seconds in spent.items() if category not in BACKGROUND_TIMES)
            spent[OTHER_TIME] = max(0.0, step_seconds - known)
            for category, seconds in spent.items():
                sums[category] += seconds
            num_samples += 1
    return {name: seconds / max(1, num_samples) for name, seconds in sums.items()}


def _spans(events: RankEvents) -> Iterator[tuple[str, float]]:
    """The category of each span, and its seconds without waits and without what is fused into it."""
    for event in events.events:
        within = Interval(event.start, event.stop)
        if event.name == DATA_SPAN:
            yield DATA_TIME, events.busy_seconds(within)
        elif is_action(event.name):
            is_own = event.lane not in COLLECTIVE_LANES
            nested = events.nested_updates(event.name, within)
            yield (
                CATEGORIES[Verb(event.name[0])],
                events.busy_seconds(within, updates=nested) if is_own else event.seconds,
            )
