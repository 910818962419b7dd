"""Schedules: in which order each pipeline index computes the forwards and backwards of a step.

pipeline index  a rank's place on the pp axis
stage           a chunk of the model; pp × interleave of them, stage s on pipeline index s % pp, as in Megatron
lists           by pipeline index, its compute actions in order: F and B, or F, I and W
warm-up         the forwards of an index in front of its first backward
in flight       the microbatches whose forward has run and whose backward has not; their activations are alive
Law: a schedule's lists hold every forward and backward of every stage and microbatch once, and they end.
Sources: GPipe (Huang et al., 1811.06965); 1F1B: PipeDream-Flush (Narayanan et al., 2006.09503) and DAPPLE (Fan et al.,
2007.01045); interleaved 1F1B (Narayanan et al., 2104.04473, §2.2).
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from fourfold.words.errors import Problem, closest_match
from fourfold.words.program import Action, Verb

ComputeLists = tuple[tuple[Action, ...], ...]


class PipelineSpec(NamedTuple):
    """What a schedule is made for."""

    pp: int
    microbatches: int
    interleave: int = 1

    @property
    def num_stages(self) -> int:
        return self.pp * self.interleave


class Schedule(NamedTuple):
    """A row of the table: the function that makes the lists, and what it can be made for."""

    make: Callable[[PipelineSpec], ComputeLists]
    problems: Callable[[PipelineSpec], list[Problem]]


def owner_of(stage: int, pp: int) -> int:
    """The pipeline index that holds a stage."""
    return stage % pp


def compute_actions(schedule: str, *, pp: int, microbatches: int, interleave: int = 1) -> ComputeLists:
    """By pipeline index, the forwards and backwards of one step; the index of an action is its microbatch.

    The arguments are those of which `schedule_problems` finds none.
    """
    return SCHEDULES[schedule].make(PipelineSpec(pp, microbatches, interleave))


def schedule_problems(schedule: str, *, pp: int, microbatches: int, interleave: int = 1) -> list[Problem]:
    """Why a schedule cannot be made for these sizes, and what would work."""
    if schedule not in SCHEDULES:
        names = ", ".join(SCHEDULES)
        return [Problem(f"schedule = {schedule!r}", f"one of {names}", closest_match(schedule, SCHEDULES) or "")]
    return SCHEDULES[schedule].problems(PipelineSpec(pp, microbatches, interleave))


def gpipe(spec: PipelineSpec) -> ComputeLists:
    """All forwards, then all backwards. These run in order of microbatch, so gradients are summed as in 1F1B."""
    return tuple(
        tuple(Action(verb, stage, i) for verb in (Verb.FORWARD, Verb.BACKWARD) for i in range(spec.microbatches))
        for stage in range(spec.pp)
    )


def one_f_one_b(spec: PipelineSpec) -> ComputeLists:
    """A warm-up of pp − 1 − stage forwards, then one forward and one backward in turn: pp − stage in flight."""
    return tuple(
        _alternate(
            [Action(Verb.FORWARD, stage, i) for i in range(spec.microbatches)],
            [Action(Verb.BACKWARD, stage, i) for i in range(spec.microbatches)],
            warm_up=spec.pp - 1 - stage,
        )
        for stage in range(spec.pp)
    )


def interleaved(spec: PipelineSpec) -> ComputeLists:
    """1F1B over the chunks of each index: pp microbatches go through one chunk, then through the next one."""
    lists = []
    for index in range(spec.pp):
        forwards = [Action(Verb.FORWARD, chunk * spec.pp + index, i) for chunk, i in _chunk_order(spec)]
        last = spec.num_stages - spec.pp + index
        backwards = [Action(Verb.BACKWARD, last - chunk * spec.pp, i) for chunk, i in _chunk_order(spec)]
        # Twice as many as in 1F1B: an index that has passed on a forward has another one to do before the backward of
        # the first one can come back.
        warm_up = 2 * (spec.pp - 1 - index) + (spec.interleave - 1) * spec.pp
        lists.append(_alternate(forwards, backwards, warm_up=warm_up))
    return tuple(lists)


def _chunk_order(spec: PipelineSpec) -> Iterator[tuple[int, int]]:
    """Chunk and microbatch, in groups of pp microbatches."""
    for first in range(0, spec.microbatches, spec.pp):
        for chunk in range(spec.interleave):
            for microbatch in range(first, first + spec.pp):
                yield chunk, microbatch


def _alternate(forwards: Sequence[Action], backwards: Sequence[Action], *, warm_up: int) -> tuple[Action, ...]:
    """The warm-up, then one forward and one backward in turn, then the backwards that are left."""
    warm_up = min(warm_up, len(forwards))
    actions = list(forwards[:warm_up])
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        actions += [forward, backward]
    return (*actions, *backwards[len(forwards) - warm_up :])


def _one_stage_each(spec: PipelineSpec) -> list[Problem]:
    if spec.interleave == 1:
        return []
    return [Problem(f"interleave = {spec.interleave}", "1 without interleaving", "schedule = interleaved")]


def _interleaved_problems(spec: PipelineSpec) -> list[Problem]:
    problems = []
    if spec.interleave == 1:
        problems.append(Problem("schedule = interleaved, interleave = 1", "interleave ≥ 2", "2, or schedule = 1f1b"))
    if spec.microbatches % spec.pp:
        below, above = spec.microbatches // spec.pp * spec.pp, -(-spec.microbatches // spec.pp) * spec.pp
        choices = f"microbatches = {above}" if not below else f"microbatches = {below} or {above}"
        got = f"schedule = interleaved, microbatches = {spec.microbatches}"
        problems.append(Problem(got, f"microbatches divisible by pp = {spec.pp}", f"{choices}, or schedule = 1f1b"))
    return problems


SCHEDULES = {
    "gpipe": Schedule(gpipe, _one_stage_each),
    "1f1b": Schedule(one_f_one_b, _one_stage_each),
    "interleaved": Schedule(interleaved, _interleaved_problems),
}
