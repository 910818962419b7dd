"""Assembly: make what a step works with, of a model, a loss, an optimizer, a plan and the ranks.

The axes are attached in turn (`proof/attachment.py`): each leaves this rank's part of the model. The stage is
made of the parameters that are left (`stage_assembly.py`), and the parts of the step of both.
Law: what a plan asks for is decided here, once, and nowhere later.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import nn
from torch.optim import Optimizer

from fourfold.axes.context.attach import axis as context
from fourfold.axes.data.attach import check as data
from fourfold.axes.pipeline.attach import check as pipeline
from fourfold.axes.pipeline.attach.axis import PipelineAxis, take_first_ranks_weights
from fourfold.axes.pipeline.attach.check import PipelineCheck
from fourfold.axes.pipeline.rules.schedules import staleness
from fourfold.axes.pipeline.work.chain import map_stages
from fourfold.axes.pipeline.work.gates import SplitTokens
from fourfold.axes.pipeline.work.weight_versions import WeightVersions
from fourfold.axes.tensor.attach import check as tensor
from fourfold.axes.tensor.attach.axis import TensorAxis
from fourfold.axes.tensor.work.split_region import SplitRegion
from fourfold.comm import transports
from fourfold.comm.communicator import Communicator
from fourfold.comm.edge_compression import Compression
from fourfold.comm.meter import CommMeter
from fourfold.comm.reduce.scalars import ScalarReducer
from fourfold.comm.tensor_group import MessageTensorGroup
from fourfold.model.batch_statistics import BatchStatistics, SyncedStatistics, batch_norms, make_exchange
from fourfold.model.objective import LossFunction, Objective, UserLoss
from fourfold.model.rank_dropout import DrawSlices, SplitDropout
from fourfold.model.weights import Weights, update_spec
from fourfold.optim.user_optimizer import OptimizerSource, build_optimizer
from fourfold.plan.batch_split import BatchSplit
from fourfold.plan.check import step_hook_conflicts
from fourfold.plan.plan import Plan
from fourfold.plan.precision import LossScale, LossScaler
from fourfold.proof.attachment import AxisParts, BatchLayout, Rank, TensorCalls, WholeSamples
from fourfold.proof.checks import Check, Proof
from fourfold.proof.digests.batches import DuplicateBatches
from fourfold.proof.digests.build import build_digest, check_same_optimizer
from fourfold.proof.digests.weights import DriftChecker
from fourfold.step.across_steps import AcrossSteps, num_channels
from fourfold.step.argument_checks import StepOptions
from fourfold.step.grad_strategies import DividedByNominalCount, DividedByOwnCount
from fourfold.step.model_checks import (
    OptimizerWatch,
    check_model_loss,
    check_optimizer,
    refuse_own_state_dict,
    watch_norms,
)
from fourfold.step.persistent_state import PersistentState
from fourfold.step.recomputed_blocks import RecomputedBlocks, recomputed_blocks
from fourfold.step.stage import make_chunks
from fourfold.step.stage_assembly import StageAssembly, Trained, lay_out, make_stage
from fourfold.step.step_checks import CollectiveCalls, NanGuard, SkippingNanGuard, StepChecks
from fourfold.step.step_programs import StepPrograms
from fourfold.step.step_state import COUNTED_BY_EACH_RANK, TOTALS, StepParts
from fourfold.step.update_timing import (
    UPDATE_AFTER,
    UPDATE_IN_BACKWARD,
    UpdateInForward,
    UpdateTiming,
)
from fourfold.torch_kit.deferred_grads import DeferredGrads, WholeBackward
from fourfold.torch_kit.deferred_init import InitialModel

ATTACH: tuple[Callable[[Rank], AxisParts[Any]], ...] = (tensor.attach, pipeline.attach, context.attach, data.attach)
"""In the order in which axes cut the model, and in which a first batch is checked: rules of the tensor axis that are
wrong fail in a stage too, in words of torch."""


class Assembly(NamedTuple):
    """What a `TrainStep` is the door of."""

    parts: StepParts
    timing: UpdateTiming
    programs: StepPrograms
    calls: CollectiveCalls
    checks: StepChecks
    split: BatchSplit
    batches: BatchLayout
    proof: Proof
    state: PersistentState
    optimizer: Optimizer
    transport_name: str
    tensor: TensorAxis
    pipeline: PipelineAxis
    pipeline_check: PipelineCheck


class _Axes(NamedTuple):
    """A rank that is attached on all axes."""

    rank: Rank
    parts: Sequence[AxisParts[Any]]
    tensor: TensorAxis
    pipeline: PipelineAxis
    pipeline_check: PipelineCheck

    def lay_out(self, calls: TensorCalls) -> BatchLayout:
        """How batches are laid out: first on the axis that divides samples."""
        layout: BatchLayout = WholeSamples(self.rank.world.device, SplitDropout(self.rank.model, self.rank.draws))
        for each in sorted(self.parts, key=lambda part: not part.divides_samples):
            layout = each.lay_out(self.rank, layout, calls)
        return layout

    def checks(self, weights: Weights) -> list[Check]:
        return [check for each in self.parts for check in each.checks(self.rank, weights)]

    def describe_transports(self, data_ranks: str) -> str:
        """What joins the ranks, in words. `data_ranks`: what joins these."""
        names = [each.transport_name for each in self.parts if each.transport_name]
        return "; ".join([data_ranks, *names] if self.rank.plan.reduce_group_size > 1 or not names else names)


def assemble(
    initial: InitialModel,
    loss: Callable[[Any, Any], Any] | None,
    optimizer_source: OptimizerSource,
    plan: Plan,
    world: Communicator,
    options: StepOptions,
) -> Assembly:
    """Make all parts of a step, on the plan's mesh. Collective. Raises PlanError, OptimizerError, TaskError."""
    check_model_loss(loss, plan)
    model = initial.model
    optimizer = build_optimizer(optimizer_source, list(model.parameters()))
    check_same_optimizer(world, optimizer, model)
    specs = check_optimizer(optimizer, model, plan, options.tensor, skip_nan=options.skip_nan)
    refuse_own_state_dict(optimizer)
    update = update_spec(model, optimizer, clip=options.clip)
    axes = _attach(_make_rank(initial, optimizer, loss, plan, world, options))
    trained = lay_out(model, optimizer, plan, world, specs, update)
    channel = transports.make_world_channel(world, trained.blueprint.topology, plan.transport, axes.rank.meter)
    axes = axes._replace(rank=axes.rank._replace(statistics=_make_statistics(axes.rank, axes.pipeline)))
    rank = axes.rank
    halves = DeferredGrads(trained.parameters) if plan.divides_backward else WholeBackward()
    chunks = make_chunks(rank, axes.pipeline, axes.pipeline_check, halves, _find_recomputed(axes))
    stage = make_stage(trained, world, rank.meter, channel.calls, axes.tensor, chunks, halves)
    programs = StepPrograms(stage.trained.blueprint, world.rank)
    stage.parts.gradients.set_launch_order(programs.reduction_order)
    parts = _make_parts(axes, stage, channel.scalars, options.clip)
    calls = CollectiveCalls(world, TensorCalls(channel.calls, axes.tensor.group, axes.tensor.ranks))
    batches = axes.lay_out(calls.checker)
    preserved = nn.ModuleList([model, rank.skeleton, rank.objective.function.modules(model)])
    key = functools.partial(build_digest, model, plan, options.compared(shares_samples=False), loss)
    weights = stage.parts.weights
    return Assembly(
        parts=parts,
        timing=_make_timing(parts, stage.trained, programs, world),
        programs=programs,
        calls=calls,
        checks=_make_checks(rank, options, calls, stage, axes.pipeline.elsewhere),
        split=plan.batch_split,
        batches=batches,
        proof=Proof(axes.checks(weights), world, preserved, weights.unsharded, key),
        state=stage.state,
        optimizer=optimizer,
        transport_name=axes.describe_transports(stage.parts.transport_name),
        tensor=axes.tensor,
        pipeline=axes.pipeline,
        pipeline_check=axes.pipeline_check,
    )


def _make_rank(
    initial: InitialModel,
    optimizer: Optimizer,
    loss: Callable[[Any, Any], Any] | None,
    plan: Plan,
    world: Communicator,
    options: StepOptions,
) -> Rank:
    """A rank that is attached on no axis yet; it reads the weights of the first stage's rank. Collective."""
    meter, is_batch_split = CommMeter(), plan.batch_split.num_parts > 1
    objective = Objective(LossFunction() if loss is None else UserLoss(loss), is_batch_split=is_batch_split)
    return Rank(
        initial=take_first_ranks_weights(initial, world.along("pp")),
        optimizer=optimizer,
        loss=loss,
        objective=objective,
        plan=plan,
        rules=options.tensor,
        seed=options.seed,
        world=world,
        meter=meter,
        stages=map_stages(initial.model, plan.stage_spec),
        draws=DrawSlices(plan.tp),
        split_tokens=SplitTokens(frozenset(), SplitRegion(MessageTensorGroup(meter, world.device))),
        skeleton=initial.model,
        statistics=BatchStatistics(),
    )


def _attach(rank: Rank) -> _Axes:
    """Leave in the model and its optimizer what this rank has on every axis. Collective."""
    parts = list[AxisParts[Any]]()
    for attach in ATTACH:
        parts.append(attach(rank))
        rank = parts[-1].rank
    on_tensor, on_pipeline, *_ = (each.axis for each in parts)
    return _Axes(rank, parts, on_tensor, *on_pipeline)


def _make_parts(axes: _Axes, stage: StageAssembly, scalars: ScalarReducer, clip: float | None) -> StepParts:
    rank, pipeline, plan = axes.rank, axes.pipeline, axes.rank.plan
    return StepParts(
        stage=stage.parts,
        pp=pipeline.num_places,
        scalars=scalars,
        meter=rank.meter,
        objective=rank.objective,
        local=stage.state.local,
        division=_division(plan),
        loss_scale=LossScaler() if plan.precision == "fp16" else LossScale(),
        added_totals=TOTALS if axes.tensor.group.index == 0 and pipeline.is_last else COUNTED_BY_EACH_RANK,
        edges=pipeline.edges,
        senders=[*pipeline.edges.senders, *pipeline.tied.senders],
        compression=Compression(plan.edge_spec, rank.world.device),
        tied=pipeline.tied,
        count_ranks=rank.world.along("pp", "dp", "cp"),
        max_norm=math.inf if clip is None else clip,
        device=rank.world.device,
    )


def _find_recomputed(axes: _Axes) -> RecomputedBlocks:
    plan, group, pipeline = axes.rank.plan, axes.tensor.group, axes.pipeline
    shares_inputs = plan.recompute == "full" and not plan.sequence_parallel
    group = group if shares_inputs else MessageTensorGroup(group.meter, pipeline.ranks.device)
    names = recomputed_blocks(pipeline.skeleton, plan.recompute, pipeline.stages.chain.blocks)
    return RecomputedBlocks(names, group, plan.recompute == "selective", axes.tensor.split_params)


def _division(plan: Plan) -> DividedByNominalCount:
    # A codec adds what it left out of a step to the next one: both are divided by the same count.
    is_counted = plan.batch_split.num_parts == 1 and plan.codec == "none"
    return DividedByOwnCount() if is_counted else DividedByNominalCount()


def _make_timing(parts: StepParts, trained: Trained, programs: StepPrograms, world: Communicator) -> UpdateTiming:
    plan = trained.plan
    if plan.is_asynchronous:
        spec, stage = plan.pipeline_spec, world.along("pp").rank
        topology, missed = trained.blueprint.topology, staleness(plan.schedule, spec, stage)
        channels = [
            transports.make_world_channel(world, topology, plan.transport, parts.meter).scalars
            for _ in range(num_channels(spec))
        ]
        versions = WeightVersions(trained.parameters, missed)
        return AcrossSteps(parts, programs, versions, channels, spec, stage)
    if plan.update == "in_forward":
        stage = parts.stage
        in_place = [] if stage.gatherer.unshards_params else stage.parameters
        return UpdateInForward(parts, in_place)
    return UpdateTiming(UPDATE_IN_BACKWARD if plan.update == "in_backward" else UPDATE_AFTER)


def _make_checks(
    rank: Rank, options: StepOptions, calls: CollectiveCalls, stage: StageAssembly, elsewhere: Sequence[str]
) -> StepChecks:
    plan, world = rank.plan, rank.world
    return StepChecks(
        calls,
        stage.parts.weights,
        stage.state.local,
        optimizer_watch=OptimizerWatch(rank.optimizer, step_hook_conflicts(plan)),
        norms=watch_norms(rank.model, plan, elsewhere),
        duplicate_batches=DuplicateBatches(
            options.same_batches,
            data_ranks=plan.mesh.peers(0, "dp"),  # of the ranks that share samples, the first
            is_log_rank=world.rank == 0,
        ),
        drift_checker=DriftChecker(world, options.drift_check, with_frozen=not plan.batch_split.has_local_batch_norm),
        nan_guard=SkippingNanGuard(world, rank.model, options.skip_nan) if options.skip_nan else NanGuard(world),
    )


def _make_statistics(rank: Rank, pipeline: PipelineAxis) -> BatchStatistics:
    if rank.plan.batch_norm != "sync" or not batch_norms(rank.model):
        return BatchStatistics()
    exchange = make_exchange(rank.world, rank.meter, transport=rank.plan.transport)
    return SyncedStatistics(rank.model, exchange, skeleton=pipeline.skeleton, elsewhere=pipeline.elsewhere)
