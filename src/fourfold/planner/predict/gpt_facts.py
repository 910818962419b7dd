"""GPT facts: Megatron's GPT by formula, so that a plan for it can be priced without a model, at any size.

first, last  the ends: an embedding with positions, and a head that shares its weight, with vocabulary-parallel loss
unfused      attention of 2021: scores, softmax and dropout go through memory; else fused, half of the scores masked
scatter      with tp, each tensor rank sends 1/tp of what crosses a boundary; the next stage gathers it in its host
Law: the facts of all ranks together are those of one device.

Sources: Narayanan et al. (2104.04473), sections 3 and 4.1; Korthikanti et al. (2205.05198).
"""

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from fourfold.axes.context.rules.layout import heads_problem
from fourfold.axes.pipeline.rules.division import divide, division_problems, stage_names
from fourfold.plan.model_traits import NO_TRAITS, ModelTraits
from fourfold.plan.param_spec import ParamSpec, UpdateSpec
from fourfold.plan.plan import Plan
from fourfold.plan.precision import COMPUTE_FORMATS
from fourfold.planner.predict import gpt_blocks
from fourfold.planner.predict.facts import ModelFacts, SegmentFacts
from fourfold.planner.predict.gpt_blocks import (
    EMBEDDING,
    FLOAT32_BYTES,
    MASK_BYTES,
    POSITIONS,
    GptSize,
    RankShape,
    block_name,
    block_shapes,
    gpt_specs,
)
from fourfold.words.errors import PlanError, Problem

ELEMENT_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
ADAM = UpdateSpec(optimizer="Adam", num_states=(2,))
FACT_FIELDS = ("tp", "cp", "ring", "ulysses", "sequence_parallel", "precision")
"""The fields of a plan on which facts depend."""


@dataclass(frozen=True, kw_only=True)
class GptFacts:
    """A `FactsSource`. `precision`: the dtype of the parameters, in which plans with `precision = "keep"` compute.

    Raises PlanError with all problems.
    """

    layers: int
    width: int
    heads: int
    vocabulary: int = 51200
    length: int = 2048
    batch_size: int
    precision: str = "float32"
    fused_attention: bool = False
    scatter: bool = True
    update_spec: UpdateSpec = ADAM
    traits: ModelTraits = NO_TRAITS
    _facts: dict[tuple[object, ...], ModelFacts] = field(default_factory=dict, init=False, repr=False, compare=False)
    _specs: dict[tuple[object, ...], list[ParamSpec]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if problems := list(self._problems()):
            raise PlanError(problems, where="the GPT")

    def _problems(self) -> Iterable[Problem]:
        counts = {
            name: getattr(self, name) for name in ("layers", "width", "heads", "vocabulary", "length", "batch_size")
        }
        wrong = [name for name, value in counts.items() if type(value) is not int or value < 1]
        for name in wrong:
            yield Problem(f"{name} = {counts[name]!r}", "a whole number of at least 1")
        if not wrong and self.width % self.heads:
            head_size = max(1, self.width // self.heads)
            attempt = f"width = {head_size * self.heads}"
            yield Problem(f"width = {self.width}, heads = {self.heads}", "a width divisible by heads", attempt)
        if self.precision not in ELEMENT_BYTES:
            yield Problem(
                f"precision = {self.precision!r}", f"one of {', '.join(ELEMENT_BYTES)}", "precision = float32"
            )

    @cached_property
    def size(self) -> GptSize:
        return GptSize(self.layers, self.width, self.heads, self.vocabulary, self.length)

    @property
    def num_parameters(self) -> int:
        return sum(spec.num_elements for spec in self.specs(Plan()))

    def step_flops(self, recompute: str = "none") -> float:
        """Operations of a step in products, over all ranks: backward takes two forwards, `full` another of blocks."""
        facts = self.facts(Plan())
        blocks = sum(block.flops for block in facts.blocks) * (4 if recompute == "full" else 3)
        return self.batch_size * (blocks + 3 * facts.last.flops)

    # ---- FactsSource ----------------------------------------------------------------------------------

    def facts(self, plan: Plan) -> ModelFacts:
        key = tuple(getattr(plan, name) for name in FACT_FIELDS)
        if key not in self._facts:
            self._check(plan)
            self._facts[key] = self._make_facts(plan)
        return self._facts[key]

    def specs(self, plan: Plan) -> Sequence[ParamSpec]:
        key = plan.tp, plan.pp, plan.interleave, plan.stages
        if key not in self._specs:
            self._check(plan)
            dtype, element_bytes = self.precision, ELEMENT_BYTES[self.precision]
            stages = self.stage_blocks(plan)
            self._specs[key] = gpt_specs(self.size, plan, stages, dtype=dtype, element_bytes=element_bytes)
        return self._specs[key]

    def stage_blocks(self, plan: Plan) -> tuple[range, ...]:
        """By weights in products, as Fourfold divides a model: the head counts, an embedding does not."""
        problems = division_problems(plan.stages, self.layers, plan.num_stages)
        if stage_names(plan.stages) is not None:
            problems.append(Problem(f"stages = {plan.stages!r}", "counts: blocks of a formula have no names"))
        if problems:
            raise PlanError(problems, where="the plan")
        block = float(12 * self.width**2 + 13 * self.width)
        head = float(self.vocabulary * self.width)
        return divide(plan.stages, [block] * self.layers, 0.0, head, plan.num_stages)

    # ---- facts ----------------------------------------------------------------------------------------

    def _check(self, plan: Plan) -> None:
        problems = []
        if self.heads % plan.tp:
            divisors = [str(size) for size in range(1, self.heads + 1) if self.heads % size == 0]
            problems.append(
                Problem(
                    f"tp = {plan.tp}, {self.heads} heads", "tp to divide the heads", f"tp = {' or '.join(divisors)}"
                )
            )
        elif problem := heads_problem(self.heads // plan.tp, self.heads // plan.tp, plan.ulysses):
            problems.append(problem)
        if problem := plan.context_spec.length_problem(self.length):
            problems.append(problem)
        if plan.sequence_parallel and self.length // plan.cp % plan.tp:
            got = f"tp = {plan.tp}, {self.length // plan.cp} tokens on a rank"
            problems.append(
                Problem(got, "tp to divide the tokens, with sequence parallelism", "sequence_parallel = false")
            )
        if problems:
            raise PlanError(problems, where="the plan")

    def _make_facts(self, plan: Plan) -> ModelFacts:
        compute = COMPUTE_FORMATS.get(plan.precision)
        element_bytes = compute.num_bytes if compute else ELEMENT_BYTES[self.precision]
        rank = RankShape(self.size, plan, element_bytes, is_fused=self.fused_attention or plan.cp > 1)
        block = self._block(rank)
        names = [(block_name(index), block_shapes(self.size)) for index in range(self.layers)]
        blocks = tuple(
            dataclasses.replace(block, name=name, params=tuple(f"{name}.{each}" for each in shapes))
            for name, shapes in names
        )
        is_scattered = self.scatter and not plan.sequence_parallel
        boundary = rank.hidden_here / (plan.tp if is_scattered else 1)
        return ModelFacts(
            _first(rank),
            blocks,
            _last(rank),
            boundary_bytes=boundary * element_bytes,
            tokens=self.length,
            boundary_columns=self.width,
            boundary_element_bytes=element_bytes,
        )

    @staticmethod
    def _block(rank: RankShape) -> SegmentFacts:
        """One block, without its names."""
        # A backward holds the gradients of the MLP's inner tensor before and behind its activation.
        temporary = 2 * 4 * rank.hidden / rank.plan.tp * rank.element_bytes
        return SegmentFacts(
            "",
            (),
            gpt_blocks.block_operations(rank),
            gpt_blocks.block_saved_bytes(rank),
            gpt_blocks.block_collectives(rank),
            temporary,
        )


def _first(rank: RankShape) -> SegmentFacts:
    """Keeps a dropout mask."""
    return SegmentFacts(
        "",
        (EMBEDDING, POSITIONS),
        gpt_blocks.first_operations(rank),
        _whatever_is_recomputed(rank.hidden_here * MASK_BYTES),
        gpt_blocks.first_collectives(rank),
    )


def _last(rank: RankShape) -> SegmentFacts:
    """Keeps its input, and the softmax of its outputs in float32."""
    outputs = rank.tokens * -(-rank.size.vocabulary // rank.plan.tp)
    return SegmentFacts(
        "",
        (EMBEDDING,),
        gpt_blocks.last_operations(rank),
        _whatever_is_recomputed(rank.hidden_here * rank.element_bytes + outputs * FLOAT32_BYTES),
        gpt_blocks.last_collectives(rank),
        temporary_bytes=outputs * (FLOAT32_BYTES + rank.element_bytes),
    )


def _whatever_is_recomputed(num_bytes: float) -> dict[str, float]:
    return dict.fromkeys(("none", "selective", "full"), num_bytes)
