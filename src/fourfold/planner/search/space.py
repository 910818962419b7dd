"""Space: which plans an ask leaves open, for a task on a number of devices.

choice   the values of one open field that are worth a look, given those of the fields before it
group    plans that compute the same and differ in when and where: the fields of GROUP_FIELDS
variant  of a group: the fields of VARIANT_FIELDS
Law: a pinned field has its value in every plan; an open one has the default among its choices where that is legal.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from fourfold.plan.ask import Ask
from fourfold.plan.batch_split import batch_size_problems
from fourfold.plan.check import combination_problems, model_trait_problems
from fourfold.plan.model_traits import NO_TRAITS, ModelTraits
from fourfold.plan.plan import Plan
from fourfold.plan.plan_fields import PLAN_FIELDS
from fourfold.planner.predict.facts import ModelFacts, OperationKind
from fourfold.words.errors import Problem

Fields = Mapping[str, Any]


class Space(NamedTuple):
    """What the choices depend on.

    devices_per_host  tensor ranks share a host; None: they need not
    recomputes        the values of `recompute` for which activations are known
    tokens            of a sample; None: it has none, or no attention by which ranks could share them
    clip              the norm to which gradients are clipped
    has_equal_blocks  all blocks compute the same: there is no layer to treat on its own
    traits            what the model has that not every plan can be carried out with
    """

    num_devices: int
    devices_per_host: int | None
    batch_size: int
    num_blocks: int
    recomputes: tuple[str, ...]
    tokens: int | None
    clip: float | None
    has_equal_blocks: bool = True
    traits: ModelTraits = NO_TRAITS

    def problems(self, plan: Plan) -> list[Problem]:
        """Why a plan is no candidate: its fields do not go together, or with the batch, or with the model."""
        problems = combination_problems(plan, clip=self.clip) + model_trait_problems(plan, self.traits)
        return problems + batch_size_problems(self.batch_size, dp=plan.dp, microbatches=plan.microbatches)


def make_space(
    facts: ModelFacts,
    *,
    num_devices: int,
    devices_per_host: int | None,
    batch_size: int,
    clip: float | None,
    traits: ModelTraits = NO_TRAITS,
) -> Space:
    """The space of a task. `facts`: of a plan for one device."""
    kinds = {operation.kind for segment in facts.segments for operation in segment.operations}
    known = set.intersection(*(set(segment.saved_bytes) for segment in facts.segments))
    return Space(
        num_devices,
        devices_per_host,
        batch_size,
        len(facts.blocks),
        tuple(value for value in PLAN_FIELDS["recompute"].choices if value in known),
        facts.tokens if OperationKind.ATTENTION in kinds else None,
        clip,
        len({(block.operations, tuple(block.saved_bytes.items())) for block in facts.blocks}) <= 1,
        traits,
    )


# ---- choices ---------------------------------------------------------------------------------------


def divisors(number: int) -> list[int]:
    """In ascending order."""
    small = [each for each in range(1, int(number**0.5) + 1) if number % each == 0]
    return small + [number // each for each in reversed(small) if each * each != number]


def _tensor_sizes(space: Space, _: Fields) -> list[int]:
    host = space.devices_per_host
    sizes = divisors(space.num_devices)
    # Consecutive ranks share a host if their number divides its devices, or if there is only one host.
    return [tp for tp in sizes if host is None or host % tp == 0 or space.num_devices <= host]


def _context_sizes(space: Space, chosen: Fields) -> list[int]:
    if space.num_devices % chosen["tp"]:
        return []
    tokens = space.tokens or 1
    return [cp for cp in divisors(space.num_devices // chosen["tp"]) if tokens % cp == 0]


def _pipeline_sizes(space: Space, chosen: Fields) -> list[int]:
    inner = chosen["tp"] * chosen["cp"]
    if space.num_devices % inner:
        return []
    return [pp for pp in divisors(space.num_devices // inner) if pp == 1 or pp <= space.num_blocks]


def _data_sizes(space: Space, chosen: Fields) -> list[int]:
    inner = chosen["tp"] * chosen["cp"] * chosen["pp"]
    dp = space.num_devices // inner
    return [dp] if space.num_devices % inner == 0 and space.batch_size % dp == 0 else []


def _microbatches(space: Space, chosen: Fields) -> list[int]:
    """Those that divide the samples of a data rank; statistics of a batch need it whole."""
    batch_norm = chosen.get("batch_norm", Plan().batch_norm)
    is_whole = batch_norm == "sync" or (space.traits.batch_norms and batch_norm == "error")
    return [1] if is_whole or space.batch_size % chosen["dp"] else divisors(space.batch_size // chosen["dp"])


def _rings(_: Space, chosen: Fields) -> list[str]:
    return ["zigzag", "gather"] if chosen["cp"] > chosen["ulysses"] else ["zigzag"]


def _sequence_parallel(space: Space, chosen: Fields) -> list[bool]:
    can_split = chosen["tp"] > 1 and space.tokens is not None and space.tokens % (chosen["cp"] * chosen["tp"]) == 0
    return [False, True] if can_split else [False]


def _schedules(_: Space, chosen: Fields) -> list[str]:
    """The synchronous ones: an asynchronous schedule changes what is trained."""
    if chosen["pp"] == 1:
        return [Plan().schedule]
    halves = ["zero-bubble"] if chosen["recompute"] == "none" else []
    return ["1f1b", "gpipe", "interleaved", *halves]


def _interleaves(space: Space, chosen: Fields) -> list[int]:
    if chosen["schedule"] != "interleaved" or chosen["pp"] == 1:
        return [1]
    most = space.num_blocks // chosen["pp"]
    # Stages of unequal length gain little; two are worth a look on any model.
    return [v for v in range(2, most + 1) if v == 2 or space.num_blocks % (chosen["pp"] * v) == 0]


def _in_flight(_: Space, chosen: Fields) -> list[int | None]:
    """The memory of 1F1B, or that of ZB-H2, which leaves no bubble."""
    is_limited = chosen["schedule"] == "zero-bubble" and chosen["pp"] > 1
    return [None, 2 * chosen["pp"] - 1] if is_limited else [None]


def _zeros(_: Space, chosen: Fields) -> list[int]:
    return [0, 1, 2, 3] if chosen["dp"] * chosen["cp"] > 1 else [0]


def _shards(space: Space, chosen: Fields) -> list[int | None]:
    """Among all data ranks, or among those of a host."""
    in_host = (space.devices_per_host or 0) // (chosen["cp"] * chosen["tp"])
    is_apart = chosen["zero"] > 0 and 1 < in_host < chosen["dp"] and chosen["dp"] % in_host == 0
    return [None, in_host] if is_apart else [None]


def _updates(space: Space, _: Fields) -> list[str]:
    return ["after", "in_forward"] if space.clip is not None else ["after", "in_backward", "in_forward"]


CHOICES: dict[str, Callable[[Space, Fields], Sequence[Any]]] = {
    "precision": lambda *_: ["keep", "bf16"],
    "tp": _tensor_sizes,
    "cp": _context_sizes,
    "pp": _pipeline_sizes,
    "dp": _data_sizes,
    "ulysses": lambda _, chosen: divisors(chosen["cp"]),
    "ring": _rings,
    "sequence_parallel": _sequence_parallel,
    "microbatches": _microbatches,
    "recompute": lambda space, _: space.recomputes,
    "schedule": _schedules,
    "interleave": _interleaves,
    "max_in_flight": _in_flight,
    "zero": _zeros,
    "shard": _shards,
    "update": _updates,
}
"""By field, in the order in which they are chosen: a choice looks at those before it."""
GROUP_FIELDS = tuple(CHOICES)[:10]
VARIANT_FIELDS = tuple(CHOICES)[10:]


def groups(ask: Ask, space: Space) -> Iterator[dict[str, Any]]:
    """What the plans of each group have in common, pinned fields included. Groups of one mesh are neighbours."""
    fixed = {name: value for name, value in ask.pinned.items() if name not in CHOICES}
    yield from expand(GROUP_FIELDS, fixed, ask, space)


def variants(group: Fields, ask: Ask, space: Space) -> Iterator[dict[str, Any]]:
    """The fields of each plan of a group."""
    yield from expand(VARIANT_FIELDS, group, ask, space)


def expand(names: Sequence[str], chosen: Fields, ask: Ask, space: Space) -> Iterator[dict[str, Any]]:
    """All ways to choose these fields, one after the other."""
    if not names:
        yield dict(chosen)
        return
    name, *rest = names
    for value in choices(name, chosen, ask, space):
        yield from expand(rest, {**chosen, name: value}, ask, space)


def choices(name: str, chosen: Fields, ask: Ask, space: Space) -> Sequence[Any]:
    """The values of a field, given those before it. What is pinned is judged with the whole plan, the mesh excepted."""
    if name in ask.pinned:
        is_possible = name != "dp" or space.num_devices == math.prod(chosen[axis] for axis in ("tp", "cp", "pp")) * int(
            ask.pinned["dp"]  # type: ignore[arg-type]
        )
        return [ask.pinned[name]] if is_possible else []
    return CHOICES[name](space, chosen) if ask.is_open(name) else [getattr(Plan(), name)]
