"""Baselines: the plans that an expert would write without a search.

family  the plans of a baseline: what makes it what it is is pinned, its microbatches and `recompute` are open
others  the fields that no baseline is about: an ask may pin them, and else they have their defaults
Law: a baseline is an ask with more pins, so its plans are among those that a search without pins sees.
Source: Narayanan et al., 2104.04473, takeaways 1 to 3: tensor parallelism up to the devices of a node, then a pipeline
across nodes, just large enough to fit; data parallelism with the rest.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from fourfold.plan.ask import AUTO, Ask
from fourfold.plan.plan import Plan
from fourfold.plan.plan_fields import PLAN_FIELDS
from fourfold.planner.predict.prediction import Prediction
from fourfold.planner.search.decision import Progress, Refused
from fourfold.planner.search.search import Found, Question, search
from fourfold.planner.search.space import CHOICES, Space, divisors
from fourfold.words.errors import PlanError, Problem
from fourfold.words.field import value_text

MEGATRON, ONE_DEVICE = "Megatron's layout", "one device"
OPEN = ("microbatches", "recompute", "precision")
ALONE = {"pp": 1, "cp": 1, "tp": 1}
EVEN_STAGES = {"stages": "even"}

Pins = Mapping[str, Any]


def price_baselines(question: Question) -> dict[str, Prediction | Refused]:
    """The best plan of each baseline, estimated. One that differs from what the ask pins is refused, with its price."""
    space, progress = question.space, question.progress or Progress()
    one_device: list[Pins] = [{**ALONE, "dp": 1, "zero": 0}]
    families = {ONE_DEVICE: one_device} if space.num_devices == 1 else _families(space)
    found: dict[str, Prediction | Refused | None] = {}
    progress.begin("pricing baselines", len(families) + 1)
    for name, pins in families.items():
        found[name] = each = _best_of(pins, question)
        progress.done += 1
        if isinstance(each, Prediction):
            progress.offer(each)
    if space.num_devices > 1:
        found[MEGATRON] = _megatron(question)
    return {name: each for name, each in found.items() if each is not None}


def _families(space: Space) -> dict[str, list[Pins]]:
    """By name: the pins of each family. Several: they are tried in turn, until the model can be laid out so."""
    size = space.num_devices
    families: dict[str, list[Pins]] = {
        f"data parallelism, zero {zero}": [{**ALONE, "dp": size, "zero": zero}] for zero in PLAN_FIELDS["zero"].choices
    }
    sizes = [tp for tp in _tensor_sizes(space) if tp > 1]
    in_node: list[Pins] = [{"pp": 1, "cp": 1, "zero": 0, "tp": tp, "dp": size // tp} for tp in sizes]
    families["tensor parallelism in a node"] = in_node
    deep = [pp for pp in reversed(divisors(size)) if 1 < pp <= space.num_blocks]
    one_f_one_b = {"cp": 1, "tp": 1, "zero": 0, "schedule": "1f1b", **EVEN_STAGES}
    families["1F1B alone"] = [{**one_f_one_b, "pp": pp, "dp": size // pp} for pp in deep]
    return families


def _tensor_sizes(space: Space) -> list[int]:
    """As many tensor ranks as a node has devices; less, where the model cannot be split so far."""
    return list(reversed(CHOICES["tp"](space, {})))


def _megatron(question: Question) -> Prediction | Refused | None:
    """The shortest pipeline of full nodes that fits. If none does, the one that comes closest."""
    refused: list[Refused] = []
    for pins in sorted(_megatron_layouts(question.space), key=lambda pins: len(_conflicts(pins, question.ask))):
        schedules: list[Pins] = [{**pins, "schedule": "1f1b"}]
        if 1 < pins["pp"] <= question.space.num_blocks // 2:
            schedules.append({**pins, "schedule": "interleaved", "interleave": 2})
        found = [best for each in schedules if (best := _best_of([each], question)) is not None]
        fits = [each for each in found if isinstance(each, Prediction)]
        if fits:
            return min(fits, key=lambda each: each.seconds)
        refused += [each for each in found if isinstance(each, Refused)]
    return min(refused, key=lambda each: (each.prediction is None, each.excess_bytes), default=None)


def _megatron_layouts(space: Space) -> Iterator[Pins]:
    """Full nodes first, then short pipelines first."""
    for tp in _tensor_sizes(space):
        for pp in divisors(space.num_devices // tp):
            if pp <= space.num_blocks:
                mesh = {"tp": tp, "cp": 1, "pp": pp, "dp": space.num_devices // tp // pp}
                yield {**mesh, "zero": 0, **EVEN_STAGES}


def _best_of(families: list[Pins], question: Question) -> Prediction | Refused | None:
    """The fastest plan of the first family that the model allows, those that agree with the ask first."""
    refused = None
    for pins in sorted(families, key=lambda pins: len(_conflicts(pins, question.ask))):
        conflicts, found = _conflicts(pins, question.ask), _search(pins, question)
        if found.kept and not conflicts:
            return min(found.kept, key=lambda each: each.seconds)
        if found.kept or found.too_large:
            return _refused(found, question, tuple(conflicts))
        if found.problems and refused is None:
            mesh = {name: pins[name] for name in ("pp", "dp", "cp", "tp", "zero")}
            refused = Refused(Plan.from_dict(mesh), question.limit_bytes, tuple(found.problems))
    return refused


def _refused(found: Found, question: Question, conflicts: tuple[Problem, ...]) -> Refused:
    best = min(found.kept, key=lambda each: each.seconds, default=None) or min(
        found.too_large, key=lambda each: each.memory.total
    )
    return Refused(best.plan, question.limit_bytes, conflicts, best)


def _conflicts(pins: Pins, ask: Ask) -> list[Problem]:
    """Where a family differs from what the ask pins."""
    return [
        Problem(
            f"{name} = {value_text(value)}",
            f"{name} = {value_text(ask.pinned[name])}, as the ask pins it",
            f"an ask without {name}",
        )
        for name, value in pins.items()
        if name in ask.pinned and ask.pinned[name] != value
    ]


def _search(pins: Pins, question: Question) -> Found:
    """The plans of a family."""
    ask = question.ask
    others = {name: getattr(Plan(), name) for name in CHOICES if name not in (*pins, *OPEN)}
    try:
        family = Ask(**{**others, **dict.fromkeys(ask.requested, AUTO), **ask.pinned, **pins})
    except PlanError as error:  # such as zero = 0, where the ask pins shard
        return Found(problems=dict.fromkeys(error.problems))
    return search(question.within(ask=family), margin=1.0)


def fitting(baselines: Mapping[str, Prediction | Refused]) -> Iterator[Prediction]:
    """The baselines that fit and have what the ask pins."""
    return (each for each in baselines.values() if isinstance(each, Prediction))
