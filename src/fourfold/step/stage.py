"""Stage: what a rank computes of the model, and what the actions of its program work with.

chunk     one stage of the model, or all of it; a rank has several if stages are interleaved. Its name is its number

outputs   what a stage's forward gives: the inputs of the next stage, or what the loss is computed of
received  what the stage before has sent: its outputs, without their graph; nothing on the first stage
upstream  the gradients of the outputs, which the next stage sends back; None behind the loss, whose gradient is 1
Law: the loss runs where its stage's forward runs, and the last stage keeps its loss, not its outputs.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fourfold.axes.data.work.gradients import Gradients
from fourfold.axes.pipeline.attach.axis import PipelineAxis
from fourfold.axes.pipeline.attach.check import PipelineCheck
from fourfold.axes.pipeline.work.chain import seeded_segments
from fourfold.axes.pipeline.work.gates import Gates, StageEnd
from fourfold.axes.pipeline.work.reentrant import ReentrantCheck
from fourfold.axes.pipeline.work.stand_in import StandInUsed, sources_of
from fourfold.comm.reduce.protocol import GradReducer, WeightGatherer
from fourfold.comm.reduce.scalars import ScalarReducer
from fourfold.model.batch import Microbatch
from fourfold.model.batch_statistics import BatchStatistics
from fourfold.model.loss_sum import Loss
from fourfold.model.objective import Objective, StageOutput
from fourfold.model.weights import Weights
from fourfold.optim.flat_optimizer import FlatOptimizer
from fourfold.optim.user_optimizer import StepHooks
from fourfold.proof.attachment import Rank
from fourfold.step.grad_strategies import OneRound, ScaledSums
from fourfold.step.recomputed_blocks import Recompute, RecomputedBlocks
from fourfold.torch_kit.deferred_grads import WholeBackward
from fourfold.torch_kit.grad_hooks import GradHooks
from fourfold.torch_kit.tensor_tree import tree_leaves
from fourfold.words.error_notes import noting
from fourfold.words.errors import Problem, TaskError
from fourfold.words.program import Verb


class Chunk(NamedTuple):
    """One stage of a model, or all of it, as functions."""

    forward: Callable[[Microbatch, Sequence[Tensor]], StageOutput]
    """The outputs of a microbatch that is not empty, from what was received."""
    forward_empty: Callable[[], Tensor | None]
    """The forward of a rank without samples. Returns a loss whose backward other ranks need, or None."""
    evaluate_empty: Callable[[], None]
    """The same in an evaluation."""
    infer: Callable[[Microbatch, Sequence[Tensor]], StageOutput]
    """The outputs of a microbatch, of this rank alone."""
    backward: Callable[[Sequence[Tensor], Sequence[Tensor] | None], None]
    """`backward(outputs, upstream)` computes the gradients of a forward's outputs, or of a loss."""
    loss: Callable[[StageOutput, Microbatch], Loss] | None
    """The loss of the outputs; None before the last stage."""


def whole_model_chunk(
    model: nn.Module, objective: Objective, statistics: BatchStatistics, recompute: Recompute
) -> Chunk:
    """The only stage of a model that is not cut."""

    def forward(part: Microbatch, received: Sequence[Tensor]) -> StageOutput:
        with statistics.in_forward(has_samples=True), recompute.installed():
            return objective.forward(model, part)

    def forward_empty() -> Tensor | None:
        with statistics.in_forward(has_samples=False), recompute.installed():
            return statistics.run_empty(model, objective)

    def evaluate_empty() -> None:
        with statistics.in_forward(has_samples=False):
            statistics.evaluate_empty(model, objective)

    def infer(part: Microbatch, received: Sequence[Tensor]) -> StageOutput:
        return objective.forward(model, part)

    loss = functools.partial(_loss, objective)
    return Chunk(forward, forward_empty, evaluate_empty, infer, functools.partial(_backward, statistics), loss)


def pipeline_chunk(
    model: nn.Module,
    objective: Objective,
    statistics: BatchStatistics,
    stage: int,
    dry_run: PipelineCheck,
    halves: WholeBackward,
    recompute: Recompute,
) -> Chunk:
    """One of several stages. `dry_run` has shown what they need of each other."""
    gates, reentrant = dry_run.make_gates(stage), ReentrantCheck(model)

    def infer(part: Microbatch, received: Sequence[Tensor]) -> StageOutput:
        try:
            with gates.closed(received, dry_run.carried_by(gates.stage)):
                return objective.forward(model, part)
        except StageEnd as end:
            gates.keep_for_backward(end.message)
            return StageOutput(end.message, [])
        except StandInUsed as used:
            raise _unknown(gates.stage, used) from None

    def forward(part: Microbatch, received: Sequence[Tensor]) -> StageOutput:
        normalizing, drawing = statistics.in_forward(has_samples=True), _own_draws(model, gates, part)
        with normalizing, drawing, recompute.installed(), halves.in_forward(), reentrant.looking():
            return infer(part, received)

    def backward(outputs: Sequence[Tensor], upstream: Sequence[Tensor] | None) -> None:
        with gates.in_backward():
            _backward(statistics, outputs, upstream)
        gates.end_tokens()

    def evaluate_empty() -> None:
        if statistics.evaluates_together():
            forward_empty()

    def forward_empty() -> None:
        if objective.dummy_batch is not None:
            got = "pp > 1, no samples on a data rank, and a model whose forward writes buffers"
            problem = Problem(got, "at least one sample on each data rank", "a larger batch, or fewer microbatches")
            raise TaskError(problem, where="the batch")

    loss = functools.partial(_loss_of_stage, objective, gates) if gates.exit is None else None
    return Chunk(forward, forward_empty, evaluate_empty, infer, backward, loss)


def make_chunks(
    rank: Rank, pipeline: PipelineAxis, dry_run: PipelineCheck, halves: WholeBackward, recomputed: RecomputedBlocks
) -> dict[int, Chunk]:
    """This rank's stages, by number in the model."""
    model, objective, statistics = rank.model, rank.objective, rank.statistics
    if not pipeline.is_cut:
        return {0: whole_model_chunk(model, objective, statistics, recomputed.of(model))}
    return {
        stage: pipeline_chunk(
            model,
            objective,
            statistics,
            stage,
            dry_run,
            halves,
            recomputed.of(model, pipeline.stages.blocks[stage]),
        )
        for stage in pipeline.stages.stages_at(pipeline.place)
    }


def _loss_of_stage(objective: Objective, gates: Gates, output: StageOutput, part: Microbatch) -> Loss:
    """The loss of the last stage, which may read what earlier ones have kept."""
    try:
        with gates.shown():
            loss = _loss(objective, output, part)
        if missing := sources_of([loss.total]):
            raise StandInUsed(missing, place="")
    except StandInUsed as used:
        raise _unknown(gates.stage, used) from None
    gates.keep_for_backward([loss.total])
    return loss


def _unknown(stage: int, used: StandInUsed) -> TaskError:
    """What a stage needs and is not sent, for the first batch did not need it."""
    got = f"stage {stage} needs {min(used.sources)}, which it did not in the first batch{used.place}"
    need = "values that the first batch needs too: stages send these only"
    return TaskError(Problem(got, need, "a forward without this branch, or pp = 1"), where="the pipeline")


def _own_draws(model: nn.Module, gates: Gates, part: Microbatch) -> AbstractContextManager[None]:
    return seeded_segments(model, gates.chain, part.draw_seed, next(tree_leaves(part.inputs)).device)


def _loss(objective: Objective, output: StageOutput, part: Microbatch) -> Loss:
    return objective.loss(output, part).loss


def _backward(statistics: BatchStatistics, outputs: Sequence[Tensor], upstream: Sequence[Tensor] | None) -> None:
    with statistics.in_backward(), noting("  in backward"):
        torch.autograd.backward(outputs, upstream)


class Stage(NamedTuple):
    """What the actions of a rank work with."""

    pp_index: int
    chunks: Mapping[int, Chunk]
    """By number in the model."""
    parameters: Sequence[Sequence[nn.Parameter]]
    """By bucket and slot."""
    bucket_stages: Sequence[int]
    """By bucket: the chunk that computes with it."""
    gradients: Gradients
    grad_hooks: GradHooks
    halves: WholeBackward
    reducer: GradReducer
    gatherer: WeightGatherer
    scalars: ScalarReducer
    """Of the ranks that sum these gradients."""
    optimizer: FlatOptimizer
    weights: Weights
    step_hooks: StepHooks
    rounds: OneRound
    scaling: ScaledSums
    update_verbs: tuple[Verb, ...]
    """What updates a bucket: UPDATE, and GATHER if new weights are all-gathered."""
    sum_norms: Callable[[Tensor], Tensor]
    """Of layer-wise updates: adds up what the ranks have of the same parameters. Collective."""
    transport_name: str
    """What joins the data ranks, and why, in words."""

    @property
    def num_buckets(self) -> int:
        return len(self.parameters)

    def buckets_of(self, chunk: int) -> Sequence[int]:
        """The buckets of one of the chunks."""
        return [bucket for bucket, each in enumerate(self.bucket_stages) if each == chunk]

    def used_slots(self, bucket: int, counts: Sequence[float] | None) -> Sequence[bool] | None:
        """Which slots of a bucket have a gradient on any rank; None: all. `counts` are by slot of all buckets."""
        if counts is None:
            return None
        first = sum(len(parameters) for parameters in self.parameters[:bucket])
        return [bool(count) for count in counts[first : first + len(self.parameters[bucket])]]
