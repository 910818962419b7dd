"""Dependencies: what must have ended before an action may begin; the one rule for making and simulating programs.

lane        the queue in which an action waits; order holds within a lane, dependencies across lanes
dependency  an action on a rank that must have ended before
meeting     the ranks that begin an action together, once it is the next one in its lane on each of them; or end it
            together
Law: an action depends only on what makes its inputs; everything else about its time is order or cost.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from fourfold.plan.rank_program import SENDS, RankProgram
from fourfold.words.errors import Problem
from fourfold.words.mesh import Axis, Mesh
from fourfold.words.program import (
    GRAD_NORM,
    LOSS,
    NOMINAL_COUNT,
    TRUST_NORMS,
    USED_PARAMS,
    Action,
    Program,
    ProgramError,
    Verb,
)

# The ranks that sum gradients: those of one stage and one tensor shard.
REDUCE_AXES: tuple[Axis, ...] = ("dp", "cp")
PARAMETER_AXES: tuple[Axis, ...] = ("dp", "cp", "tp")  # of the ranks that hold parts of the same parameters
# The ranks that compute on the same samples exchange tokens, keys and partial products within a forward or backward.
SAMPLE_AXES: tuple[Axis, ...] = ("cp", "tp")
MEETING_AXES: dict[Verb, tuple[Axis, ...]] = {
    **dict.fromkeys((Verb.REDUCE, Verb.GATHER, Verb.UNSHARD), REDUCE_AXES),
    **dict.fromkeys((Verb.FORWARD, Verb.BACKWARD, Verb.BACKWARD_INPUT), SAMPLE_AXES),
}
RanksByMemory = tuple[tuple[int, ...], ...]
"""The ranks that meet in shared memory, a tuple for each; ranks of other transports are in none."""
WORLD_MEASURES = (LOSS, GRAD_NORM)  # summed over all ranks; the others over those of a stage that sum gradients


class Dependency(NamedTuple):
    """An action on a rank."""

    rank: int
    action: Action


def _summing_axes(action: Action) -> tuple[Axis, ...]:
    """The axes over which a measure of a stage is summed, or a gradient."""
    return PARAMETER_AXES if action.verb == Verb.MEASURE and action.index == TRUST_NORMS else REDUCE_AXES


class Dependencies:
    """The dependencies of every action of a program. Indexes are built once: the simulator asks once per action."""

    def __init__(self, program: Program, mesh: Mesh | None = None, ranks_by_memory: RanksByMemory = ()) -> None:
        """`mesh`: the places of the ranks; None: all are data ranks. Raises ProgramError for a rank outside of it."""
        mesh = mesh or Mesh(dp=max(program, default=0) + 1)
        if outside := sorted(set(program) - set(range(mesh.size))):
            raise ProgramError(Problem(f"rank {outside[0]}", f"one of the mesh's {mesh.size} ranks"), where="program")
        by_actions = {id(actions): RankProgram(actions) for actions in program.values()}
        self._of_rank = {rank: by_actions[id(actions)] for rank, actions in sorted(program.items())}
        self._peers = {
            axes: {rank: group for group in mesh.groups(*axes) for rank in group}
            for axes in {REDUCE_AXES, SAMPLE_AXES, PARAMETER_AXES, ("pp",)}
        }
        self._meetings: dict[tuple[Action, tuple[int, ...]], list[int]] = {}
        self._stage_ranks: dict[tuple[int, int], list[int]] = {}
        self._in_stage: dict[tuple[int, Verb, int], list[Dependency]] = {}
        self._sharing_memory = {rank: ranks for ranks in ranks_by_memory for rank in ranks}
        actions = list(dict.fromkeys(action for rank in by_actions.values() for action in rank.actions))
        self._last_stage = max((action.stage for action in actions), default=0)
        self._has_sends = any(action.verb in SENDS for action in actions)
        self._world_measures = {
            kind: [
                Dependency(rank, action)
                for rank, own in self._of_rank.items()
                for action in own.actions
                if action.verb == Verb.MEASURE and action.index == kind
            ]
            for kind in WORLD_MEASURES
        }

    def of(self, rank: int, action: Action) -> list[Dependency]:
        """What `action` on `rank` depends on. A dependency that is missing in the program is never met."""
        return DEPENDENCY_RULES[action.verb](self, rank, action)

    def participants(self, rank: int, action: Action) -> Sequence[int]:
        """The ranks that begin `action` together with `rank`."""
        axes = MEETING_AXES.get(action.verb)
        return [rank] if axes is None else self.holders(rank, action, axes)

    def ends_with(self, rank: int, action: Action) -> Sequence[int]:
        """The ranks that end `action` together with `rank`.

        At the end of a phase that unshards weights, ranks ask each other whether any has missed a bucket. All measures
        but the loss wait for their sums.
        """
        is_sum = action.verb == Verb.MEASURE and action.index != LOSS
        is_together = is_sum or bool(self._of_rank[rank].unshards_of.get(action))
        return self.holders(rank, action, _summing_axes(action)) if is_together else [rank]

    def holders(self, rank: int, action: Action, axes: tuple[Axis, ...]) -> Sequence[int]:
        """Those of the rank's peers along `axes` that have this action in their programs."""
        key = action, self._peers[axes][rank]
        if key not in self._meetings:
            self._meetings[key] = [each for each in key[1] if self.has(each, action)]
        return self._meetings[key]

    def has(self, rank: int, action: Action) -> bool:
        """Whether an action is in a rank's program."""
        return rank in self._of_rank and action in self._of_rank[rank].actions

    def present(self, rank: int, *wanted: Action | None) -> list[Dependency]:
        """Those of the actions that are in this rank's program."""
        return [Dependency(rank, each) for each in wanted if each is not None and self.has(rank, each)]

    def own(self, rank: int) -> RankProgram:
        """The index of a rank's actions."""
        return self._of_rank[rank]

    def all_in_stage(self, rank: int, verb: Verb, stage: int) -> list[Dependency]:
        """All actions of a rank with this verb and stage."""
        key = rank, verb, stage
        if key not in self._in_stage:
            actions = self._of_rank[rank].actions
            self._in_stage[key] = [Dependency(rank, a) for a in actions if a.verb == verb and a.stage == stage]
        return self._in_stage[key]

    def on_stage_ranks(self, rank: int, action: Action) -> list[Dependency]:
        """This action on every rank of the stage that sums gradients with `rank`, or norms of parameters."""
        return [Dependency(each, action) for each in self.holders(rank, action, _summing_axes(action))]

    def on_memory_ranks(self, rank: int, action: Action | None) -> list[Dependency]:
        """This action on every rank that shares memory with `rank`."""
        ranks = self._sharing_memory.get(rank, ())
        return [] if action is None else [Dependency(each, action) for each in ranks if self.has(each, action)]

    def measures_before_update(self, rank: int, stage: int, *, excluded: Action | None = None) -> list[Dependency]:
        """The measures whose sums an update of a stage uses, on every rank that has an addend."""
        needed = [dependency for kind in WORLD_MEASURES for dependency in self._world_measures[kind]]
        for _, measure in self.all_in_stage(rank, Verb.MEASURE, stage):
            if measure.index in (USED_PARAMS, TRUST_NORMS) and measure != excluded:
                needed += self.on_stage_ranks(rank, measure)
        return needed

    def from_stage(self, rank: int, stage: int, index: int, *verbs: Verb) -> list[Dependency]:
        """A microbatch's action on another stage, with the first of these verbs that is there: on this rank, or on the
        one with its place on the other axes. None beyond the first and the last stage.
        """
        if not 0 <= stage <= self._last_stage:
            return []
        ranks = self._ranks_with(rank, stage)
        for each in ranks:
            actions = self._of_rank[each].actions
            for verb in verbs:
                if (action := Action(verb, stage, index)) in actions:
                    return [Dependency(each, action)]
        return [Dependency(ranks[0] if ranks else rank, Action(verbs[0], stage, index))]

    def _ranks_with(self, rank: int, stage: int) -> list[int]:
        """The ranks of a pipeline whose programs have a stage, this one first."""
        key = rank, stage
        if key not in self._stage_ranks:
            ranks = dict.fromkeys([rank, *self.pipeline_of(rank)])
            self._stage_ranks[key] = [each for each in ranks if stage in self._of_rank[each].stages]
        return self._stage_ranks[key]

    def pipeline_of(self, rank: int) -> Sequence[int]:
        """The ranks that differ from this one on the pipeline axis only, which are in the program."""
        return [each for each in self._peers["pp",][rank] if each in self._of_rank]

    def tied_places(self, rank: int) -> tuple[int, int]:
        """The rank of this pipeline that owns its tied weights, and the number of its first stage."""
        owner = min(self.pipeline_of(rank))
        return owner, min(self._of_rank[owner].stages)

    def input_of(self, rank: int, received: Action, *verbs: Verb, stage: int) -> list[Dependency]:
        """What makes the input of a stage: another stage of this rank, else `received`, the message from it.

        A program without messages is a list of compute actions: they depend on each other over ranks.
        """
        made = self.from_stage(rank, stage, received.index, *verbs)
        is_remote = bool(made) and (made[0].rank != rank or not self.has(*made[0]))
        return [Dependency(rank, received)] if is_remote and self._has_sends else made


def _forward(dependencies: Dependencies, rank: int, action: Action) -> list[Dependency]:
    received = Action(Verb.RECEIVE_FORWARD, action.stage, action.index)
    own = dependencies.own(rank)
    weights = [a for a in own.previous_step if a.verb == Verb.GATHER and a.stage == action.stage]
    weights += own.unshards_of.get(action, [])
    return dependencies.input_of(rank, received, Verb.FORWARD, stage=action.stage - 1) + [
        Dependency(rank, each) for each in weights
    ]


def _backward(dependencies: Dependencies, rank: int, action: Action) -> list[Dependency]:
    received = Action(Verb.RECEIVE_BACKWARD, action.stage, action.index)
    needed = [Dependency(rank, Action(Verb.FORWARD, action.stage, action.index))]
    needed += dependencies.input_of(rank, received, Verb.BACKWARD, Verb.BACKWARD_INPUT, stage=action.stage + 1)
    own = dependencies.own(rank)
    needed += [Dependency(rank, each) for each in own.unshards_of.get(action, [])]
    # A rank reads the gradients of its host until it has updated with them: none stores new ones before.
    last_update = next((each for each in reversed(own.previous_step) if each.verb == Verb.UPDATE), None)
    needed += dependencies.on_memory_ranks(rank, last_update)
    return needed + dependencies.on_stage_ranks(rank, Action(Verb.MEASURE, action.stage, NOMINAL_COUNT))


def _backward_weight(dependencies: Dependencies, rank: int, action: Action) -> list[Dependency]:
    return [Dependency(rank, Action(Verb.BACKWARD_INPUT, action.stage, action.index))]


def _send_forward(dependencies: Dependencies, rank: int, action: Action) -> list[Dependency]:
    return [Dependency(rank, Action(Verb.FORWARD, action.stage, action.index))]


def _send_backward(dependencies: Dependencies, rank: int, action: Action) -> list[Dependency]:
    wanted = [Action(verb, action.stage, action.index) for verb in (Verb.BACKWARD, Verb.BACKWARD_INPUT)]
    return dependencies.present(rank, *wanted)[:1] or [Dependency(rank, wanted[0])]


def _receive_forward(dependencies: Dependencies, rank: int, action: Action) -> list[Dependency]:
    return dependencies.from_stage(rank, action.stage - 1, action.index, Verb.SEND_FORWARD)


def _receive_backward(dependencies: Dependencies, rank: int, action: Action) -> list[Dependency]:
    return dependencies.from_stage(rank, action.stage + 1, action.index, Verb.SEND_BACKWARD)


def _measure(dependencies: Dependencies, rank: int, action: Action) -> list[Dependency]:
    own, stage = dependencies.own(rank), action.stage
    if action.index == NOMINAL_COUNT:
        return dependencies.present(rank, Action(Verb.FORWARD, stage, 0))
    if action.index == LOSS:
        return dependencies.present(rank, own.last.get((Verb.FORWARD, stage)))
    if action.index == USED_PARAMS:
        last = own.last.get((Verb.BACKWARD_WEIGHT, stage), own.last.get((Verb.BACKWARD, stage)))
        return dependencies.present(rank, last)
    if action.index == GRAD_NORM:  # of all stages of this rank
        return [Dependency(rank, each) for each in own.actions if each.verb == Verb.REDUCE]
    assert action.index == TRUST_NORMS
    # Update directions are made from scaled and clipped gradients, so they need the other measures of every rank.
    reduced = dependencies.all_in_stage(rank, Verb.REDUCE, stage)
    return reduced + dependencies.measures_before_update(rank, stage, excluded=action)


def _unshard(dependencies: Dependencies, rank: int, action: Action) -> list[Dependency]:
    own = dependencies.own(rank)
    return dependencies.present(rank, own.update_before.get(action), own.phase_before.get(action))


def _reduce(dependencies: Dependencies, rank: int, action: Action) -> list[Dependency]:
    return dependencies.present(rank, dependencies.own(rank).backward_before.get(action))


def _update(dependencies: Dependencies, rank: int, action: Action) -> list[Dependency]:
    own = dependencies.own(rank)
    if action in own.previous_step:
        return []
    # A measure only starts a sum; the update waits for it, and so for the addend of every rank.
    needed = [Dependency(rank, each) for each in own.reductions.get(action, [])]
    needed += dependencies.measures_before_update(rank, action.stage)
    if action in own.after_reductions and dependencies.has(rank, Action(Verb.GATHER, action.stage, action.index)):
        # The ranks of a host share these weights: none writes them while another's backward may read them.
        verbs = (Verb.BACKWARD_WEIGHT, Verb.BACKWARD)
        last = next((own.last[verb, action.stage] for verb in verbs if (verb, action.stage) in own.last), None)
        needed += dependencies.on_memory_ranks(rank, last)
    return needed


def _after_update(dependencies: Dependencies, rank: int, action: Action) -> list[Dependency]:
    return dependencies.present(rank, Action(Verb.UPDATE, action.stage, action.index))


def _pull(dependencies: Dependencies, rank: int, action: Action) -> list[Dependency]:
    return dependencies.on_stage_ranks(rank, Action(Verb.PUSH, action.stage, action.index))


def _tie(dependencies: Dependencies, rank: int, action: Action) -> list[Dependency]:
    """The last place receives what the first one has sent; it begins when the weights are updated."""
    owner, own = dependencies.tied_places(rank)
    return [] if rank == owner else [Dependency(owner, Action(action.verb, own, action.index))]


def _tie_gradient(dependencies: Dependencies, rank: int, action: Action) -> list[Dependency]:
    """The first place receives what the last one has added up, behind the last of its backwards in the program."""
    owner, _ = dependencies.tied_places(rank)
    if rank != owner:
        return []
    peers = [each for each in dependencies.pipeline_of(rank) if each != rank]
    return [Dependency(each, a) for each in peers for a in dependencies.own(each).actions if a.verb == action.verb]


DEPENDENCY_RULES: dict[Verb, Callable[[Dependencies, int, Action], list[Dependency]]] = {
    Verb.FORWARD: _forward,
    Verb.BACKWARD: _backward,
    Verb.BACKWARD_INPUT: _backward,
    Verb.BACKWARD_WEIGHT: _backward_weight,
    Verb.SEND_FORWARD: _send_forward,
    Verb.RECEIVE_FORWARD: _receive_forward,
    Verb.SEND_BACKWARD: _send_backward,
    Verb.RECEIVE_BACKWARD: _receive_backward,
    Verb.MEASURE: _measure,
    Verb.UNSHARD: _unshard,
    Verb.REDUCE: _reduce,
    Verb.UPDATE: _update,
    Verb.GATHER: _after_update,
    Verb.PUSH: _after_update,
    Verb.PULL: _pull,
    Verb.TIE: _tie,
    Verb.TIE_GRADIENT: _tie_gradient,
}
