"""Dependencies: what must have ended before an action may begin; the one rule for making and simulating programs.

lane        the queue in which an action waits; order holds within a lane, dependencies across lanes
dependency  an action on a rank that must have ended before
collective  an action that begins on all its ranks together, once it is the next one on each
Law: an action depends only on what makes its inputs; everything else about its time is order or cost.
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
    """An action on a rank."""

    rank: int
    action: Action


def lane_of(action: Action) -> str:
    """The lane in which an action waits."""
    return LANE_BY_VERB.get(action.verb, COMPUTE_LANE)


class Dependencies:
    """The dependencies of every action of a program. Indexes are built once: the simulator asks once per action."""

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
            last_backward: dict[int, Action] = {}
            for action in actions:
                if action.verb in (Verb.BACKWARD, Verb.BACKWARD_WEIGHT):
                    last_backward[action.stage] = action
                elif action.verb == Verb.REDUCE and action.stage in last_backward:
                    self._backward_before[rank, action] = last_backward[action.stage]
        self._reductions = _reductions_by_update(program)
        # Actions in front of the first forward belong to the step before: everything they depend on has ended.
        self._previous_step = {
            rank: dict.fromkeys(itertools.takewhile(lambda action: action.verb != Verb.FORWARD, actions))
            for rank, actions in program.items()
        }

    def of(self, rank: int, action: Action) -> list[Dependency]:
        """What `action` on `rank` depends on. A dependency that is missing in the program is never met."""
        return DEPENDENCY_RULES.get(action.verb, _no_dependencies)(self, rank, action)

    def participants(self, rank: int, action: Action) -> Sequence[int]:
        """The ranks that begin `action` together with `rank`."""
        return self._ranks_by_action[action] if action.verb in COLLECTIVES else [rank]

    def on_neighbour_stage(self, rank: int, action: Action, verb: Verb, stage: int) -> list[Dependency]:
        """The same microbatch's action on another stage: on this rank, or on its counterpart among that stage's ranks.

        Ranks are numbered with the pipeline axis outermost, so counterparts have the same position in rank order.
        """
        wanted = Action(verb, stage, action.index)
        stage_ranks = self._ranks_by_action.get(wanted, [])
        if not stage_ranks:
            return []
        if rank in stage_ranks:
            return [Dependency(rank, wanted)]
        position = self._ranks_by_action[action].index(rank)
        return [Dependency(stage_ranks[position % len(stage_ranks)], wanted)]

    def present(self, rank: int, *wanted: Action | None) -> list[Dependency]:
        """Those of the actions that are in this rank's program."""
        return [Dependency(rank, each) for each in wanted if each is not None and each in self._action_sets[rank]]

    def last_action(self, rank: int, stage: int, *verbs: Verb) -> Action | None:
        """The last action of a stage with the first of these verbs that occurs in this rank's program."""
        return next((self._last[rank, verb, stage] for verb in verbs if (rank, verb, stage) in self._last), None)

    def backward_before(self, rank: int, reduction: Action) -> Action | None:
        """The backward that completes the gradients of a reduction: the last one in front of it."""
        return self._backward_before.get((rank, reduction))

    def bucket_reductions(self, rank: int, update: Action) -> list[Dependency]:
        """The reductions of the bucket that an update changes: one, or one per backward if gradients rest split."""
        return self._reductions.get((rank, update), [])

    def is_previous_step(self, rank: int, action: Action) -> bool:
        """Whether an action belongs to the step before."""
        return action in self._previous_step[rank]

    def weight_gathers(self, rank: int) -> list[Dependency]:
        """The gathers of weights that the forwards of a rank wait for."""
        return [Dependency(rank, each) for each in self._previous_step[rank] if each.verb == Verb.GATHER]

    def on_all_ranks(self, action: Action) -> list[Dependency]:
        """This action on every rank that has it."""
        return [Dependency(rank, action) for rank in self._ranks_by_action.get(action, ())]

    def all_in_stage(self, rank: int, verb: Verb, stage: int) -> list[Dependency]:
        """All actions of a rank with this verb and stage."""
        return [Dependency(rank, each) for each in self._program[rank] if each.verb == verb and each.stage == stage]


def _reductions_by_update(program: Program) -> dict[tuple[int, Action], list[Dependency]]:
    """By rank and update: the reductions of its bucket b. Those of round r have the index r × num_buckets + b."""
    reductions: dict[tuple[int, Action], list[Dependency]] = {}
    for rank, actions in program.items():
        updates = {(a.stage, a.index): a for a in actions if a.verb == Verb.UPDATE}
        num_buckets = Counter(stage for stage, _ in updates)
        for action in actions:
            if action.verb == Verb.REDUCE and num_buckets[action.stage]:
                update = updates.get((action.stage, action.index % num_buckets[action.stage]))
                if update is not None:
                    reductions.setdefault((rank, update), []).append(Dependency(rank, action))
    return reductions


def _no_dependencies(dependencies: Dependencies, rank: int, action: Action) -> list[Dependency]:
    return []


def _forward(dependencies: Dependencies, rank: int, action: Action) -> list[Dependency]:
    before = dependencies.on_neighbour_stage(rank, action, Verb.FORWARD, action.stage - 1) if action.stage else []
    return before + dependencies.weight_gathers(rank)


def _backward(dependencies: Dependencies, rank: int, action: Action) -> list[Dependency]:
    needed = [Dependency(rank, Action(Verb.FORWARD, action.stage, action.index))]
    for verb in (Verb.BACKWARD, Verb.BACKWARD_INPUT):
        needed += dependencies.on_neighbour_stage(rank, action, verb, action.stage + 1)
    return needed


def _backward_weight(dependencies: Dependencies, rank: int, action: Action) -> list[Dependency]:
    return [Dependency(rank, Action(Verb.BACKWARD_INPUT, action.stage, action.index))]


def _measure(dependencies: Dependencies, rank: int, action: Action) -> list[Dependency]:
    if action.index == LOSS:
        return dependencies.present(rank, dependencies.last_action(rank, action.stage, Verb.FORWARD))
    if action.index == USED_PARAMS:
        return dependencies.present(
            rank, dependencies.last_action(rank, action.stage, Verb.BACKWARD_WEIGHT, Verb.BACKWARD)
        )
    reduced = dependencies.all_in_stage(rank, Verb.REDUCE, action.stage)
    if action.index == GRAD_NORM:
        return reduced
    assert action.index == TRUST_NORMS
    # Update directions are made from scaled and clipped gradients, so they need the other measures of every rank.
    others = [each for each in dependencies.all_in_stage(rank, Verb.MEASURE, action.stage) if each.action != action]
    return reduced + [need for other in others for need in dependencies.on_all_ranks(other.action)]


def _reduce(dependencies: Dependencies, rank: int, action: Action) -> list[Dependency]:
    return dependencies.present(rank, dependencies.backward_before(rank, action))


def _gather(dependencies: Dependencies, rank: int, action: Action) -> list[Dependency]:
    return dependencies.present(rank, Action(Verb.UPDATE, action.stage, action.index))


def _update(dependencies: Dependencies, rank: int, action: Action) -> list[Dependency]:
    if dependencies.is_previous_step(rank, action):
        return []
    reduced = dependencies.bucket_reductions(rank, action)
    # A measure only starts a sum; the update waits for it, and so for the addend of every rank.
    measures = dependencies.all_in_stage(rank, Verb.MEASURE, action.stage)
    return reduced + [need for measure in measures for need in dependencies.on_all_ranks(measure.action)]


def _push(dependencies: Dependencies, rank: int, action: Action) -> list[Dependency]:
    return dependencies.present(rank, Action(Verb.UPDATE, action.stage, action.index))


def _pull(dependencies: Dependencies, rank: int, action: Action) -> list[Dependency]:
    return dependencies.on_all_ranks(Action(Verb.PUSH, action.stage, action.index))


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
