"""Assembly: make what a step works with, of a model, a loss, an optimizer, a plan and the ranks.

Law: each function makes one part of those before it. What a plan asks for is decided here, once, and nowhere later.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import nn
from torch.optim import Optimizer

from fourfold.axes.context.attach.axis import ContextParallel
from fourfold.axes.context.attach.check import ContextCheck
from fourfold.axes.context.work.context_group import connect_context
from fourfold.axes.data.attach.check import CheckedTask, ForwardCheck, GradientCheck
from fourfold.axes.data.rules.buckets import Bucket
from fourfold.axes.pipeline.attach import axis as pipeline_axis
from fourfold.axes.pipeline.attach.axis import PipelineAxis, load_own_weights, take_first_ranks_weights, whole_pipeline
from fourfold.axes.pipeline.attach.check import PipelineCheck
from fourfold.axes.pipeline.attach.skeleton import make_skeleton
from fourfold.axes.pipeline.rules.schedules import staleness
from fourfold.axes.pipeline.work.chain import map_stages
from fourfold.axes.pipeline.work.gates import SplitTokens
from fourfold.axes.pipeline.work.weight_versions import WeightVersions
from fourfold.axes.tensor.attach import axis as tensor_axis
from fourfold.axes.tensor.attach.axis import TensorAxis
from fourfold.axes.tensor.attach.check import TensorCheck
from fourfold.axes.tensor.attach.tensor_calls import TensorCalls
from fourfold.comm import transports
from fourfold.comm.codec.protocol import Codec
from fourfold.comm.communicator import Communicator
from fourfold.comm.edge_compression import make_compression
from fourfold.comm.meter import CommMeter
from fourfold.comm.reduce.protocol import ScalarReducer
from fourfold.comm.row_exchange import make_row_exchange
from fourfold.comm.tensor.protocol import CALL_ROW, SingleRankTensorGroup
from fourfold.model.batch import unpack_batch
from fourfold.model.batch_statistics import BatchStatistics, OwnStatistics, SyncedStatistics, batch_norms, make_exchange
from fourfold.model.draw_slices import DrawSlices
from fourfold.model.loss_function import ModelLoss, UserLoss
from fourfold.model.objective import Objective
from fourfold.model.rank_dropout import SplitDropout
from fourfold.model.weights import Weights
from fourfold.optim.user_optimizer import OptimizerSource, build_optimizer
from fourfold.plan.batch_split import BatchSplit
from fourfold.plan.check import read_only_reason, step_hook_conflicts
from fourfold.plan.plan import Plan
from fourfold.plan.precision import LossScaler, UnitLossScale
from fourfold.proof.checks import Check, Proof
from fourfold.proof.digests.batches import DuplicateBatches
from fourfold.proof.digests.build import build_digest, check_same_optimizer
from fourfold.proof.digests.weights import DriftChecker
from fourfold.proof.weight_write_check import WeightWriteCheck
from fourfold.step.across_steps import make_across_steps, num_channels
from fourfold.step.batch_layout import BatchLayout, SharedSamples, TokenShards, WholeSamples
from fourfold.step.collective_calls import CollectiveCalls
from fourfold.step.forward_fusion import DeferredUpdates
from fourfold.step.grad_strategies import DividedByNominalCount, DividedByOwnCount, LossDivision
from fourfold.step.model_checks import check_model_loss, check_specs, check_update_timing, watch_norms
from fourfold.step.model_layout import laid_out_specs, whole_specs
from fourfold.step.nan_guard import NanGuard
from fourfold.step.optimizer_checks import OptimizerWatch, check_user_optimizer, refuse_own_state_dict
from fourfold.step.persistent_state import PersistentState
from fourfold.step.recomputed_blocks import RecomputedBlocks, recomputed_blocks
from fourfold.step.stage import make_chunks
from fourfold.step.stage_assembly import StageAssembly, Trained, lay_out, make_stage
from fourfold.step.step_checks import StepChecks
from fourfold.step.step_options import StepOptions
from fourfold.step.step_programs import StepPrograms
from fourfold.step.step_state import COUNTED_BY_EACH_RANK, TOTALS, StepParts
from fourfold.step.update_timing import (
    UPDATE_AFTER,
    UPDATE_IN_BACKWARD,
    ImmediateUpdates,
    UpdateInForward,
    UpdateTiming,
)
from fourfold.torch_kit.deferred_grads import DeferredGrads, WholeBackward
from fourfold.torch_kit.deferred_init import InitialModel


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
    codecs: Sequence[Codec]
    optimizer: Optimizer
    buckets: Sequence[Bucket]
    transport_name: str
    tensor: TensorAxis
    pipeline: PipelineAxis
    pipeline_check: PipelineCheck


class _Axes(NamedTuple):
    """The axes by which the model is cut, and the check of its stages."""

    tensor: TensorAxis
    pipeline: PipelineAxis
    pipeline_check: PipelineCheck


class _AxisChecks(NamedTuple):
    """The checks of the axes by which batches or the model are laid out, in the order in which they run."""

    tensor: TensorCheck | None = None
    """Before the stages: rules that are wrong fail in a stage too, in words of torch."""
    pipeline: PipelineCheck | None = None
    context: ContextCheck | None = None


def assemble(
    initial: InitialModel,
    loss: Callable[[Any, Any], Any] | None,
    optimizer_source: OptimizerSource,
    plan: Plan,
    world: Communicator,
    options: StepOptions,
) -> Assembly:
    """Make all parts of a step, on the plan's mesh. Collective. Raises PlanError, OptimizerError, TaskError."""
    model, objective, meter = initial.model, _make_objective(loss, plan), CommMeter()
    optimizer = _take_optimizer(optimizer_source, model, plan, options, world)
    specs = laid_out_specs(model, optimizer, options.tensor, plan.tensor_spec, plan.stage_spec)
    whole = whole_specs(model, optimizer, specs, options.clip)
    tensor, pipeline = _cut(initial, optimizer, plan, options, world, meter)
    pipeline_check = PipelineCheck(
        model, objective, pipeline, world, SplitTokens(tensor.sequence_parallel.entries, tensor.region)
    )
    axes = _Axes(tensor, pipeline, pipeline_check)
    trained = lay_out(model, optimizer, plan, world, whole)
    channel = transports.make_world_channel(world, trained.blueprint.topology, plan.transport, meter)
    statistics = _make_statistics(model, plan, world, meter, pipeline)
    halves = DeferredGrads(trained.parameters) if plan.divides_backward else WholeBackward()
    chunks = make_chunks(model, objective, statistics, pipeline, pipeline_check, halves, _find_recomputed(plan, axes))
    stage = make_stage(trained, world, meter, channel.calls, tensor, chunks, halves)
    programs = StepPrograms(stage.trained.blueprint, world.rank)
    stage.parts.gradients.set_launch_order(programs.reduction_order)
    parts = _make_parts(stage, channel.scalars, meter, objective, plan, options, world, axes)
    calls = CollectiveCalls(world, TensorCalls(channel.calls, tensor.group, tensor.ranks))
    batches, of_axes = _lay_out_batches(model, loss, plan, world, meter, axes, calls.checker, options.seed)
    checks = _with_data_checks(of_axes, objective, statistics, plan, stage.parts.weights, world, axes)
    preserved = nn.ModuleList([model, pipeline.skeleton, objective.loss_modules(model)])
    key = functools.partial(build_digest, model, plan, options.compared(shares_samples=False), loss)
    return Assembly(
        parts=parts,
        timing=_make_timing(parts, stage.trained, programs, world),
        programs=programs,
        calls=calls,
        checks=_make_checks(model, optimizer, plan, options, calls, stage, pipeline.elsewhere),
        split=plan.batch_split,
        batches=batches,
        proof=Proof(checks, world, preserved, stage.parts.weights.unsharded, key),
        state=stage.state,
        codecs=stage.codecs,
        optimizer=optimizer,
        buckets=stage.trained.buckets,
        transport_name=_describe_transports(stage.transport_name, plan, axes),
        tensor=tensor,
        pipeline=pipeline,
        pipeline_check=pipeline_check,
    )


def _describe_transports(data_ranks: str, plan: Plan, axes: _Axes) -> str:
    """What joins the ranks, in words. `data_ranks`: what joins these."""
    names = [f"tensor ranks: {axes.tensor.group.name}"] if plan.tp > 1 else []
    names += [f"stages: {axes.pipeline.edges.name}"] if plan.pp > 1 else []
    return "; ".join([data_ranks, *names] if plan.reduce_group_size > 1 or not names else names)


def _make_parts(
    stage: StageAssembly,
    scalars: ScalarReducer,
    meter: CommMeter,
    objective: Objective,
    plan: Plan,
    options: StepOptions,
    world: Communicator,
    axes: _Axes,
) -> StepParts:
    pipeline = axes.pipeline
    return StepParts(
        stage=stage.parts,
        pp=pipeline.num_places,
        scalars=scalars,
        meter=meter,
        objective=objective,
        scope=stage.local.scope,
        local_sgd=stage.local.local_sgd,
        division=_division(plan),
        scaling=stage.scaling,
        loss_scale=LossScaler() if plan.precision == "fp16" else UnitLossScale(),
        added_totals=TOTALS if axes.tensor.group.index == 0 and pipeline.is_last else COUNTED_BY_EACH_RANK,
        edges=pipeline.edges,
        compression=make_compression(plan.edge_spec, world.device),
        tied=pipeline.tied,
        count_ranks=world.along("pp", "dp", "cp"),
        max_norm=math.inf if options.clip is None else options.clip,
        device=world.device,
    )


def _cut(
    initial: InitialModel, optimizer: Optimizer, plan: Plan, options: StepOptions, world: Communicator, meter: CommMeter
) -> tuple[TensorAxis, PipelineAxis]:
    """Leave in the model and its optimizer what this rank's place on the tensor and the pipeline axis has."""
    model, ranks, stages = initial.model, world.along("pp"), map_stages(initial.model, plan.stage_spec)
    initial = take_first_ranks_weights(initial, ranks)
    tensor = tensor_axis.cut(
        initial,
        options.tensor,
        world,
        meter,
        spec=plan.tensor_spec,
        transport=plan.transport,
        is_own=lambda name: stages.place_of(name) == ranks.rank,
    )
    if ranks.size == 1:
        return tensor, whole_pipeline(model, stages, ranks)
    if not tensor.is_cut:
        load_own_weights(initial, stages, ranks)
    skeleton = make_skeleton(model, plan.precision, [tensor.region])
    return tensor, pipeline_axis.cut(model, skeleton, optimizer, stages, ranks, meter, transport=plan.transport)


def _find_recomputed(plan: Plan, axes: _Axes) -> RecomputedBlocks:
    tensor, pipeline, _ = axes
    shares_inputs = plan.recompute == "full" and not plan.sequence_parallel
    group = tensor.group if shares_inputs else SingleRankTensorGroup(tensor.group.meter, pipeline.ranks.device)
    names = recomputed_blocks(pipeline.skeleton, plan.recompute, pipeline.stages.chain.blocks)
    return RecomputedBlocks(names, group, plan.recompute == "selective", tensor.split_params)


def _take_optimizer(
    source: OptimizerSource, model: nn.Module, plan: Plan, options: StepOptions, world: Communicator
) -> Optimizer:
    optimizer = build_optimizer(source, list(model.parameters()))
    check_same_optimizer(world, optimizer, model)
    check_specs(plan, laid_out_specs(model, optimizer, options.tensor, plan.tensor_spec, plan.stage_spec))
    check_update_timing(optimizer, plan, skip_nan=options.skip_nan)
    check_user_optimizer(optimizer, step_hook_conflicts(plan))
    refuse_own_state_dict(optimizer)
    return optimizer


def _make_objective(loss: Callable[[Any, Any], Any] | None, plan: Plan) -> Objective:
    check_model_loss(loss, plan)
    is_batch_split = plan.batch_split.num_parts > 1
    return Objective(ModelLoss() if loss is None else UserLoss(loss), is_batch_split=is_batch_split)


def _division(plan: Plan) -> LossDivision:
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
        return make_across_steps(parts, programs, versions, channels, spec, stage)
    if plan.update == "in_forward":
        stage = parts.stage
        in_place = [] if stage.gatherer.unshards_params else stage.parameters
        return UpdateInForward(parts, DeferredUpdates(stage, parts.meter, in_place))
    return ImmediateUpdates(UPDATE_IN_BACKWARD if plan.update == "in_backward" else UPDATE_AFTER)


def _make_checks(
    model: nn.Module,
    optimizer: Optimizer,
    plan: Plan,
    options: StepOptions,
    calls: CollectiveCalls,
    stage: StageAssembly,
    elsewhere: Sequence[str],
) -> StepChecks:
    world = calls.world
    return StepChecks(
        calls,
        stage.parts.weights,
        stage.local,
        optimizer_watch=OptimizerWatch(optimizer, step_hook_conflicts(plan)),
        norms=watch_norms(model, plan, elsewhere),
        duplicate_batches=DuplicateBatches(
            options.same_batches,
            data_ranks=plan.mesh.peers(0, "dp"),  # of the ranks that share samples, the first
            is_log_rank=world.rank == 0,
        ),
        drift_checker=DriftChecker(world, options.drift_check, with_frozen=not plan.batch_split.has_local_batch_norm),
        nan_guard=NanGuard(world, model, limit=options.skip_nan),
    )


def _make_statistics(
    model: nn.Module, plan: Plan, world: Communicator, meter: CommMeter, pipeline: PipelineAxis
) -> BatchStatistics:
    if plan.batch_norm != "sync" or not batch_norms(model):
        return OwnStatistics()
    exchange = make_exchange(world, meter, transport=plan.transport)
    return SyncedStatistics(model, exchange, skeleton=pipeline.skeleton, elsewhere=pipeline.elsewhere)


def _lay_out_batches(
    model: nn.Module,
    loss: Callable[[Any, Any], Any] | None,
    plan: Plan,
    world: Communicator,
    meter: CommMeter,
    axes: _Axes,
    tensor_calls: TensorCalls,
    seed: int,
) -> tuple[BatchLayout, _AxisChecks]:
    """How batches are laid out, and the checks of the axes by which they or the model are."""
    tensor, pipeline, pipeline_check = axes
    slices, checks = DrawSlices(tensor.group.size), _AxisChecks()
    layout: BatchLayout = WholeSamples(world.device, SplitDropout(model, slices))
    if loss is not None and plan.cp > 1:
        ranks = world.along("cp")
        group = connect_context(ranks, meter, ring=plan.ring, ulysses=plan.ulysses, transport=plan.transport)
        check = ContextCheck(pipeline.skeleton, loss, group.spec, world)
        context = ContextParallel(
            model, group, world, check=check, num_microbatches=plan.microbatches, draw_slices=slices, seed=seed
        )
        checks, layout = checks._replace(context=check), TokenShards(context, world.device)
    if tensor.is_cut:
        rules = TensorCheck(pipeline.skeleton, tensor, world, slices, trained=model, loss=loss)
        checks = checks._replace(tensor=rules)
        layout = SharedSamples(layout, "tp", tensor_calls.ranks, tensor_calls.agree)
    if pipeline.is_cut:
        ranks = pipeline.ranks
        rows = make_row_exchange(ranks, "batches", meter, choice=plan.transport, first_length=CALL_ROW)
        agree = functools.partial(tensor_calls.agree_with_stages, rows, ranks)
        checks = checks._replace(pipeline=pipeline_check)
        layout = SharedSamples(layout, "pp", ranks, agree, (seed, world.along("dp").rank))
    return layout, checks


def _with_data_checks(
    of_axes: _AxisChecks,
    objective: Objective,
    statistics: BatchStatistics,
    plan: Plan,
    weights: Weights,
    world: Communicator,
    axes: _Axes,
) -> list[Check]:
    """All checks, in order."""
    storage, masters = weights.storage.forward_loss_reason, weights.master_weights.forward_loss_reason
    reason = read_only_reason(plan, storage=storage, master_weights=masters)
    context = of_axes.context
    task = CheckedTask(
        axes.pipeline.skeleton,
        objective,
        statistics,
        plan.batch_split,
        world,
        whole_shown_to_loss=axes.pipeline_check.whole_shown_to_loss,
        shortened=unpack_batch if context is None else context.shortened,
        is_scale_dependent=lambda: context is not None and context.is_scale_dependent,
    )
    forwards = ForwardCheck(task, WeightWriteCheck(weights, reason, num_ranks=plan.batch_split.num_ranks))
    return [*(check for check in of_axes if check is not None), forwards, GradientCheck(task, forwards)]
