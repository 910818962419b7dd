"""Describe the programs of all ranks: the actions as text, and what each of them means.

Law: ranks with equal programs are shown once; what `fourfold.words.program` prints is what a step runs.
"""

from collections.abc import Mapping, Sequence

from fourfold.plan.lowering import Blueprint
from fourfold.plan.plan import Plan
from fourfold.words.program import (
    GRAD_NORM,
    LOSS,
    NOMINAL_COUNT,
    TRUST_NORMS,
    USED_PARAMS,
    Action,
    Program,
    Verb,
)
from fourfold.words.text_table import indent, wrap

MEASURE_TEXTS = {
    LOSS: "sum the loss and the counts over all ranks",
    GRAD_NORM: "sum the gradient norm over all ranks",
    TRUST_NORMS: "sum the norms of every parameter's weight and direction over the ranks that share it",
    USED_PARAMS: "find which parameters have a gradient on any data rank",
    NOMINAL_COUNT: "sum the count of the first microbatch over the data ranks",
}
VERB_TEXTS = {
    Verb.FORWARD: "forward of a microbatch",
    Verb.BACKWARD: "backward of a microbatch",
    Verb.BACKWARD_INPUT: "backward of a microbatch, without the gradients of weights",
    Verb.BACKWARD_WEIGHT: "the gradients of weights of a microbatch",
    Verb.SEND_FORWARD: "send a microbatch's activations to the next stage; does not wait",
    Verb.RECEIVE_FORWARD: "receive a microbatch's activations from the stage before",
    Verb.SEND_BACKWARD: "send the gradients of a microbatch's activations to the stage before; does not wait",
    Verb.RECEIVE_BACKWARD: "receive the gradients of a microbatch's activations from the next stage",
    Verb.REDUCE: "sum a bucket's gradient over the data ranks; started while backward runs, in this order",
    Verb.UPDATE: "update a bucket's weights, or this rank's shard of them",
    Verb.UNSHARD: "all-gather a bucket's weights before a use; started ahead of it, in this order",
    Verb.GATHER: "all-gather the shards of a bucket's weights",
    Verb.TIE: "copy the weights that the first stage owns and the last one uses too",
    Verb.TIE_GRADIENT: "add the gradients of these copies to those of the weights",
    Verb.PUSH: "add the change of a bucket's weights on this rank to the sum over the data ranks",
    Verb.PULL: "take an outer step along the mean change: all data ranks have the same weights again",
}


def format_programs(blueprints: Mapping[str, Blueprint]) -> list[str]:
    """A section for each kind of step. `blueprints` are of one plan, by how its ranks reach each other.

    The programs are shown once if that makes no difference.
    """
    by_place = {place: blueprint.programs() for place, blueprint in blueprints.items()}
    first_place, first = next(iter(by_place.items()))
    plan = blueprints[first_place].plan
    if plan.sync == "local":
        often = f"in every {format_ordinal(plan.local_steps)} step"
        notes = {"ranks do not communicate gradients": first.local_step, often: first.step}
    elif all(programs.step == first.step for programs in by_place.values()):
        notes = {"": first.step}
    else:
        notes = {place: programs.step for place, programs in by_place.items()}
    return [_format_program(program, plan, note) for note, program in notes.items()]


def _format_program(program: Program, plan: Plan, note: str) -> str:
    """The programs of all ranks, those of ranks with equal programs together."""
    ranks_of: dict[tuple[Action, ...], list[int]] = {}
    for rank, actions in program.items():
        ranks_of.setdefault(actions, []).append(rank)
    lines = [line for actions, ranks in ranks_of.items() for line in _format_actions(actions, ranks, plan, note)]
    legend = dict.fromkeys(row for actions in ranks_of for row in _legend(actions, has_stages=plan.pp > 1))
    return "\n".join([*lines, *(f"  {word:<5}  {text}" for word, text in legend)])


def _format_actions(actions: Sequence[Action], ranks: Sequence[int], plan: Plan, note: str) -> list[str]:
    head = f"program   {plural('rank', len(ranks))} {format_ranges(ranks)}"
    head += ", all the same" if len(ranks) == plan.mesh.size > 1 else ""
    return [f"{head}; {note}" if note else head, indent(wrap([str(action) for action in actions]))]


def format_ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers as ranges: "0 to 3, 8"."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1][1:] = [number]
        else:
            ranges.append([number])
    return ", ".join(" to ".join(map(str, each)) for each in ranges)


def _legend(actions: Sequence[Action], *, has_stages: bool) -> list[tuple[str, str]]:
    """What the actions of a program mean: (word, text). `has_stages`: their stages are called s."""
    legend = []
    for verb, stage, index in dict.fromkeys(
        (a.verb, a.stage, a.index if a.verb == Verb.MEASURE else None) for a in actions
    ):
        word = f"{verb.value}{'s' if has_stages else stage}.{'k' if index is None else index}"
        legend.append((word, VERB_TEXTS[verb] if index is None else MEASURE_TEXTS[index]))
    num_buckets = sum(a.verb == Verb.UPDATE for a in actions)
    if any(a.verb == Verb.REDUCE and a.index >= num_buckets for a in actions):
        legend.append(("", f"reductions are numbered by microbatch × {num_buckets} + bucket"))
    if any(a.verb == Verb.UNSHARD for a in actions):
        legend.append(("", f"unshards are numbered by {num_buckets} × earlier unshards of the bucket + bucket"))
        legend.append(("", "their order is that in which the model uses its weights, which the first step finds;"))
        legend.append(("", "here it is their order of definition"))
    return legend


def format_ordinal(number: int) -> str:
    ending = "th" if number // 10 % 10 == 1 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def plural(noun: str, count: int) -> str:
    return noun if count == 1 else noun + "s"
