"""Rank program: one rank's actions, indexed by what other actions of the same rank need to know of them.

lane  the queue in which an action waits; order holds within a lane, dependencies across lanes
"""

import itertools
from collections import Counter
from collections.abc import Sequence

from fourfold.words.program import Action, Verb, bucket_of
from fourfold.words.trace_events import COMPUTE_LANE, GATHER_LANE, REDUCE_LANE, SEND_LANE

BACKWARD_PHASES = (Verb.TIE_GRADIENT, Verb.RECEIVE_BACKWARD, Verb.BACKWARD, Verb.BACKWARD_INPUT)
"""What a backward begins with."""
SENDS = frozenset({Verb.SEND_FORWARD, Verb.RECEIVE_FORWARD, Verb.SEND_BACKWARD, Verb.RECEIVE_BACKWARD})
LANE_BY_VERB = {
    Verb.REDUCE: REDUCE_LANE,
    Verb.GATHER: GATHER_LANE,
    Verb.UNSHARD: GATHER_LANE,
    **dict.fromkeys(SENDS, SEND_LANE),
    Verb.TIE: SEND_LANE,
    Verb.TIE_GRADIENT: COMPUTE_LANE,
    Verb.PUSH: SEND_LANE,
    Verb.PULL: SEND_LANE,
}


def lane_of(action: Action) -> str:
    """The lane in which an action waits."""
    return LANE_BY_VERB.get(action.verb, COMPUTE_LANE)


class RankProgram:
    """One rank's actions, indexed by what other actions of the same rank need to know of them."""

    def __init__(self, actions: Sequence[Action]) -> None:
        self.actions = dict.fromkeys(actions)
        self.stages = {action.stage for action in actions}
        self.last = {(action.verb, action.stage): action for action in actions}
        """By verb and stage: its last action."""
        self.previous_step = dict.fromkeys(itertools.takewhile(_is_before_forward, actions))
        """Updates in front of the first forward belong to the step before: all that they depend on has ended."""
        self.backward_before: dict[Action, Action] = {}
        """By reduction: the backward that completes its gradients, the last one in front of it."""
        self.unshards_of: dict[Action, list[Action]] = {}
        """By forward or backward: the unshards of weights that it uses, those since the compute action before it."""
        self.update_before: dict[Action, Action] = {}
        """By unshard: the update of its bucket, if that stands in front of it."""
        self.phase_before: dict[Action, Action] = {}
        """By unshard: the end of the phase in front of it, which uses the memory that weights are gathered into."""
        self.reductions: dict[Action, list[Action]] = {}
        """By update: the reductions of its bucket, one or one per backward."""
        self.after_reductions: set[Action] = set()
        """The updates behind all reductions of their stage."""
        self._index(actions)

    def _index(self, actions: Sequence[Action]) -> None:
        updates = {(a.stage, a.index): a for a in actions if a.verb == Verb.UPDATE}
        num_buckets = Counter(stage for stage, _ in updates)
        last_backward: Action | None = None
        unshards: list[Action] = []
        phase_end: Action | None = None
        updated: set[Action] = set()
        for action in actions:
            if action.verb in (Verb.REDUCE, Verb.UNSHARD) and num_buckets[action.stage]:
                update = updates.get((action.stage, bucket_of(action, num_buckets[action.stage])))
                if update is not None and action.verb == Verb.REDUCE:
                    self.reductions.setdefault(update, []).append(action)
                elif update is not None and update in updated:
                    self.update_before[action] = update
            if action.verb == Verb.UNSHARD:
                unshards.append(action)
                if phase_end is not None:
                    self.phase_before[action] = phase_end
            elif action.verb in (Verb.FORWARD, Verb.BACKWARD, Verb.BACKWARD_INPUT):
                self.unshards_of[action], unshards = unshards, []
            elif action.verb == Verb.UPDATE:
                updated.add(action)
                self.after_reductions.add(action)
            elif action.verb == Verb.REDUCE:
                self.after_reductions = {each for each in self.after_reductions if each.stage != action.stage}
                if last_backward is not None:
                    self.backward_before[action] = last_backward
            if action.verb in (Verb.BACKWARD, Verb.BACKWARD_WEIGHT):
                last_backward = action
            if lane_of(action) == COMPUTE_LANE and action.verb != Verb.UPDATE:
                phase_end = action


def _is_before_forward(action: Action) -> bool:
    return action.verb != Verb.FORWARD
