"""Single layers: a second search, by a Markov chain, for models whose layers differ.

move      of one layer over a boundary of stages; of one or two named dims on or off the tensor axis; of a factor
          between two axes of the mesh; of one other open field to another value
proposal  a move from the present plan; taken if it is faster, else with probability exp(-STEEPNESS · relative loss)
budget    the number of proposals; half of it without a better plan ends the search
Law: what is found is not slower than any plan that the search begins with, and depends on the seed alone.

FlexFlow's dimensions (Jia et al., 1807.05358, §4, §6.1): sample = dp, operation = pp, attribute = cp, parameter = tp.
What a Plan says of single layers is searched: the stage of each layer, and the dims of its weights that tensor rules
name. A Plan has one mesh for all layers. So a degree of dp, cp or tp for each layer, devices that are no part of the
mesh, and stages with unequal numbers of devices cannot be expressed, and are not searched.
"""

import dataclasses
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

from fourfold.axes.pipeline.rules.division import EVEN
from fourfold.axes.tensor.rules.dims import TENSOR_AXIS, dims_on_axis
from fourfold.plan.ask import Ask
from fourfold.plan.plan import Plan
from fourfold.planner.predict.prediction import Prediction
from fourfold.planner.search.search import Question
from fourfold.planner.search.space import CHOICES, divisors
from fourfold.words.errors import PlanError
from fourfold.words.mesh import AXES

BUDGET = 400
STEEPNESS = 40.0  # a plan that is 5 % slower is taken in one of seven proposals
DEPENDS_ON = {"pp": ("stages", "interleave", "schedule", "max_in_flight"), "cp": ("ulysses", "ring"), "dp": ("shard",)}
Fields = dict[str, Any]


def search_layers(
    starts: Sequence[Prediction], question: Question, *, budget: int = BUDGET, seed: int = 0
) -> tuple[Prediction, ...]:
    """The plans that are faster than the one before them, from the fastest start on, the fastest last."""
    generator = random.Random(seed)
    found = [min(starts, key=lambda each: each.seconds)]
    if not _moves(question.ask):
        return tuple(found)
    for start in starts:
        present, since_better, share = start, 0, budget // len(starts)
        for _ in range(share):
            proposal = _propose(present.plan, question, generator)
            predicted = None if proposal is None else _estimate(proposal, question)
            since_better += 1
            if predicted is not None:
                loss = max(0.0, predicted.seconds / present.seconds - 1)
                if generator.random() < math.exp(-STEEPNESS * loss):
                    present = predicted
                if predicted.seconds < found[-1].seconds:
                    found.append(predicted)
                    since_better = 0
            if since_better > share / 2:
                break
    return tuple(found)


def _estimate(plan: Plan, question: Question) -> Prediction | None:
    """None: the plan cannot be carried out, or does not fit."""
    try:
        found = question.pricing.estimate(plan)
    except PlanError:
        return None
    is_legal = found.memory.total <= question.limit_bytes and not question.pricing.problems(plan)
    return found if is_legal else None


def _propose(plan: Plan, question: Question, generator: random.Random) -> Plan | None:
    """The plan after a random move; None: the move is not possible, or what it changes is pinned."""
    fields = dataclasses.asdict(plan)
    moved = generator.choice(_moves(question.ask))(fields, question, generator)
    changed = [] if moved is None else [name for name, value in moved.items() if value != fields[name]]
    if moved is None or not changed or not all(question.ask.is_open(name) for name in changed):
        return None
    try:
        proposal = Plan.from_dict(moved)
    except PlanError:
        return None
    return None if question.space.problems(proposal) else proposal


def _moves(ask: Ask) -> list[Callable[[Fields, Question, random.Random], Fields | None]]:
    """The moves that change something that is open."""
    others = [name for name in CHOICES if name not in AXES]
    moves = {
        _move_layer: ask.is_open("stages"),
        _move_dim: ask.is_open("dims"),
        _move_factor: sum(map(ask.is_open, AXES)) > 1,
        _move_field: any(map(ask.is_open, others)),
    }
    return [move for move, is_possible in moves.items() if is_possible]


def _move_layer(fields: Fields, question: Question, generator: random.Random) -> Fields | None:
    """One block goes over a boundary to the stage before or behind."""
    num_stages = fields["pp"] * fields["interleave"]
    if fields["pp"] == 1:
        return None
    if fields["stages"] == EVEN:
        counts = [len(blocks) for blocks in question.pricing.stage_blocks(Plan.from_dict(fields))]
    else:
        counts = [int(count) for count in fields["stages"].split(",")]
    boundary, direction = generator.randrange(num_stages - 1), generator.choice((-1, 1))
    counts[boundary] += direction
    counts[boundary + 1] -= direction
    return {**fields, "stages": ",".join(map(str, counts))} if min(counts) > 0 else None


def _move_dim(fields: Fields, question: Question, generator: random.Random) -> Fields | None:
    """One named dim of the weights goes on or off the tensor axis."""
    if fields["tp"] == 1 or not question.dims:
        return None
    split = set(dims_on_axis(fields["dims"]) or (name for name, is_marked in question.dims.items() if is_marked))
    # Two at once, too: one in place of another one.
    split ^= set(generator.sample(list(question.dims), min(generator.choice((1, 2)), len(question.dims))))
    if not split:
        return None  # `dims` would be empty, and the rules would decide
    return {**fields, "dims": " ".join(f"{name}:{TENSOR_AXIS}" for name in question.dims if name in split)}


def _move_factor(fields: Fields, question: Question, generator: random.Random) -> Fields | None:
    """A prime factor of one axis goes to another one; what depends on the two falls back to its default."""
    source, target = generator.sample(AXES, 2)
    factors = [each for each in divisors(fields[source])[1:] if len(divisors(each)) == 2]
    if not factors:
        return None
    factor = generator.choice(factors)
    moved = {**fields, source: fields[source] // factor, target: fields[target] * factor}
    names = [name for axis in (source, target) for name in DEPENDS_ON.get(axis, ()) if question.ask.is_open(name)]
    moved |= {name: getattr(Plan(), name) for name in names}
    if question.ask.is_open("microbatches"):
        moved["microbatches"] = generator.choice(CHOICES["microbatches"](question.space, moved))
    host = question.space.devices_per_host
    return moved if host is None or moved["tp"] == fields["tp"] or host % moved["tp"] == 0 else None


def _move_field(fields: Fields, question: Question, generator: random.Random) -> Fields | None:
    """One other field takes another value; a schedule that needs other numbers of stages brings them."""
    name = generator.choice([name for name in CHOICES if name not in AXES and question.ask.is_open(name)])
    moved = {**fields, name: generator.choice(CHOICES[name](question.space, fields))}
    if name == "schedule":
        for each in ("interleave", "max_in_flight"):
            if question.ask.is_open(each):
                moved[each] = generator.choice(CHOICES[each](question.space, moved) or [getattr(Plan(), each)])
        if moved["interleave"] != fields["interleave"] and question.ask.is_open("stages"):
            moved["stages"] = EVEN
    return moved
