"""In flight: how many microbatches' tensors a schedule keeps alive, counted from its list.

in flight  the microbatches of a stage whose forward has run and whose backward (B, or W) has not ended: their
           activations are alive
deferred   those between I and W: the gradients of their outputs are alive too, and the rest of the graph is gone, with
           what the stage received
Law: the counts follow from the order on one index alone, whatever the speed of the others.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from fourfold.words.program import Action, Verb

BEGIN_OF_FLIGHT, END_OF_FLIGHT = {Verb.FORWARD}, {Verb.BACKWARD, Verb.BACKWARD_WEIGHT}
BEGIN_OF_DEFERRAL, END_OF_DEFERRAL = {Verb.BACKWARD_INPUT}, {Verb.BACKWARD_WEIGHT}


class Peak(NamedTuple):
    """The largest counts of one pipeline index.

    microbatches  of all its stages together, at one time
    by_stage      of each of its stages alone
    deferred      of all its stages together, at one time, between I and W
    """

    microbatches: int
    by_stage: dict[int, int]
    deferred: int


def least_held(lists: Sequence[Sequence[Action]]) -> float:
    """What the fullest stage holds at a time, at least, in activations of one microbatch on all stages together.

    A stage that makes a share of these holds as many shares as it has microbatches in flight. Whatever the division is,
    the largest of the products is at least what it is where all are equal.
    """
    in_flight = [count for actions in lists for count in peak_in_flight(actions).by_stage.values()]
    return 1 / sum(1 / count for count in in_flight)


def peak_in_flight(actions: Sequence[Action]) -> Peak:
    """The microbatches that one pipeline index has in flight. One of v stages counts as much as one of a single stage:
    where interleave = v, each holds 1/v of the activations.
    """
    in_flight, peaks = Counter[int](), Counter[int]()
    most = deferred = most_deferred = 0
    for action in actions:
        in_flight[action.stage] += (action.verb in BEGIN_OF_FLIGHT) - (action.verb in END_OF_FLIGHT)
        deferred += (action.verb in BEGIN_OF_DEFERRAL) - (action.verb in END_OF_DEFERRAL)
        peaks[action.stage] = max(peaks[action.stage], in_flight[action.stage])
        most, most_deferred = max(most, in_flight.total()), max(most_deferred, deferred)
    return Peak(most, dict(sorted(peaks.items())), most_deferred)
