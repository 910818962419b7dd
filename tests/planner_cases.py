"""Planner cases: a chain of equal blocks as literal facts, and prices that are linear in everything.

Law: every number of a prediction made from these can be computed by hand.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

from hypothesis import assume
from hypothesis import strategies as st

from fourfold.axes.pipeline.rules.division import divide
from fourfold.plan.check import legality_problems
from fourfold.plan.codec import CodecSpec
from fourfold.plan.lowering import Blueprint, lower
from fourfold.plan.model_traits import NO_TRAITS, ModelTraits
from fourfold.plan.param_spec import ParamSpec, TensorShard, UpdateSpec
from fourfold.plan.plan import Plan
from fourfold.plan.topology import Topology
from fourfold.planner.predict.facts import Collective, ModelFacts, Operation, OperationKind, SegmentFacts
from fourfold.planner.predict.prices import GroupShape, Prices, SegmentSeconds
from fourfold.words.layout import Change, collective_sent_bytes


@dataclass(frozen=True)
class ChainFacts:
    """A `FactsSource`: an embedding, equal blocks with two matrices each, a head. `width` is divisible by tp.

    end_factor  the flops of the embedding over those of a block; the head has twice as many
    has_bare_blocks  every second block has no weights, as an activation function has none
    """

    num_blocks: int = 8
    width: int = 64
    batch_size: int = 16
    tokens: int = 8
    update_spec: UpdateSpec = field(default_factory=lambda: UpdateSpec(num_states=(2,)))
    has_tied_head: bool = False
    end_factor: float = 0.25
    norm_channels: tuple[int, ...] = ()
    has_bare_blocks: bool = False
    traits: ModelTraits = NO_TRAITS

    def resized(self, batch_size: int) -> Self:
        return dataclasses.replace(self, batch_size=batch_size)

    def _names(self, index: int) -> list[str]:
        """The weights of a block."""
        return [] if self.has_bare_blocks and index % 2 else [f"blocks.{index}.up", f"blocks.{index}.down"]

    def _segment(self, name: str, params: Sequence[str], factor: float, plan: Plan) -> SegmentFacts:
        width, tokens = self.width, self.tokens / plan.cp
        flops = factor * 4.0 * width * width * tokens / plan.tp
        product = Operation(
            OperationKind.PRODUCT, flops, 8.0 * width * tokens, has_weight=True, rows=tokens, columns=width, inner=width
        )
        output = 4.0 * width * tokens
        saved = {"none": 4 * output, "selective": 3 * output, "full": output}
        collectives = []
        if plan.tp > 1 and factor == 1.0:
            collectives.append(Collective("tp", Change.ALL_REDUCE, output, forward=2, backward=2, recompute=2))
        if plan.cp > 1 and factor == 1.0:
            collectives.append(
                Collective("cp", Change.ALL_GATHER, output * plan.cp, forward=1, backward=2, recompute=1)
            )
        channels = self.norm_channels if name else ()
        return SegmentFacts(
            name, tuple(params), (product,), saved, tuple(collectives), temporary_bytes=output, norm_channels=channels
        )

    def facts(self, plan: Plan) -> ModelFacts:
        blocks = tuple(self._segment(f"blocks.{i}", self._names(i), 1.0, plan) for i in range(self.num_blocks))
        tied = ["embedding"] if self.has_tied_head else []
        return ModelFacts(
            self._segment("", ["embedding"], self.end_factor, plan),
            blocks,
            self._segment("", ["head", *tied], 2 * self.end_factor, plan),
            boundary_bytes=4.0 * self.width * self.tokens / plan.cp,
            tokens=self.tokens,
            boundary_columns=self.width,
        )

    def specs(self, plan: Plan) -> list[ParamSpec]:
        stage_of = {index: stage for stage, blocks in enumerate(self.stage_blocks(plan)) for index in blocks}
        last, shape = plan.num_stages - 1, (self.width, self.width)
        shards = tuple(TensorShard.even(shape, 0, index, plan.tp) for index in range(plan.tp)) if plan.tp > 1 else ()
        specs = [ParamSpec("embedding", shape, "float32", 4, is_tied=self.has_tied_head and plan.pp > 1)]
        for index in range(self.num_blocks):
            for name in self._names(index):
                specs.append(ParamSpec(name, shape, "float32", 4, stage=stage_of[index], shards=shards))
        return [*specs, ParamSpec("head", shape, "float32", 4, stage=last)]

    def stage_blocks(self, plan: Plan) -> tuple[range, ...]:
        return divide(plan.stages, [1.0] * self.num_blocks, self.end_factor, 2 * self.end_factor, plan.num_stages)


@dataclass(frozen=True)
class LinearPrices:
    """`Prices`: seconds = latency + amount / rate, in each case."""

    flops: float = 1e9
    bandwidth: float = 1e8
    latency: float = 1e-5
    network_latency: float = 1e-4
    network_bandwidth: float = 1e7
    memory_bandwidth: float = 1e9
    update_bandwidth: float = 5e8
    overlap_slowdown: float = 1.0
    action_seconds: float = 0.0
    step_seconds: float = 0.0
    waiting_share: float = 1.0

    def segment(self, facts: SegmentFacts, plan: Plan, num_samples: float) -> SegmentSeconds:
        forward = facts.flops * num_samples / self.flops
        again = {"none": 0.0, "selective": 0.25, "full": 1.0}[plan.recompute] * forward
        sizes = {"tp": plan.tp, "cp": plan.cp}
        messages = [0.0, 0.0]
        for each in facts.collectives:
            once = self.collective(each.change, each.whole_bytes * num_samples, GroupShape(sizes[each.axis]))
            messages[0] += once * each.forward
            messages[1] += once * (each.backward + each.recompute * (plan.recompute != "none"))
        return SegmentSeconds(forward + messages[0], forward + again + messages[1], forward)

    def collective(self, change: Change, whole_bytes: float, group: GroupShape) -> float:
        if group.size == 1:
            return 0.0
        within, across = GroupShape(group.ranks_per_host), GroupShape(group.hosts)
        inside = collective_sent_bytes(change, whole_bytes=round(whole_bytes), size=within.size) / self.bandwidth
        between = collective_sent_bytes(change, whole_bytes=round(whole_bytes), size=across.size)
        seconds = inside + self.latency
        return seconds if group.hosts == 1 else seconds + self.network_latency + between / self.network_bandwidth

    def edge(self, num_bytes: float, *, crosses_hosts: bool) -> float:
        latency, bandwidth = (
            (self.network_latency, self.network_bandwidth) if crosses_hosts else (self.latency, self.bandwidth)
        )
        return latency + num_bytes / bandwidth

    def update(self, optimizer: str, num_elements: float, num_bytes: float) -> float:
        return num_bytes / self.update_bandwidth

    def memory_pass(self, num_bytes: float) -> float:
        return num_bytes / self.memory_bandwidth

    def codec(self, codec: CodecSpec, num_elements: float) -> float:
        return 16 * num_elements / self.memory_bandwidth

    def offload(self, num_bytes: float) -> float:
        return num_bytes / self.bandwidth

    def slowdown(self) -> float:
        return self.overlap_slowdown

    def waiting(self) -> float:
        return self.waiting_share

    def between_actions(self) -> float:
        return self.action_seconds

    def around_step(self) -> float:
        return self.step_seconds


FREE = 1e30  # a rate at which nothing takes time


def compute_only(flops: float = 1e9) -> Prices:
    """Only forward and backward take time."""
    return LinearPrices(flops, FREE, 0.0, 0.0, FREE, FREE, FREE)


def dearer(prices: LinearPrices, name: str, factor: float) -> LinearPrices:
    """The prices with one rate lower, or one latency higher."""
    value = getattr(prices, name)
    grows = name in ("latency", "network_latency", "overlap_slowdown", "action_seconds", "step_seconds")
    return dataclasses.replace(prices, **{name: value * factor if grows else value / factor})


@dataclass(frozen=True)
class Case:
    """A plan that can be carried out, its facts and machines."""

    plan: Plan
    facts: ChainFacts
    topology: Topology
    prices: LinearPrices

    @property
    def blueprint(self) -> Blueprint:
        return lower(self.plan, self.facts.specs(self.plan), self.topology, self.facts.update_spec)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Plans of every mesh of up to 32 ranks, with fields that change what a step consists of."""
    pp, dp, tp, cp = (draw(st.sampled_from(each)) for each in ((1, 1, 2, 4), (1, 2, 4), (1, 2), (1, 1, 2)))
    microbatches = pp * draw(st.sampled_from([1, 2, 4]))
    fields: dict[str, object] = {
        "pp": pp,
        "dp": dp,
        "tp": tp,
        "cp": cp,
        "microbatches": microbatches,
        "zero": draw(st.integers(0, 3)),
        "recompute": draw(st.sampled_from(["none", "full"])),
        "update": draw(st.sampled_from(["after", "after", "in_backward", "in_forward"])),
        "bucket_bytes": draw(st.sampled_from([1 << 14, 1 << 16, 1 << 22])),
        "sync": draw(st.sampled_from(["step", "step", "step", "local"])),
        "codec": draw(st.sampled_from(["none", "none", "none", "bf16", "topk"])),
    }
    if pp > 1:
        fields |= draw(
            st.sampled_from(
                [
                    {"schedule": "gpipe"},
                    {"schedule": "1f1b"},
                    {"schedule": "interleaved", "interleave": 2},
                    {"schedule": "zero-bubble"},
                    {"schedule": "zero-bubble", "max_in_flight": 2 * pp - 1},
                ]
            )
        )
    update_spec = UpdateSpec(draw(st.sampled_from([None, None, 1.0])), num_states=(2,))
    has_tied_head, has_bare_blocks = draw(st.booleans()), draw(st.booleans())
    num_blocks = (
        pp * (1 + (fields.get("schedule") == "interleaved")) if has_bare_blocks else 16
    )  # some stages have no weights
    facts = ChainFacts(
        num_blocks,
        batch_size=dp * microbatches * 4,
        update_spec=update_spec,
        has_tied_head=has_tied_head,
        has_bare_blocks=has_bare_blocks,
    )
    size = pp * dp * tp * cp
    hosts = draw(st.sampled_from([1, 2] if size > 1 else [1]))
    topology = Topology.regular(
        hosts=hosts, ranks_per_host=size // hosts, device=draw(st.sampled_from(["cpu", "cuda"]))
    )
    prices = LinearPrices(
        bandwidth=draw(st.sampled_from([1e8, 1e9])),
        network_bandwidth=draw(st.sampled_from([1e7, 1e8])),
        overlap_slowdown=draw(st.sampled_from([1.0, 1.2])),
        action_seconds=1e-6,
        step_seconds=1e-4,
    )
    plan = Plan.from_dict(fields)
    assume(not legality_problems(plan, facts.specs(plan), topology, update_spec))
    return Case(plan, facts, topology, prices)
