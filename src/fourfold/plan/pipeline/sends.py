"""Sends: the messages between stages, added to lists of compute actions.

boundary  where stage s ends and stage s + 1 begins; an activation crosses it forward, a gradient backward
message   a send on one pipeline index and a receive on another
Law: a message is sent directly after the action that makes it and received directly in front of the one that uses it;
a boundary whose two stages are on the same index has none.
"""

from collections.abc import Iterator, Sequence

from fourfold.plan.pipeline.spec import ComputeLists, owner_of
from fourfold.plan.rank_program import SENDS
from fourfold.words.program import Action, Verb

BACKWARDS = frozenset({Verb.BACKWARD, Verb.BACKWARD_INPUT})
COMPUTE_VERBS = BACKWARDS | {Verb.FORWARD, Verb.BACKWARD_WEIGHT}


def add_sends(lists: Sequence[Sequence[Action]], num_stages: int) -> ComputeLists:
    """The lists with their messages. Sends do not block: a rank computes on while they are under way.

    Lists that have messages already, as a written program may, are returned as they are.
    """
    if any(action.verb in SENDS for actions in lists for action in actions):
        return tuple(map(tuple, lists))
    pp = len(lists)
    boundaries = {stage for stage in range(num_stages - 1) if owner_of(stage, pp) != owner_of(stage + 1, pp)}
    return tuple(tuple(each for action in actions for each in _with_messages(action, boundaries)) for actions in lists)


def _with_messages(action: Action, boundaries: set[int]) -> Iterator[Action]:
    """A compute action, the message that it waits for in front of it and the one that it makes behind it.

    `boundaries`: the stages whose output goes to another index.
    """
    stage, microbatch = action.stage, action.index
    has_previous, has_next = stage - 1 in boundaries, stage in boundaries
    if action.verb == Verb.FORWARD and has_previous:
        yield Action(Verb.RECEIVE_FORWARD, stage, microbatch)
    if action.verb in BACKWARDS and has_next:
        yield Action(Verb.RECEIVE_BACKWARD, stage, microbatch)
    yield action
    if action.verb == Verb.FORWARD and has_next:
        yield Action(Verb.SEND_FORWARD, stage, microbatch)
    if action.verb in BACKWARDS and has_previous:
        yield Action(Verb.SEND_BACKWARD, stage, microbatch)
