"""Needs: what must have ended before an action may begin. Written once, for whoever makes, checks, prices or runs.

lane     the queue an action waits in; order holds within a lane, needs across lanes
need     an action on a rank that must have ended before
meeting  a collective: it begins on all its ranks together, when it is the next one on each
Law: an action needs only what makes its inputs; everything else about its time is order or price.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from fourfold.words.program import GRAD_NORM, LOSS, TRUST_NORMS, USED_PARAMS, Action, Program, Verb
from fourfold.words.trace_events import COMPUTE_LANE, REDUCE_LANE, SEND_LANE

LANE_BY_VERB = {
    Verb.REDUCE: REDUCE_LANE,
    Verb.GATHER: REDUCE_LANE,
    Verb.SEND: SEND_LANE,
    Verb.RECEIVE: SEND_LANE,
    Verb.EXCHANGE: SEND_LANE,
    Verb.PUSH: SEND_LANE,
    Verb.PULL: SEND_LANE,
}
COLLECTIVES = frozenset({Verb.REDUCE, Verb.GATHER})


class Dependency(NamedTuple):
    """An action and the rank whose it is."""

    rank: int
    action: Action


def lane_of(action: Action) -> str:
    """The lane an action waits in."""
    return LANE_BY_VERB.get(action.verb, COMPUTE_LANE)


class Dependencies:
    """The rule, for one program. It is asked once for every action, and must find its answers in no time."""

    def __init__(self, program: Program) -> None:
        self._action_sets = {rank: frozenset(actions) for rank, actions in program.items()}
        self._program = program
        self._ranks_by_action: dict[Action, list[int]] = {}
        for rank in sorted(program):
            for action in dict.fromkeys(program[rank]):
                self._ranks_by_action.setdefault(action, []).append(rank)
        self._last: dict[tuple[int, Verb, int], Action] = {
            (rank, action.verb, action.stage): action for rank, actions in program.items() for action in actions
        }
        self._backward_before: dict[tuple[int, Action], Action] = {}
        for rank, actions in program.items():
            latest: dict[int, Action] = {}
            for action in actions:
                if action.verb in (Verb.BACKWARD, Verb.BACKWARD_WEIGHT):
                    latest[action.stage] = action
                elif action.verb == Verb.REDUCE and action.stage in latest:
                    self._backward_before[rank, action] = latest[action.stage]
        self._reductions = _reductions_by_update(program)
        # What stands in front of the first forward ends the step before: all that it needs has ended.
        self._previous_step = {
            rank: dict.fromkeys(itertools.takewhile(lambda each: each.verb != Verb.FORWARD, actions))
            for rank, actions in program.items()
        }

    def of(self, rank: int, action: Action) -> list[Dependency]:
        """What `action` on `rank` needs. A need may stand nowhere in the program: then it is never met."""
        return DEPENDENCY_RULES.get(action.verb, _no_dependencies)(self, rank, action)

    def participants(self, rank: int, action: Action) -> Sequence[int]:
        """The ranks that begin `action` together with `rank`."""
        return self._ranks_by_action[action] if action.verb in COLLECTIVES else [rank]

    def on_neighbour_stage(self, rank: int, action: Action, verb: Verb, stage: int) -> list[Dependency]:
        """The same microbatch's action of another stage: on this rank, or on the one in the same place of that stage.

        Ranks are numbered with the pipeline outermost, so places agree in rank order.
        """
        wanted = Action(verb, stage, action.index)
        there = self._ranks_by_action.get(wanted, [])
        if not there:
            return []
        if rank in there:
            return [Dependency(rank, wanted)]
        return [Dependency(there[self._ranks_by_action[action].index(rank) % len(there)], wanted)]

    def present(self, rank: int, *wanted: Action | None) -> list[Dependency]:
        """Those of the actions that this rank has."""
        return [Dependency(rank, each) for each in wanted if each is not None and each in self._action_sets[rank]]

    def last_action(self, rank: int, stage: int, *verbs: Verb) -> Action | None:
        """The last action of a stage by the first of these verbs that this rank has."""
        return next((self._last[rank, verb, stage] for verb in verbs if (rank, verb, stage) in self._last), None)

    def backward_before(self, rank: int, reduction: Action) -> Action | None:
        """The backward that completes a reduction's gradients: the last one that stands before it."""
        return self._backward_before.get((rank, reduction))

    def bucket_reductions(self, rank: int, update: Action) -> list[Dependency]:
        """The reductions of a bucket, one after each backward where gradients rest split."""
        return self._reductions.get((rank, update), [])

    def is_previous_step(self, rank: int, action: Action) -> bool:
        """Whether an action is of the step before."""
        return action in self._previous_step[rank]

    def weight_gathers(self, rank: int) -> list[Dependency]:
        """The gathers of weights that a rank's forwards wait for."""
        return [Dependency(rank, each) for each in self._previous_step[rank] if each.verb == Verb.GATHER]

    def on_all_ranks(self, action: Action) -> list[Dependency]:
        return [Dependency(rank, action) for rank in self._ranks_by_action.get(action, ())]

    def all_in_stage(self, rank: int, verb: Verb, stage: int) -> list[Dependency]:
        return [Dependency(rank, each) for each in self._program[rank] if each.verb == verb and each.stage == stage]


def _reductions_by_update(program: Program) -> dict[tuple[int, Action], list[Dependency]]:
    """By rank and update: the reductions of its bucket. That of bucket b in round r has the index r × buckets + b."""
    found: dict[tuple[int, Action], list[Dependency]] = {}
    for rank, actions in program.items():
        updates = {(a.stage, a.index): a for a in actions if a.verb == Verb.UPDATE}
        num_buckets = Counter(stage for stage, _ in updates)
        for action in actions:
            if action.verb == Verb.REDUCE and num_buckets[action.stage]:
                update = updates.get((action.stage, action.index % num_buckets[action.stage]))
                if update is not None:
                    found.setdefault((rank, update), []).append(Dependency(rank, action))
    return found


def _no_dependencies(needs: Dependencies, rank: int, action: Action) -> list[Dependency]:
    return []


def _forward(needs: Dependencies, rank: int, action: Action) -> list[Dependency]:
    before = needs.on_neighbour_stage(rank, action, Verb.FORWARD, action.stage - 1) if action.stage else []
    return before + needs.weight_gathers(rank)


def _backward(needs: Dependencies, rank: int, action: Action) -> list[Dependency]:
    own = [Dependency(rank, Action(Verb.FORWARD, action.stage, action.index))]
    for verb in (Verb.BACKWARD, Verb.BACKWARD_INPUT):
        own += needs.on_neighbour_stage(rank, action, verb, action.stage + 1)
    return own


def _backward_weight(needs: Dependencies, rank: int, action: Action) -> list[Dependency]:
    return [Dependency(rank, Action(Verb.BACKWARD_INPUT, action.stage, action.index))]


def _measure(needs: Dependencies, rank: int, action: Action) -> list[Dependency]:
    if action.index == LOSS:
        return needs.present(rank, needs.last_action(rank, action.stage, Verb.FORWARD))
    if action.index == USED_PARAMS:
        return needs.present(rank, needs.last_action(rank, action.stage, Verb.BACKWARD_WEIGHT, Verb.BACKWARD))
    reduced = needs.all_in_stage(rank, Verb.REDUCE, action.stage)
    if action.index == GRAD_NORM:
        return reduced
    assert action.index == TRUST_NORMS
    # Directions are made of gradients that have been scaled and clipped, so of every rank's other measures.
    others = [own for own in needs.all_in_stage(rank, Verb.MEASURE, action.stage) if own.action != action]
    return reduced + [need for own in others for need in needs.on_all_ranks(own.action)]


def _reduce(needs: Dependencies, rank: int, action: Action) -> list[Dependency]:
    return needs.present(rank, needs.backward_before(rank, action))


def _gather(needs: Dependencies, rank: int, action: Action) -> list[Dependency]:
    return needs.present(rank, Action(Verb.UPDATE, action.stage, action.index))


def _update(needs: Dependencies, rank: int, action: Action) -> list[Dependency]:
    if needs.is_previous_step(rank, action):
        return []
    reduced = needs.bucket_reductions(rank, action)
    # A measure is begun and not waited for: what needs its sum is the update, and it needs every rank's part.
    measures = needs.all_in_stage(rank, Verb.MEASURE, action.stage)
    return reduced + [need for own in measures for need in needs.on_all_ranks(own.action)]


def _push(needs: Dependencies, rank: int, action: Action) -> list[Dependency]:
    return needs.present(rank, Action(Verb.UPDATE, action.stage, action.index))


def _pull(needs: Dependencies, rank: int, action: Action) -> list[Dependency]:
    return needs.on_all_ranks(Action(Verb.PUSH, action.stage, action.index))


DEPENDENCY_RULES: dict[Verb, Callable[[Dependencies, int, Action], list[Dependency]]] = {
    Verb.FORWARD: _forward,
    Verb.BACKWARD: _backward,
    Verb.BACKWARD_INPUT: _backward,
    Verb.BACKWARD_WEIGHT: _backward_weight,
    Verb.MEASURE: _measure,
    Verb.REDUCE: _reduce,
    Verb.UPDATE: _update,
    Verb.GATHER: _gather,
    Verb.PUSH: _push,
    Verb.PULL: _pull,
}
