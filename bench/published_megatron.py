"""Rows of Megatron's tables 1 and 2, and what the planner says of them.

row        a model, a mesh and its published throughput (Narayanan et al., arXiv 2104.04473)
given      what the paper says of a row; of microbatch and interleaving it mostly says nothing: the best that fit
constants  what `fourfold/clusters/dgx-a100.toml` has of efficiencies, latencies and slowdown: fitted on six of the rows
Law: the rows that are not fitted have no influence on the constants.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fourfold.plan.lowering import lower
from fourfold.plan.plan import Plan
from fourfold.planner.predict.clusters import Cluster, RooflinePrices, read_cluster, read_table, topology_of
from fourfold.planner.predict.facts import Workload
from fourfold.planner.predict.gpt_facts import GptFacts
from fourfold.planner.predict.memory import predict_memory
from fourfold.planner.predict.prediction import Prediction
from fourfold.planner.predict.prices import SegmentSeconds
from fourfold.planner.predict.step import predict_step
from fourfold.words.layout import Change

CLUSTER = "dgx-a100"
MICROBATCH_SIZES = (1, 2, 4, 8, 16)
ONE_BUCKET = 2**50
"""Megatron of 2021 sums gradients after the last backward: no bucket begins before."""


def work_of(gpt: GptFacts) -> Workload:
    return Workload.of(gpt, task="gpt", machine="that of the table")


@dataclass(frozen=True)
class Row:
    """A row of a table. `microbatch`: samples, if the paper says so; `zero`: 3 for the rows of ZeRO-3."""

    label: str
    layers: int
    width: int
    heads: int
    tp: int
    pp: int
    dp: int
    batch_size: int
    teraflops: float
    microbatch: int | None = None
    zero: int = 0
    is_fitted: bool = False

    @property
    def gpus(self) -> int:
        return self.tp * self.pp * self.dp

    def source(self, batch_size: int | None = None) -> GptFacts:
        return GptFacts(
            layers=self.layers, width=self.width, heads=self.heads, batch_size=batch_size or self.batch_size
        )

    @property
    def published_seconds(self) -> float:
        work = work_of(self.source())
        return (work.flops + work.again_flops["full"]) / (self.gpus * self.teraflops * 1e12)


ROWS = (
    Row("1.7 B", 24, 2304, 24, 1, 1, 32, 512, 137, is_fitted=True),
    Row("3.6 B", 30, 3072, 32, 2, 1, 32, 512, 138),
    Row("7.5 B", 36, 4096, 32, 4, 1, 32, 512, 142),
    Row("18.4 B", 40, 6144, 48, 8, 1, 32, 1024, 135, is_fitted=True),
    Row("39.1 B", 48, 8192, 64, 8, 2, 32, 1536, 138),
    Row("76.1 B", 60, 10240, 80, 8, 4, 32, 1792, 140),
    Row("145.6 B", 80, 12288, 96, 8, 8, 24, 2304, 148, is_fitted=True),
    Row("175 B, ZeRO-3", 96, 12288, 96, 1, 1, 384, 1536, 144, microbatch=4, zero=3, is_fitted=True),
    Row("175 B, ZeRO-3", 96, 12288, 96, 1, 1, 768, 1536, 88, microbatch=2, zero=3, is_fitted=True),
    Row("175 B, ZeRO-3", 96, 12288, 96, 1, 1, 1536, 1536, 44, microbatch=1, zero=3),
    Row("175 B, PTD", 96, 12288, 96, 8, 12, 4, 1536, 153, microbatch=1),
    Row("175 B, PTD", 96, 12288, 96, 8, 12, 8, 1536, 149, microbatch=1, is_fitted=True),
    Row("175 B, PTD", 96, 12288, 96, 8, 12, 16, 1536, 141, microbatch=1),
)


# ---- plans -----------------------------------------------------------------------------------------


def plan_of(row: Row, microbatch: int, interleave: int) -> Plan:
    """The layout of a row: full recomputation, blocks divided evenly, one bucket; with ZeRO-3 one for each matrix."""
    stages = row.pp * interleave
    return Plan(
        pp=row.pp,
        dp=row.dp,
        tp=row.tp,
        zero=row.zero,
        microbatches=row.batch_size // (row.dp * microbatch),
        schedule="interleaved" if interleave > 1 else "1f1b",
        interleave=interleave,
        stages=",".join([str(row.layers // stages)] * stages) if row.pp > 1 else "even",
        recompute="full",
        precision="fp16",
        bucket_bytes=2 * 4 * row.width**2 if row.zero else ONE_BUCKET,
    )


def candidate_plans(row: Row) -> Iterator[Plan]:
    """The microbatches and interleavings that the paper leaves open."""
    for microbatch in MICROBATCH_SIZES if row.microbatch is None else [row.microbatch]:
        if row.batch_size % (row.dp * microbatch):
            continue
        blocks = row.layers // row.pp
        for interleave in [each for each in range(1, blocks + 1) if blocks % each == 0 and (row.pp > 1 or each == 1)]:
            plan = plan_of(row, microbatch, interleave)
            if interleave == 1 or plan.microbatches % row.pp == 0:
                yield plan


def memory_bytes(row: Row, plan: Plan, cluster: Cluster) -> float:
    """What a rank holds at most. At zero 0 it holds the same with one data rank, which is lowered sooner."""
    if row.zero:
        source, single = row.source(), plan
    else:
        source, single = row.source(row.batch_size // row.dp), dataclasses.replace(plan, dp=1)
    resized = cluster.resized(single.mesh.size)
    blueprint = lower(single, source.specs(single), topology_of(resized, single.mesh.size), source.update_spec)
    memory = predict_memory(blueprint, source, reserve_bytes=cluster.reserve_bytes)
    return max(parts.total for parts in memory)


def best_plan(row: Row, cluster: Cluster) -> Plan:
    """The fastest candidate that fits; of one that is given, whether or not it does."""
    ranked = sorted(candidate_plans(row), key=lambda plan: estimated_seconds(row, plan, cluster))
    if len(ranked) == 1:
        return ranked[0]
    return next(plan for plan in ranked if memory_bytes(row, plan, cluster) <= cluster.memory_bytes)


# ---- seconds ---------------------------------------------------------------------------------------


def estimated_seconds(row: Row, plan: Plan, cluster: Cluster) -> float:
    """A step in closed form: the slowest place, the fill of the pipeline, gradients and update. For fit and choice."""
    source, prices = row.source(), RooflinePrices(cluster)
    facts = source.facts(plan)
    size = row.batch_size / (row.dp * plan.microbatches)
    first, block, last = (prices.segment(each, plan, size) for each in (facts.first, facts.blocks[0], facts.last))
    blocks = _total(block) * row.layers / row.pp
    group = prices.axis_group("dp", plan)
    weight_bytes = 2.0 * work_of(source).num_parameters / (row.tp * row.pp)
    if row.zero:  # weights are gathered for both passes, gradients summed during backward, on the same network
        gathered = prices.collective(Change.ALL_GATHER, weight_bytes, group)
        summed = prices.collective(Change.REDUCE_SCATTER, weight_bytes, group)
        segments = [first, block, last]
        forward = sum(each.forward * count for each, count in zip(segments, (1, row.layers, 1), strict=True))
        backward = sum(each.backward * count for each, count in zip(segments, (1, row.layers, 1), strict=True))
        slowed = cluster.overlap_slowdown
        computing = max(forward * slowed, gathered) + max(backward * slowed, gathered + summed)
        return computing + prices.update("Adam", 0.0, weight_bytes * 8 / row.dp)
    ends = max(_total(first), _total(last)) if row.pp > 1 else _total(first) + _total(last)
    edge = prices.edge(facts.boundary_bytes * size, crosses_hosts=True)
    fill = (row.pp - 1) * (blocks / plan.interleave + 2 * edge)
    reduced = prices.collective(Change.ALL_REDUCE, weight_bytes, group)
    return plan.microbatches * (blocks + ends) + fill + reduced + prices.update("Adam", 0.0, weight_bytes * 8)


def _total(seconds: SegmentSeconds) -> float:
    return seconds.forward + seconds.backward


def predicted(row: Row, plan: Plan, cluster: Cluster) -> Prediction:
    """The plan's program, simulated."""
    source, resized = row.source(row.batch_size), cluster.resized(row.gpus)
    blueprint = lower(plan, source.specs(plan), topology_of(resized, row.gpus), source.update_spec)
    return predict_step(blueprint, source, RooflinePrices(resized), reserve_bytes=cluster.reserve_bytes)


def predicted_seconds(row: Row, plan: Plan, cluster: Cluster) -> float:
    """A step, simulated with at most 3·pp microbatches.

    From 2·pp on, each pp more take as long again: `tests/pure/test_published.py` holds that.
    """
    if plan.microbatches <= 3 * plan.pp or plan.pp == 1:
        return predicted(row, plan, cluster).seconds
    fewer, more = (_with_microbatches(row, plan, times * plan.pp, cluster) for times in (2, 3))
    return more + (plan.microbatches / plan.pp - 3) * (more - fewer)


def _with_microbatches(row: Row, plan: Plan, microbatches: int, cluster: Cluster) -> float:
    batch_size = row.batch_size * microbatches // plan.microbatches
    shorter = dataclasses.replace(row, batch_size=batch_size)
    return predicted(shorter, dataclasses.replace(plan, microbatches=microbatches), cluster).seconds


# ---- constants -------------------------------------------------------------------------------------

# The eight that are fitted: where each begins, and the standard deviation of its logarithm, which holds it there.
# Beginnings are what parts reach alone: large products and copies on an A100, all-reduces of NCCL on 8 and 16 GPUs.
PRIORS: Mapping[str, tuple[float, float]] = {
    "products.highest": (0.75, 0.2),
    "products.half": (3e9, 0.5),
    "memory_efficiency": (0.85, 0.1),
    "launch": (5e-6, 0.3),
    "host.efficiency": (0.78, 0.1),
    "network.efficiency": (0.85, 0.1),
    "network.gather_efficiency": (0.7, 0.3),
    "overlap_slowdown": (1.1, 0.2),
}
UNITS = {"products.half": "{} FLOP", "launch": "{} s"}
FITTED_WITHIN = 0.01  # a row that is missed by so much weighs as much as a constant that is led off by its deviation
BOUNDS = {name: (1e-30, 1.0) for name in PRIORS if name.endswith(("highest", "efficiency"))}
BOUNDS["overlap_slowdown"] = (1.0, 10.0)


def with_constants(constants: Mapping[str, float]) -> Cluster:
    """The cluster with these in place of its own."""
    table = read_table(CLUSTER)
    for name, value in constants.items():
        place, _, key = name.rpartition(".")
        inner = table[place] if place else table
        inner[key] = UNITS[name].format(repr(value)) if name in UNITS else value
    return read_cluster(table)


def fit(rounds: int = 3) -> dict[str, float]:
    """The constants that explain the six fitted rows best, within what their beginnings allow.

    The closed form is fitted; in each round it is corrected by its ratio to the simulated step of each row.
    """
    constants = {name: start for name, (start, _) in PRIORS.items()}
    rows = [row for row in ROWS if row.is_fitted]
    for _ in range(rounds):
        cluster = with_constants(constants)
        plans = [best_plan(row, cluster.resized(row.gpus)) for row in rows]
        corrections = [
            predicted_seconds(row, plan, cluster) / estimated_seconds(row, plan, cluster.resized(row.gpus))
            for row, plan in zip(rows, plans, strict=True)
        ]
        constants = _least_squares(rows, plans, corrections, constants)
    return constants


def _least_squares(
    rows: Sequence[Row], plans: Sequence[Plan], corrections: Sequence[float], begin: Mapping[str, float]
) -> dict[str, float]:
    """Levenberg–Marquardt over the logarithms of the constants, with their beginnings as observations too."""
    lowest, highest = (np.log([BOUNDS.get(name, (1e-30, 1e30))[end] for name in PRIORS]) for end in (0, 1))

    def constants(logs: np.ndarray) -> dict[str, float]:
        return dict(zip(PRIORS, map(float, np.exp(np.clip(logs, lowest, highest))), strict=True))

    def residuals(logs: np.ndarray) -> np.ndarray:
        cluster = with_constants(constants(logs))
        ratios = [
            estimated_seconds(row, plan, cluster.resized(row.gpus)) * correction / row.published_seconds
            for row, plan, correction in zip(rows, plans, corrections, strict=True)
        ]
        moved = [(value - math.log(start)) / width for value, (start, width) in zip(logs, PRIORS.values(), strict=True)]
        return np.array([*(np.log(ratios) / FITTED_WITHIN), *moved])

    point, damping = np.log([begin[name] for name in PRIORS]), 1.0
    here = residuals(point)
    for _ in range(40):
        slopes = np.stack([(residuals(point + step) - here) / 1e-4 for step in 1e-4 * np.eye(len(point))], axis=1)
        normal = slopes.T @ slopes + damping * np.eye(len(point))
        there = np.clip(point - np.linalg.solve(normal, slopes.T @ here), lowest, highest)
        found = residuals(there)
        if found @ found < here @ here:
            point, here, damping = there, found, damping / 3
        else:
            damping *= 4
    return constants(point)
