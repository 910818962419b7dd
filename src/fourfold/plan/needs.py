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

from fourfold.words.action import LOSS, NORM, TRUST, USED, Action, Program, Verb
from fourfold.words.spans import COMPUTE, REDUCE, SEND

LANE = {
    Verb.REDUCE: REDUCE,
    Verb.GATHER: REDUCE,
    Verb.SEND: SEND,
    Verb.RECEIVE: SEND,
    Verb.EXCHANGE: SEND,
    Verb.PUSH: SEND,
    Verb.PULL: SEND,
}
COLLECTIVES = frozenset({Verb.REDUCE, Verb.GATHER})


class Need(NamedTuple):
    """An action and the rank whose it is."""

    rank: int
    action: Action


def lane(action: Action) -> str:
    """The lane an action waits in."""
    return LANE.get(action.verb, COMPUTE)


class Needs:
    """The rule, for one program. It is asked once for every action, and must find its answers in no time."""

    def __init__(self, program: Program) -> None:
        self._sets = {rank: frozenset(actions) for rank, actions in program.items()}
        self._lists = program
        self._holders: dict[Action, list[int]] = {}
        for rank in sorted(program):
            for action in dict.fromkeys(program[rank]):
                self._holders.setdefault(action, []).append(rank)
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
        self._rounds = _rounds(program)
        # What stands in front of the first forward ends the step before: all that it needs has ended.
        self._overdue = {
            rank: dict.fromkeys(itertools.takewhile(lambda each: each.verb != Verb.FORWARD, actions))
            for rank, actions in program.items()
        }

    def of(self, rank: int, action: Action) -> list[Need]:
        """What `action` on `rank` needs. A need may stand nowhere in the program: then it is never met."""
        return RULES.get(action.verb, _nothing)(self, rank, action)

    def meeting(self, rank: int, action: Action) -> Sequence[int]:
        """The ranks that begin `action` together with `rank`."""
        return self._holders[action] if action.verb in COLLECTIVES else [rank]

    def at_counterpart(self, rank: int, action: Action, verb: Verb, stage: int) -> list[Need]:
        """The same microbatch's action of another stage: on this rank, or on the one in the same place of that stage.

        Ranks are numbered with the pipeline outermost, so places agree in rank order.
        """
        wanted = Action(verb, stage, action.index)
        there = self._holders.get(wanted, [])
        if not there:
            return []
        if rank in there:
            return [Need(rank, wanted)]
        return [Need(there[self._holders[action].index(rank) % len(there)], wanted)]

    def here(self, rank: int, *wanted: Action | None) -> list[Need]:
        """Those of the actions that this rank has."""
        return [Need(rank, each) for each in wanted if each is not None and each in self._sets[rank]]

    def last(self, rank: int, stage: int, *verbs: Verb) -> Action | None:
        """The last action of a stage by the first of these verbs that this rank has."""
        return next((self._last[rank, verb, stage] for verb in verbs if (rank, verb, stage) in self._last), None)

    def backward_before(self, rank: int, reduction: Action) -> Action | None:
        """The backward that completes a reduction's gradients: the last one that stands before it."""
        return self._backward_before.get((rank, reduction))

    def rounds(self, rank: int, update: Action) -> list[Need]:
        """The reductions of a bucket, one after each backward where gradients rest split."""
        return self._rounds.get((rank, update), [])

    def is_overdue(self, rank: int, action: Action) -> bool:
        """Whether an action is of the step before."""
        return action in self._overdue[rank]

    def gathered(self, rank: int) -> list[Need]:
        """The gathers of weights that a rank's forwards wait for."""
        return [Need(rank, each) for each in self._overdue[rank] if each.verb == Verb.GATHER]

    def everywhere(self, action: Action) -> list[Need]:
        return [Need(rank, action) for rank in self._holders.get(action, ())]

    def every(self, rank: int, verb: Verb, stage: int) -> list[Need]:
        return [Need(rank, each) for each in self._lists[rank] if each.verb == verb and each.stage == stage]


def _rounds(program: Program) -> dict[tuple[int, Action], list[Need]]:
    """By rank and update: the reductions of its bucket. That of bucket b in round r has the index r × buckets + b."""
    found: dict[tuple[int, Action], list[Need]] = {}
    for rank, actions in program.items():
        updates = {(a.stage, a.index): a for a in actions if a.verb == Verb.UPDATE}
        num_buckets = Counter(stage for stage, _ in updates)
        for action in actions:
            if action.verb == Verb.REDUCE and num_buckets[action.stage]:
                update = updates.get((action.stage, action.index % num_buckets[action.stage]))
                if update is not None:
                    found.setdefault((rank, update), []).append(Need(rank, action))
    return found


def _nothing(needs: Needs, rank: int, action: Action) -> list[Need]:
    return []


def _forward(needs: Needs, rank: int, action: Action) -> list[Need]:
    before = needs.at_counterpart(rank, action, Verb.FORWARD, action.stage - 1) if action.stage else []
    return before + needs.gathered(rank)


def _backward(needs: Needs, rank: int, action: Action) -> list[Need]:
    own = [Need(rank, Action(Verb.FORWARD, action.stage, action.index))]
    for verb in (Verb.BACKWARD, Verb.BACKWARD_INPUT):
        own += needs.at_counterpart(rank, action, verb, action.stage + 1)
    return own


def _weight(needs: Needs, rank: int, action: Action) -> list[Need]:
    return [Need(rank, Action(Verb.BACKWARD_INPUT, action.stage, action.index))]


def _measure(needs: Needs, rank: int, action: Action) -> list[Need]:
    if action.index == LOSS:
        return needs.here(rank, needs.last(rank, action.stage, Verb.FORWARD))
    if action.index == USED:
        return needs.here(rank, needs.last(rank, action.stage, Verb.BACKWARD_WEIGHT, Verb.BACKWARD))
    reduced = needs.every(rank, Verb.REDUCE, action.stage)
    if action.index == NORM:
        return reduced
    assert action.index == TRUST
    # Directions are made of gradients that have been scaled and clipped, so of every rank's other measures.
    others = [own for own in needs.every(rank, Verb.MEASURE, action.stage) if own.action != action]
    return reduced + [need for own in others for need in needs.everywhere(own.action)]


def _reduce(needs: Needs, rank: int, action: Action) -> list[Need]:
    return needs.here(rank, needs.backward_before(rank, action))


def _gather(needs: Needs, rank: int, action: Action) -> list[Need]:
    return needs.here(rank, Action(Verb.UPDATE, action.stage, action.index))


def _update(needs: Needs, rank: int, action: Action) -> list[Need]:
    if needs.is_overdue(rank, action):
        return []
    reduced = needs.rounds(rank, action)
    # A measure is begun and not waited for: what needs its sum is the update, and it needs every rank's part.
    measures = needs.every(rank, Verb.MEASURE, action.stage)
    return reduced + [need for own in measures for need in needs.everywhere(own.action)]


def _push(needs: Needs, rank: int, action: Action) -> list[Need]:
    return needs.here(rank, Action(Verb.UPDATE, action.stage, action.index))


def _pull(needs: Needs, rank: int, action: Action) -> list[Need]:
    return needs.everywhere(Action(Verb.PUSH, action.stage, action.index))


RULES: dict[Verb, Callable[[Needs, int, Action], list[Need]]] = {
    Verb.FORWARD: _forward,
    Verb.BACKWARD: _backward,
    Verb.BACKWARD_INPUT: _backward,
    Verb.BACKWARD_WEIGHT: _weight,
    Verb.MEASURE: _measure,
    Verb.REDUCE: _reduce,
    Verb.UPDATE: _update,
    Verb.GATHER: _gather,
    Verb.PUSH: _push,
    Verb.PULL: _pull,
}
