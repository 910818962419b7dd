"""Schedules: in which order each pipeline index computes the forwards and backwards of a step.

schedule  a row of `SCHEDULES`: a function that makes the lists, and what it can be made for
lists     by pipeline index, its compute actions in order
Law: a schedule's lists hold every forward and backward of every stage and microbatch once, and they end.
"""

from collections.abc import Callable
from typing import NamedTuple

from fourfold.plan.pipeline.asynchronous import undrained
from fourfold.plan.pipeline.checker import read_written
from fourfold.plan.pipeline.spec import EQUAL_COSTS, BlockCosts, ComputeLists, PipelineSpec
from fourfold.plan.pipeline.synchronous import gpipe, interleaved, one_f_one_b
from fourfold.plan.pipeline.zero_bubble import zero_bubble
from fourfold.words.errors import Problem, closest_match

PROGRAM_EXAMPLE = "program=FILE with lines such as 0: F0.0 B0.0"


class Schedule(NamedTuple):
    """A row of the table: the function that makes the lists, and what it can be made for.

    divides_backward  whether its lists have both halves of each backward; None: the lists say
    """

    make: Callable[[PipelineSpec], ComputeLists]
    problems: Callable[[PipelineSpec], list[Problem]]
    divides_backward: bool | None = False


def compute_actions(
    schedule: str,
    *,
    pp: int,
    microbatches: int,
    interleave: int = 1,
    num_batches: int = 1,
    max_in_flight: int | None = None,
    costs: BlockCosts = EQUAL_COSTS,
    program: str = "",
) -> ComputeLists:
    """By pipeline index, the compute actions of one step, or of several batches of an asynchronous schedule, which
    `batch_actions` divides into steps. The index of an action is its microbatch, counted over all batches.

    The arguments are those of which `schedule_problems` finds none; `PipelineSpec` says what they mean.
    """
    spec = PipelineSpec(pp, microbatches, interleave, num_batches, max_in_flight, costs, program)
    return SCHEDULES[schedule].make(spec)


def schedule_problems(
    schedule: str,
    *,
    pp: int,
    microbatches: int,
    interleave: int = 1,
    max_in_flight: int | None = None,
    program: str = "",
) -> list[Problem]:
    """Why a schedule cannot be made for these sizes, and what would work."""
    if schedule not in SCHEDULES:
        names = ", ".join(SCHEDULES)
        return [Problem(f"schedule = {schedule!r}", f"one of {names}", closest_match(schedule, SCHEDULES) or "")]
    spec = PipelineSpec(pp, microbatches, interleave, max_in_flight=max_in_flight, program=program)
    return _limit_problems(schedule, spec) + SCHEDULES[schedule].problems(spec)


def _limit_problems(schedule: str, spec: PipelineSpec) -> list[Problem]:
    if spec.max_in_flight is None:
        return []
    got = f"a limit of {spec.max_in_flight} microbatches in flight"
    if schedule != "zero-bubble":
        return [Problem(f"schedule = {schedule}, {got}", "no limit: it has its own", "schedule = zero-bubble")]
    return [] if spec.max_in_flight > 0 else [Problem(got, "at least 1", f"{spec.pp}, as in 1F1B")]


def _one_stage_each(spec: PipelineSpec) -> list[Problem]:
    if spec.interleave == 1:
        return []
    return [Problem(f"interleave = {spec.interleave}", "1 without interleaving", "schedule = interleaved")]


def _interleaved_problems(spec: PipelineSpec) -> list[Problem]:
    problems = []
    if spec.interleave == 1:
        problems.append(
            Problem("schedule = interleaved, interleave = 1", "interleave ≥ 2", "interleave = 2, or schedule = 1f1b")
        )
    if spec.microbatches % spec.pp:
        below, above = spec.microbatches // spec.pp * spec.pp, -(-spec.microbatches // spec.pp) * spec.pp
        choices = f"microbatches = {above}" if not below else f"microbatches = {below} or {above}"
        got = f"schedule = interleaved, microbatches = {spec.microbatches}"
        problems.append(Problem(got, f"microbatches divisible by pp = {spec.pp}", f"{choices}, or schedule = 1f1b"))
    return problems


def _pipedream_problems(spec: PipelineSpec) -> list[Problem]:
    problems = _one_stage_each(spec)
    if spec.microbatches > 1:
        got = f"schedule = pipedream, microbatches = {spec.microbatches}"
        problems.append(Problem(got, "microbatches = 1: it updates after every backward", "schedule = 2bw"))
    return problems


def _two_buffered_problems(spec: PipelineSpec) -> list[Problem]:
    problems = _one_stage_each(spec)
    if spec.microbatches < spec.pp:
        got = f"schedule = 2bw, microbatches = {spec.microbatches}"
        problems.append(Problem(got, f"at least pp = {spec.pp}", f"microbatches = {spec.pp}"))
    return problems


def _written(spec: PipelineSpec) -> ComputeLists:
    """The lists of a program that a user has written."""
    return read_written(spec.program, spec)[0]


def _written_problems(spec: PipelineSpec) -> list[Problem]:
    if not spec.program.strip():
        return [
            Problem("schedule = written without a program", "a line of actions for each rank of pp", PROGRAM_EXAMPLE)
        ]
    return read_written(spec.program, spec)[1]


SCHEDULES = {
    "gpipe": Schedule(gpipe, _one_stage_each),
    "1f1b": Schedule(one_f_one_b, _one_stage_each),
    "interleaved": Schedule(interleaved, _interleaved_problems),
    "zero-bubble": Schedule(zero_bubble, _one_stage_each, divides_backward=True),
    "pipedream": Schedule(undrained, _pipedream_problems),
    "2bw": Schedule(undrained, _two_buffered_problems),
    "written": Schedule(_written, _written_problems, divides_backward=None),
}
