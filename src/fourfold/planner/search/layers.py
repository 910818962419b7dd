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
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from fourfold.axes.pipeline.rules.division import EVEN
from fourfold.axes.tensor.rules.dims import TENSOR_AXIS, dims_on_axis
from fourfold.plan.ask import Ask
from fourfold.plan.plan import Plan
from fourfold.planner.predict.prediction import Prediction
from fourfold.planner.search.space import CHOICES, Space, divisors
from fourfold.planner.search.step_pricing import Pricing
from fourfold.words.errors import PlanError
from fourfold.words.mesh import AXES

BUDGET = 400
STEEPNESS = 40.0  # a plan that is 5 % slower is taken in one of seven proposals
DEPENDS_ON = {"pp": ("stages", "interleave", "schedule", "max_in_flight"), "cp": ("ulysses", "ring"), "dp": ("shard",)}
NO_DIMS: Mapping[str, bool] = {}
Fields = dict[str, Any]


class Chain(NamedTuple):
    """What the Markov chain walks in.

    dims  that the task's tensor rules name, and whether they are on the tensor axis where a plan has no `dims`
    """

    ask: Ask
    space: Space
    pricing: Pricing
    limit_bytes: float
    dims: Mapping[str, bool] = NO_DIMS


def search_layers(
    starts: Sequence[Prediction], chain: Chain, *, budget: int = BUDGET, seed: int = 0
) -> tuple[Prediction, ...]:
    """The plans that are faster than the one before them, from the fastest start on, the fastest last."""
    generator = random.Random(seed)
    found = [min(starts, key=lambda each: each.seconds)]
    if not _moves(chain.ask):
        return tuple(found)
    for start in starts:
        present, since_better, share = start, 0, budget // len(starts)
        for _ in range(share):
            proposal = _propose(present.plan, chain, generator)
            predicted = None if proposal is None else _estimate(proposal, chain)
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


def _estimate(plan: Plan, chain: Chain) -> Prediction | None:
    """None: the plan cannot be carried out, or does not fit."""
    try:
        found = chain.pricing.estimate(plan)
    except PlanError:
        return None
    is_legal = found.memory.total <= chain.limit_bytes and not chain.pricing.problems(plan)
    return found if is_legal else None


def _propose(plan: Plan, chain: Chain, generator: random.Random) -> Plan | None:
    """The plan after a random move; None: the move is not possible, or what it changes is pinned."""
    fields = dataclasses.asdict(plan)
    moved = generator.choice(_moves(chain.ask))(fields, chain, generator)
    changed = [] if moved is None else [name for name, value in moved.items() if value != fields[name]]
    if moved is None or not changed or not all(chain.ask.is_open(name) for name in changed):
        return None
    try:
        proposal = Plan.from_dict(moved)
    except PlanError:
        return None
    return None if chain.space.problems(proposal) else proposal


def _moves(ask: Ask) -> list[Callable[[Fields, Chain, random.Random], Fields | None]]:
    """The moves that change something that is open."""
    others = [name for name in CHOICES if name not in AXES]
    moves = {
        _move_layer: ask.is_open("stages"),
        _move_dim: ask.is_open("dims"),
        _move_factor: sum(map(ask.is_open, AXES)) > 1,
        _move_field: any(map(ask.is_open, others)),
    }
    return [move for move, is_possible in moves.items() if is_possible]


def _move_layer(fields: Fields, chain: Chain, generator: random.Random) -> Fields | None:
    """One block goes over a boundary to the stage before or behind."""
    num_stages = fields["pp"] * fields["interleave"]
    if fields["pp"] == 1:
        return None
    if fields["stages"] == EVEN:
        counts = [len(blocks) for blocks in chain.pricing.stage_blocks(Plan.from_dict(fields))]
    else:
        counts = [int(count) for count in fields["stages"].split(",")]
    boundary, direction = generator.randrange(num_stages - 1), generator.choice((-1, 1))
    counts[boundary] += direction
    counts[boundary + 1] -= direction
    return {**fields, "stages": ",".join(map(str, counts))} if min(counts) > 0 else None


def _move_dim(fields: Fields, chain: Chain, generator: random.Random) -> Fields | None:
    """One named dim of the weights goes on or off the tensor axis."""
    if fields["tp"] == 1 or not chain.dims:
        return None
    split = set(dims_on_axis(fields["dims"]) or (name for name, is_marked in chain.dims.items() if is_marked))
    # Two at once, too: one in place of another one.
    split ^= set(generator.sample(list(chain.dims), min(generator.choice((1, 2)), len(chain.dims))))
    if not split:
        return None  # `dims` would be empty, and the rules would decide
    return {**fields, "dims": " ".join(f"{name}:{TENSOR_AXIS}" for name in chain.dims if name in split)}


def _move_factor(fields: Fields, chain: Chain, generator: random.Random) -> Fields | None:
    """A prime factor of one axis goes to another one; what depends on the two falls back to its default."""
    source, target = generator.sample(AXES, 2)
    factors = [each for each in divisors(fields[source])[1:] if len(divisors(each)) == 2]
    if not factors:
        return None
    factor = generator.choice(factors)
    moved = {**fields, source: fields[source] // factor, target: fields[target] * factor}
    names = [name for axis in (source, target) for name in DEPENDS_ON.get(axis, ()) if chain.ask.is_open(name)]
    moved |= {name: getattr(Plan(), name) for name in names}
    if chain.ask.is_open("microbatches"):
        moved["microbatches"] = generator.choice(CHOICES["microbatches"](chain.space, moved))
    host = chain.space.devices_per_host
    return moved if host is None or moved["tp"] == fields["tp"] or host % moved["tp"] == 0 else None


def _move_field(fields: Fields, chain: Chain, generator: random.Random) -> Fields | None:
    """One other field takes another value; a schedule that needs other numbers of stages brings them."""
    name = generator.choice([name for name in CHOICES if name not in AXES and chain.ask.is_open(name)])
    moved = {**fields, name: generator.choice(CHOICES[name](chain.space, fields))}
    if name == "schedule":
        for each in ("interleave", "max_in_flight"):
            if chain.ask.is_open(each):
                moved[each] = generator.choice(CHOICES[each](chain.space, moved) or [getattr(Plan(), each)])
        if moved["interleave"] != fields["interleave"] and chain.ask.is_open("stages"):
            moved["stages"] = EVEN
    return moved
