"""Ties: a weight that the first place of a pipeline owns, and the last place uses too (embedding and head).

copy       before a step's first forward the last place receives the weight: T on both
gradients  what the last place's backwards have added up goes to the first one before its last backward: Y on both. Of
           divided backwards the first halves make the gradients of copies: nobody waits for the second ones
Law: the owner's gradient is the sum over both uses before it is reduced, so norm, update and checkpoint have the weight
once, and the copy is the weight, bit for bit, whenever a forward uses it.
"""

from collections.abc import Sequence

from fourfold.axes.pipeline.rules.spec import ComputeLists
from fourfold.words.program import Action, Verb

COMPLETE_BACKWARD = (Verb.BACKWARD, Verb.BACKWARD_WEIGHT)
MAKES_GRADIENTS_OF_COPIES = (Verb.BACKWARD, Verb.BACKWARD_INPUT)
OWNER = 0


def add_copies(lists: Sequence[Sequence[Action]]) -> ComputeLists:
    """The lists with the copies of tied weights in front, for an evaluation."""
    last = len(lists) - 1
    return tuple(
        (*([Action(Verb.TIE, place, 0)] if place in (OWNER, last) else []), *actions)
        for place, actions in enumerate(lists)
    )


def add_ties(lists: Sequence[Sequence[Action]]) -> ComputeLists:
    """The lists of a step with the copies of tied weights, and the messages of their gradients."""
    result, last = list(add_copies(lists)), len(lists) - 1
    # Behind the message of that backward, for which the place before waits.
    behind = 1 + _last_of(result[last], (*MAKES_GRADIENTS_OF_COPIES, Verb.SEND_BACKWARD))
    result[last] = _inserted(result[last], behind, Action(Verb.TIE_GRADIENT, last, 0))
    place = _last_of(result[OWNER], COMPLETE_BACKWARD)
    # A backward follows what it receives, with nothing in between.
    place -= result[OWNER][place - 1].verb == Verb.RECEIVE_BACKWARD
    result[OWNER] = _inserted(result[OWNER], place, Action(Verb.TIE_GRADIENT, OWNER, 0))
    return tuple(result)


def _last_of(actions: Sequence[Action], verbs: Sequence[Verb]) -> int:
    return max(index for index, action in enumerate(actions) if action.verb in verbs)


def _inserted(actions: tuple[Action, ...], place: int, action: Action) -> tuple[Action, ...]:
    return (*actions[:place], action, *actions[place:])
