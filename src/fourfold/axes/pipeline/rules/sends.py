"""Sends: the messages between stages, and the count in which all ranks meet, added to lists of compute actions.

boundary  where stage s ends and stage s + 1 begins; an activation crosses it forward, a gradient backward
message   a send on one pipeline index and a receive on another
Law: a message is sent directly after the action that makes it and received directly in front of the one that uses it;
a boundary whose two stages are on the same index has none.
"""

from collections.abc import Iterator, Sequence

from fourfold.axes.pipeline.rules.spec import ComputeLists, owner_of
from fourfold.plan.rank_program import BACKWARD_PHASES, SENDS
from fourfold.words.program import NOMINAL_COUNT, Action, Verb

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


def add_nominal_count(lists: Sequence[Sequence[Action]]) -> ComputeLists:
    """Lists with messages, and with the measure of the nominal count, for which all ranks wait.

    Behind all that ranks can do before one of them runs a backward, which needs it: so it follows the first loss, and
    no rank waits in it for what comes behind another rank's backward.
    """
    fronts, sent = [0] * len(lists), set[Action]()

    def comes_before(action: Action) -> bool:
        made = Action(Verb.SEND_FORWARD, action.stage - 1, action.index)
        return action.verb not in BACKWARD_PHASES and (action.verb != Verb.RECEIVE_FORWARD or made in sent)

    while any(comes_before(actions[front]) for actions, front in zip(lists, fronts, strict=True)):
        for index, actions in enumerate(lists):
            while comes_before(action := actions[fronts[index]]):
                sent.add(action)
                fronts[index] += 1
    return tuple(
        (*actions[:front], Action(Verb.MEASURE, index, NOMINAL_COUNT), *actions[front:])
        for index, (actions, front) in enumerate(zip(lists, fronts, strict=True))
    )


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
