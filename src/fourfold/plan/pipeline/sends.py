"""Sends: the messages between stages, added to lists of compute actions.

boundary  where stage s ends and stage s + 1 begins; an activation crosses it forward, a gradient backward
message   a send on one pipeline index and a receive on another
Law: a message is sent directly after the action that makes it and received directly in front of the one that uses it;
a boundary whose two stages are on the same index has none.
"""

from collections.abc import Iterator, Sequence

from fourfold.plan.pipeline.schedules import ComputeLists
from fourfold.words.program import Action, Verb

BACKWARDS = (Verb.BACKWARD, Verb.BACKWARD_INPUT)


def add_sends(lists: Sequence[Sequence[Action]], num_stages: int) -> ComputeLists:
    """The lists with their messages. Sends do not block: a rank computes on while they are under way.

    `lists`: by pipeline index; between them they have all of the stages.
    """
    owners = {action.stage: index for index, actions in enumerate(lists) for action in actions}
    boundaries = {stage for stage in range(num_stages - 1) if owners[stage] != owners[stage + 1]}
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
