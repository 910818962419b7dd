"""A made-up machine and model for laws of the planner: a closed form that is small enough to read.

Law: every rate is a cost: the seconds of a plan grow with each of them.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from fourfold.axes.pipeline.rules.division import divide, division_problems
from fourfold.axes.tensor.rules.dims import dims_on_axis
from fourfold.plan.ask import Ask
from fourfold.plan.check import combination_problems
from fourfold.plan.plan import Plan
from fourfold.planner.predict.prediction import MemoryParts, Prediction, StepTerms
from fourfold.planner.search.search import Question
from fourfold.planner.search.space import Space
from fourfold.planner.search.step_pricing import Chain, Segment, StepPricing, Submesh, best_division, division_of
from fourfold.words.errors import PlanError, Problem

RECOMPUTED = {"none": 0.0, "selective": 0.05, "full": 0.33}
SAVED = {"none": 1.0, "selective": 0.7, "full": 0.1}


@dataclass(frozen=True)
class Rates:
    """Seconds of a unit."""

    compute: float = 1.0
    call: float = 0.1
    tensor: float = 0.1
    context: float = 0.1
    edge: float = 0.05
    reduce: float = 0.02
    gather: float = 0.02
    update: float = 0.01
    overhead: float = 0.1


@dataclass(frozen=True)
class Model:
    """Blocks: seconds of a sample, weights, and what is saved of a sample."""

    blocks: tuple[tuple[float, float, float], ...] = ((1.0, 4.0, 1.0),) * 4
    first: tuple[float, float, float] = (0.2, 4.0, 0.2)
    last: tuple[float, float, float] = (0.5, 4.0, 0.4)
    heads: int = 4
    dims: tuple[str, ...] = ()
    """Each has a third of what a block computes, if the tensor axis does not split it; the last sends most."""


@dataclass
class FakePricing:
    """The `StepPricing` of the model. `wobble`: by how much a simulation may differ from its estimate."""

    space: Space
    model: Model = Model()
    rates: Rates = Rates()
    wobble: float = 0.0
    estimated: list[Plan] = field(default_factory=list)
    simulated: list[Plan] = field(default_factory=list)

    def on_devices(self, num_devices: int) -> "FakePricing":
        return dataclasses.replace(self, space=self.space._replace(num_devices=num_devices), estimated=[], simulated=[])

    def slowdown(self) -> float:
        return 1.0

    def problems(self, plan: Plan) -> list[Problem]:
        return combination_problems(plan, clip=self.space.clip)

    # ---- seconds -----------------------------------------------------------------------------------

    def _check(self, plan: Plan) -> None:
        if self.model.heads % (plan.tp * plan.ulysses):
            raise PlanError(Problem(f"tp = {plan.tp}, ulysses = {plan.ulysses}", f"to divide {self.model.heads} heads"))
        if plan.num_stages > 1 and (
            problems := division_problems(plan.stages, len(self.model.blocks), plan.num_stages)
        ):
            raise PlanError(problems)

    def _samples(self, plan: Plan) -> float:
        return -(-self.space.batch_size // plan.dp) / plan.microbatches

    def _chain(self, plan: Plan) -> Chain:
        """Per microbatch; held bytes are those of whole states."""
        samples, ranks = self._samples(plan), plan.tp * plan.cp

        def segment(row: tuple[float, float, float]) -> Segment:
            whole = len(set(self.model.dims) - set(self._split_dims(plan))) / 3
            seconds = self.rates.call + self.rates.compute * row[0] * samples * (whole / plan.cp + (1 - whole) / ranks)
            seconds *= 1 + RECOMPUTED[plan.recompute]
            return Segment(seconds, 4 * row[1] / plan.tp, SAVED[plan.recompute] * row[2] * samples / ranks)

        model = self.model
        return Chain(segment(model.first), tuple(map(segment, model.blocks)), segment(model.last), 0.0)

    def _split_dims(self, plan: Plan) -> tuple[str, ...]:
        return tuple(dims_on_axis(plan.dims)) or self.model.dims

    def _axes(self, plan: Plan) -> tuple[float, float]:
        """Collectives of tensor and context ranks on one block, for one microbatch."""
        samples, rates = self._samples(plan), self.rates
        tensor = rates.tensor * samples * (plan.tp > 1) * (0.9 if plan.sequence_parallel else 1.0)
        dims = self.model.dims
        tensor *= sum(1 + dims.index(name) for name in self._split_dims(plan)) / len(dims) if dims else 1.0
        ring = plan.cp // plan.ulysses
        hops = rates.context * samples * ((ring - 1) * (1.3 if plan.ring == "gather" else 1.0) + (plan.ulysses > 1))
        return tensor, hops

    def floor(self, plan: Plan) -> float:
        self._check(plan)
        chain = self._chain(plan)
        blocks = sum(block.seconds + sum(self._axes(plan)) for block in chain.blocks)
        return plan.microbatches * (chain.first.seconds + blocks + chain.last.seconds) / plan.pp

    def stage_blocks(self, plan: Plan) -> Sequence[range]:
        self._check(plan)
        if plan.num_stages == 1:
            return (range(len(self.model.blocks)),)
        costs = [row[1] for row in self.model.blocks]
        return divide(plan.stages, costs, self.model.first[1], self.model.last[1], plan.num_stages)

    def balance(self, plan: Plan) -> float:
        chain = self._chain(plan)
        seconds = [block.seconds + sum(self._axes(plan)) for block in chain.blocks]
        places = self._places(plan, seconds, chain.first.seconds, chain.last.seconds)
        return sum(places) / plan.pp / max(places)

    def divisions(self, plan: Plan, limit_bytes: float) -> list[str]:
        chain = self._chain(plan)
        blocks = tuple(each._replace(seconds=each.seconds + sum(self._axes(plan))) for each in chain.blocks)
        chain = chain._replace(blocks=blocks)
        stops = [each.stop for each in self.stage_blocks(plan)]
        known = division_of(chain, stops, [1.0] * len(stops)).step_seconds(plan.microbatches)
        found = best_division(
            chain,
            [Submesh(plan.num_stages)],
            microbatches=plan.microbatches,
            in_flight=[1] * plan.num_stages,
            known_seconds=known,
        )
        return [found.counts] if found else []

    def _places(self, plan: Plan, numbers: Sequence[float], first: float, last: float) -> list[float]:
        """A sum over the segments of each place."""
        places = [0.0] * plan.pp
        stages = self.stage_blocks(plan)
        for stage, blocks in enumerate(stages):
            ends = first * (stage == 0) + last * (stage == len(stages) - 1)
            places[stage % plan.pp] += ends + sum(numbers[block] for block in blocks)
        return places

    def _weights(self, plan: Plan) -> list[float]:
        return self._places(plan, [row[1] for row in self.model.blocks], self.model.first[1], self.model.last[1])

    def estimate(self, plan: Plan) -> Prediction:
        self.estimated.append(plan)
        return Prediction(plan, self.terms(plan), self._memory(plan), {})

    def simulate(self, plan: Plan) -> Prediction:
        """The estimate, but for an error of up to `wobble` that depends on the plan's text alone."""
        self.simulated.append(plan)
        predicted = Prediction(plan, self.terms(plan), self._memory(plan), {})
        factor = 1 + self.wobble * (2 * (sum(map(ord, plan.to_toml())) % 101) / 100 - 1)
        return dataclasses.replace(predicted, terms=StepTerms(*(term * factor for term in predicted.terms)))

    def terms(self, plan: Plan) -> StepTerms:
        self._check(plan)
        chain, m, rates = self._chain(plan), plan.microbatches, self.rates
        tensor, context = self._axes(plan)
        seconds = [block.seconds for block in chain.blocks]
        places = self._places(plan, seconds, chain.first.seconds, chain.last.seconds)
        numbers = self._places(plan, [1.0] * len(seconds), 0.0, 0.0)
        totals = [each + number * (tensor + context) for each, number in zip(places, numbers, strict=True)]
        slowest = max(range(plan.pp), key=lambda place: totals[place])
        busy, number = places[slowest], numbers[slowest]
        recompute = busy * (1 - 1 / (1 + RECOMPUTED[plan.recompute]))
        waits = (plan.pp - 1) / plan.interleave
        if plan.schedule == "zero-bubble":
            waits *= 0.3 if plan.max_in_flight is None else 0.1
        edges = rates.edge * self._samples(plan) * plan.interleave * m * (plan.pp > 1)
        edges *= 0.9 if plan.schedule == "gpipe" else 1.0
        weights = max(self._weights(plan)) / plan.tp
        return StepTerms(
            compute=m * (busy - recompute),
            recompute=m * recompute,
            tensor=m * number * tensor,
            context=m * number * context,
            bubble=waits * (sum(totals) / plan.pp) + edges,
            exposed=self._exposed(plan, weights),
            update=rates.update * weights / plan.num_shards * (0.5 if plan.update != "after" else 1.0),
            overhead=rates.overhead * (1.1 if plan.update == "in_forward" else 1.0),
        )

    def _exposed(self, plan: Plan, weights: float) -> float:
        size = plan.dp * plan.cp
        if size == 1:
            return 0.0
        nearness = 0.5 if plan.shard is not None else 1.0
        reduces = 1 if plan.zero < 2 else plan.microbatches
        gathers = {0: 0.8, 1: 1.0, 2: 1.0, 3: 1.5 * plan.microbatches}[plan.zero]
        return weights * nearness * (self.rates.reduce * reduces + self.rates.gather * gathers) * (size - 1) / size

    # ---- bytes -------------------------------------------------------------------------------------

    def _memory(self, plan: Plan) -> tuple[MemoryParts, ...]:
        chain = self._chain(plan)
        weights = self._weights(plan)
        saved = [block.saved_bytes for block in chain.blocks]
        activations = self._places(plan, saved, chain.first.saved_bytes, chain.last.saved_bytes)
        return tuple(
            self._place_memory(plan, weights[place] / plan.tp, activations[place], place) for place in range(plan.pp)
        )

    def _place_memory(self, plan: Plan, weights: float, saved: float, place: int) -> MemoryParts:
        shards = plan.num_shards
        gradients = weights / (shards if plan.zero >= 2 else 1)
        alive = min(plan.microbatches, plan.pp - place)
        if plan.schedule == "gpipe":
            alive = plan.microbatches
        elif plan.schedule == "interleaved":
            alive = min(plan.microbatches, alive + 1)
        elif plan.max_in_flight is not None:
            alive = min(plan.microbatches, plan.max_in_flight)
        return MemoryParts(
            weights=weights / (shards if plan.zero == 3 else 1),
            gradients=gradients * (0.3 if plan.update == "in_backward" else 1.0),
            states=2 * weights / (shards if plan.zero >= 1 else 1),
            activations=alive * saved * (0.95 if plan.sequence_parallel else 1.0),
            buffers=0.5 * (plan.zero == 3),
            temporaries=0.1,
            reserve=0.0,
        )


def make_case(
    *, devices: int = 4, per_host: int | None = 4, batch: int = 8, model: Model = Model(), clip: float | None = None
) -> FakePricing:
    """The pricing of a model on devices."""
    space = Space(devices, per_host, batch, len(model.blocks), tuple(RECOMPUTED), 16, clip, len(set(model.blocks)) == 1)
    return FakePricing(space, model)


def question(pricing: FakePricing, ask: Ask, limit: float = math.inf, **fields: Any) -> Question:
    return Question(ask, pricing.space, cast(StepPricing, pricing), limit, **fields)


def is_close(first: float, second: float) -> bool:
    return math.isclose(first, second, rel_tol=1e-9)
