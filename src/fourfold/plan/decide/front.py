"""The time-memory front: plans of which none is slower and holds more than another."""

from collections.abc import Iterable

from fourfold.plan.decide.choice import simplicity
from fourfold.plan.predict.prediction import Prediction


def time_memory_front(estimated: Iterable[Prediction]) -> tuple[Prediction, ...]:
    """The front, fastest first; of plans that are equal in both, the simplest."""
    front: list[Prediction] = []
    ordered = sorted(estimated, key=lambda each: (each.seconds, each.memory.total))
    for each in ordered:
        if not front or each.memory.total < front[-1].memory.total:
            front.append(each)
        elif (each.seconds, each.memory.total) == (front[-1].seconds, front[-1].memory.total):
            front[-1] = min(front[-1], each, key=lambda each: simplicity(each.plan))
    return tuple(front)
