"""Assembly: make what a step works with, of a model, a loss, an optimizer, a plan and the ranks.

Law: each function makes one part of those before it. What a plan asks for is decided here, once, and nowhere later.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn
from torch.optim import Optimizer

from fourfold.parts import mixed_precision
from fourfold.parts.codec import registry
from fourfold.parts.codec.protocol import Codec
from fourfold.parts.comm import transports
from fourfold.parts.comm.communicator import Communicator
from fourfold.parts.comm.meter import CommMeter
from fourfold.parts.comm.reduce.local_sgd import LocalSGDReducer
from fourfold.parts.comm.reduce.protocol import CallChecker, DataTransport
from fourfold.parts.comm.reduce.single_rank import single_rank_transport
from fourfold.parts.comm.reduce.transport_spec import TransportSpec
from fourfold.parts.data.flat_params import param_specs
from fourfold.parts.data.grad_buckets import GradBuckets
from fourfold.parts.data.grad_hooks import GradHooks
from fourfold.parts.data.gradients import Gradients
from fourfold.parts.data.local_sgd import LocalSGD, OuterOptimizer
from fourfold.parts.data.sharded_params import ShardedParams
from fourfold.parts.data.unbucketed_grads import UnbucketedGrads
from fourfold.parts.data.weight_storage import ResidentWeights, ShardedWeights, WeightStorage
from fourfold.parts.dtypes import bucket_dtype
from fourfold.parts.optim.flat_optimizer import FlatOptimizer
from fourfold.parts.optim.master_weights import MasterWeightPolicy, MasterWeights, offload_device
from fourfold.parts.optim.step_hooks import StepHooks
from fourfold.parts.optim.update_slices import UpdateSlice, update_slices
from fourfold.parts.optim.user_optimizer import OptimizerFactory, build_optimizer, group_indices, is_layerwise
from fourfold.plan.data.buckets import Bucket, ParamSpec, effective_bucket_bytes, make_buckets
from fourfold.plan.data.step_program import DataStepSpec
from fourfold.plan.data.zero import RESTING_LAYOUTS, RestingLayouts, grad_buffer_indices, layout_changes
from fourfold.plan.memory import has_unbucketed_grads
from fourfold.plan.plan import Plan
from fourfold.plan.precision import LossScale, LossScaler, UnitLossScale, compute_specs, gradient_bucket
from fourfold.step.batch_layout import BatchLayout, TokenShards, WholeSamples
from fourfold.step.codec_state import CodecState
from fourfold.step.collective_calls import CollectiveCalls
from fourfold.step.dry_run.first_batch import DryRun
from fourfold.step.grad_scaling import GradScaling, ScaledInUpdate, ScaledSums
from fourfold.step.grad_sync import GradSync, LocalSteps, SumEveryStep
from fourfold.step.model_checks import check_model_loss, check_update_timing
from fourfold.step.objective import Objective
from fourfold.step.persistent_state import PersistentState
from fourfold.step.rank_agreement import check_same_on_ranks
from fourfold.step.sequence.sequence_parallel import SequenceParallel
from fourfold.step.stage import whole_model_stage
from fourfold.step.step_checks import StepChecks
from fourfold.step.step_options import StepOptions
from fourfold.step.step_parts import StageParts, StepParts
from fourfold.step.step_programs import StepPrograms
from fourfold.step.update_timing import UpdateAfterBackward, UpdateInBackward, UpdateInForward, UpdateTiming
from fourfold.step.user_optimizer import check_user_optimizer
from fourfold.step.weights import Weights, trainable_parameters
from fourfold.words.layout import SPLIT, WHOLE, Change
from fourfold.words.program import Verb


class Assembly(NamedTuple):
    """What a `TrainStep` is the door of."""

    parts: StepParts
    timing: UpdateTiming
    programs: StepPrograms
    calls: CollectiveCalls
    checks: StepChecks
    batches: BatchLayout
    dry_run: DryRun
    state: PersistentState
    codecs: Sequence[Codec]
    optimizer: Optimizer
    buckets: Sequence[Bucket]
    transport_name: str


class _Trained(NamedTuple):
    """The trained parameters in buckets, and how they rest here."""

    model: nn.Module
    by_name: Mapping[str, nn.Parameter]
    buckets: Sequence[Bucket]
    by_bucket: Sequence[Sequence[nn.Parameter]]
    optimizer: Optimizer
    layouts: RestingLayouts
    """As the plan has them; weights that exist once per host rest whole."""

    @property
    def is_sharded(self) -> bool:
        """Whether optimizer states rest split."""
        return self.layouts.state == SPLIT

    @property
    def is_layerwise(self) -> bool:
        return is_layerwise(self.optimizer)


def assemble(
    model: nn.Module,
    loss: Callable[[Any, Any], Any] | None,
    optimizer_factory: OptimizerFactory,
    plan: Plan,
    world: Communicator,
    options: StepOptions,
) -> Assembly:
    """Make all parts of a step. Collective. Raises PlanError, OptimizerError, TaskError or SettingError."""
    check_model_loss(loss, plan)
    objective, meter = Objective(loss), CommMeter()
    optimizer = build_optimizer(optimizer_factory, list(model.parameters()))
    check_update_timing(optimizer, plan)
    check_user_optimizer(optimizer, plan)
    world = world.on_mesh(plan.mesh)
    data_ranks = world.along("dp", "sp")
    trained = _lay_out(model, optimizer, plan, world, options)
    channel = transports.make_world_channel(world, plan.transport, meter)
    calls = CollectiveCalls(world, channel.calls)
    codecs = _make_codecs(plan, trained)
    gradients, transport, averager = _make_gradients(trained, plan, data_ranks, meter, channel.calls, codecs)
    layouts = _resting_layouts(trained, transport)
    weights = _make_weights(trained, plan, transport, data_ranks)
    flat = _make_optimizer(trained, plan, transport, gradients, weights)
    sync = _make_sync(plan, trained, weights, averager)
    stage = StageParts(
        stage=whole_model_stage(model, objective),
        parameters=trained.by_bucket,
        gradients=gradients,
        grad_hooks=GradHooks([parameter for members in trained.by_bucket for parameter in members]),
        reducer=transport.grads,
        gatherer=transport.weights,
        data_ranks=data_ranks,
        scalars=transport.scalars,
        optimizer=flat,
        weights=weights,
        step_hooks=_make_hooks(trained, plan),
        reduces_every_backward=trained.layouts.gradient == SPLIT,
        update_verbs=_update_verbs(layouts),
    )
    parts = StepParts(
        stages=[stage],
        scalars=channel.scalars,
        meter=meter,
        objective=objective,
        sync=sync,
        scaling=_make_scaling(trained, flat),
        loss_scale=_make_loss_scale(plan),
        max_norm=float("inf") if options.clip is None else options.clip,
        device=world.device,
    )
    state = PersistentState(
        weights,
        trained.buckets,
        flat,
        transport,
        data_ranks,
        CodecState(codecs, data_ranks),
        sync,
        is_sharded=trained.is_sharded,
    )
    return Assembly(
        parts=parts,
        timing=_make_timing(plan, parts),
        programs=_make_programs(trained, plan, layouts, options),
        calls=calls,
        checks=StepChecks(model, optimizer, plan, options, calls, weights, sync),
        batches=_make_batches(model, loss, plan, world, meter, seed=options.seed),
        dry_run=_make_dry_run(model, objective, plan, weights, world),
        state=state,
        codecs=codecs,
        optimizer=optimizer,
        buckets=trained.buckets,
        transport_name=transport.description,
    )


def _lay_out(model: nn.Module, optimizer: Optimizer, plan: Plan, world: Communicator, options: StepOptions) -> _Trained:
    """The buckets of the trained parameters; all ranks have the same, or raise PlanError. Collective."""
    trainable = trainable_parameters(model)
    own_specs = param_specs(trainable, group_indices(optimizer, trainable))
    shapes = {name: list(p.shape) for name, p in trainable.items()}
    compared = {name: value for name, value in options._asdict().items() if name != "seed"}
    check_same_on_ranks(world, own_specs, shapes, plan=plan, options=compared, optimizer=optimizer)
    # Split over one rank is whole.
    layouts = RESTING_LAYOUTS[plan.zero if plan.num_shards > 1 else 0]
    specs = compute_specs(own_specs, plan.precision, excluded=mixed_precision.full_precision_params(model))
    num_shards = plan.reduce_group_size if layouts.state == SPLIT else 1
    buckets = _make_buckets(plan, specs, world, num_shards=num_shards)
    by_bucket = [[trainable[slot.name] for slot in bucket.slots] for bucket in buckets]
    return _Trained(model, trainable, buckets, by_bucket, optimizer, layouts)


def _make_buckets(plan: Plan, specs: Sequence[ParamSpec], world: Communicator, *, num_shards: int) -> Sequence[Bucket]:
    # A codec's residuals depend on the buckets: with a codec, one host has the same buckets as several.
    is_inter_host = world.num_hosts > 1 or plan.codec != "none"
    num_bytes = effective_bucket_bytes(specs, plan.bucket_bytes, is_inter_host=is_inter_host)
    return make_buckets(specs, bucket_bytes=num_bytes, num_shards=num_shards)


def _make_codecs(plan: Plan, trained: _Trained) -> list[Codec]:
    """One codec for each bucket; none without a codec in the plan."""
    codec_spec = plan.codec_spec
    if codec_spec is None:
        return []
    return [
        registry.make_codec(
            codec_spec,
            gradient_bucket(bucket, plan.reduce_dtype),
            [tuple(p.shape) for p in params],
            device=params[0].device,
        )
        for bucket, params in zip(trained.buckets, trained.by_bucket, strict=True)
    ]


class _GradientParts(NamedTuple):
    """The gradients, what reduces them, and with local SGD what averages weights."""

    gradients: Gradients
    transport: DataTransport
    averager: LocalSGDReducer | None


def _make_gradients(
    trained: _Trained,
    plan: Plan,
    data_ranks: Communicator,
    meter: CommMeter,
    calls: CallChecker,
    codecs: Sequence[Codec],
) -> _GradientParts:
    """The gradients in their buckets, or where autograd puts them, and the transport that reduces them. Collective."""
    allow_unused, spec = plan.unused == "allow", _transport_spec(plan, trained)
    if has_unbucketed_grads(plan):
        unbucketed = UnbucketedGrads(trained.by_name, trained.buckets, meter, allow_unused=allow_unused)
        transport = transports.make_data_transport(
            data_ranks, spec, meter=meter, calls=calls, choice=plan.transport, unbucketed_grads=unbucketed.local_grads
        )
        return _GradientParts(unbucketed, transport, None)
    transport = transports.make_data_transport(
        data_ranks, spec, meter=meter, calls=calls, choice=plan.transport, codecs=codecs
    )
    averager = None
    if plan.sync == "local":
        averager = LocalSGDReducer(transport.grads)
        local = single_rank_transport(averager, spec.num_scalars)
        transport = local._replace(description=transport.description)
        meter = CommMeter()  # with local steps gradients are not sent, and not recorded
    gradients = GradBuckets(
        trained.by_name,
        trained.buckets,
        transport.grads,
        meter,
        allow_unused=allow_unused,
        may_block_in_backward=not transport.weights.unshards_params,
    )
    return _GradientParts(gradients, transport, averager)


def _transport_spec(plan: Plan, trained: _Trained) -> TransportSpec:
    """What the transport must provide for these buckets."""
    gradients = [gradient_bucket(bucket, plan.reduce_dtype) for bucket in trained.buckets]
    num_params = len(trained.by_name)
    return TransportSpec(
        sizes=tuple(bucket.size for bucket in trained.buckets),
        dtypes=tuple(map(bucket_dtype, gradients)),
        buffer_indices=grad_buffer_indices(len(gradients), is_cyclic=trained.layouts.gradient == SPLIT),
        rest=trained.layouts,
        num_scalars=max(8, 2 * num_params if trained.is_layerwise else num_params),
        num_shards=plan.num_shards if trained.is_sharded else None,
        weight_dtypes=tuple(map(bucket_dtype, trained.buckets)),
    )


def _make_weights(trained: _Trained, plan: Plan, transport: DataTransport, data_ranks: Communicator) -> Weights:
    """The weights where they rest, and master weights. Collective: broadcasts the first rank's."""
    policy = MasterWeightPolicy(plan.precision, trained.is_sharded, offload_device(plan.offload, data_ranks.device))
    masters = MasterWeights(trained.by_name, trained.buckets, transport.grads, policy)
    for name in masters.param_names:
        # Before the weights are copied into flats, which rounds them.
        data_ranks.broadcast(trained.by_name[name].data)
        masters.load_parameter(name, trained.by_name[name].data)
    if plan.precision != "keep":
        mixed_precision.cast_model(trained.model, plan.precision)
    storage: WeightStorage
    if transport.weights.unshards_params:
        sharded = ShardedParams(trained.by_bucket, trained.buckets, transport.grads, transport.weights)
        storage = ShardedWeights(trained.by_name, sharded, data_ranks)
    else:
        storage = ResidentWeights(trained.by_name, trained.buckets, transport.weights, data_ranks)
    return Weights(trained.model, trained.buckets, storage, masters, data_ranks, is_mean=_outer_optimizer(plan).is_mean)


def _make_optimizer(
    trained: _Trained, plan: Plan, transport: DataTransport, gradients: Gradients, weights: Weights
) -> FlatOptimizer:
    slices: Sequence[Sequence[UpdateSlice]]
    if isinstance(gradients, UnbucketedGrads):
        slices = gradients.update_slices(weights.flats, trained.buckets)
    else:
        slices = update_slices(
            weights.storage.shards,
            weights.master_weights,
            trained.buckets,
            transport.grads,
            split_by_param=plan.unused == "allow" or trained.is_layerwise,
            is_chunked=trained.is_sharded,
        )
    prepare = transport.grads.reduce_range if trained.is_sharded else None
    return FlatOptimizer(trained.optimizer, trained.buckets, slices, prepare_grads=prepare)


def _outer_optimizer(plan: Plan) -> OuterOptimizer:
    return OuterOptimizer(plan.outer_lr, plan.outer_momentum) if plan.sync == "local" else OuterOptimizer()


def _make_sync(plan: Plan, trained: _Trained, weights: Weights, averager: LocalSGDReducer | None) -> GradSync:
    if averager is None:
        return SumEveryStep()
    local_sgd = LocalSGD(weights.flats, trained.buckets, averager, _outer_optimizer(plan))
    return LocalSteps(local_sgd, plan.dp)


def _make_hooks(trained: _Trained, plan: Plan) -> StepHooks:
    return StepHooks(
        trained.optimizer,
        trained.buckets,
        trained.by_bucket,
        is_unbucketed=has_unbucketed_grads(plan),
        can_skip_params=plan.unused == "allow" or trained.is_layerwise,
    )


def _resting_layouts(trained: _Trained, transport: DataTransport) -> RestingLayouts:
    """The layouts on these hosts: weights that exist once per host need no unshard before use."""
    if trained.layouts.weight == SPLIT and not transport.weights.unshards_params:
        return RESTING_LAYOUTS[2]
    return trained.layouts


def _update_verbs(layouts: RestingLayouts) -> tuple[Verb, ...]:
    gathers = layout_changes(layouts).after_update != Change.NONE
    return (Verb.UPDATE, Verb.GATHER) if gathers else (Verb.UPDATE,)


def _make_scaling(trained: _Trained, optimizer: FlatOptimizer) -> GradScaling:
    scales_sums = trained.layouts.state == WHOLE and not optimizer.converts_grads
    return ScaledSums() if scales_sums else ScaledInUpdate()


def _make_loss_scale(plan: Plan) -> LossScale:
    return LossScaler() if plan.precision == "fp16" else UnitLossScale()


def _make_timing(plan: Plan, parts: StepParts) -> UpdateTiming:
    if plan.update == "in_forward":
        return UpdateInForward(parts)
    return UpdateInBackward() if plan.update == "in_backward" else UpdateAfterBackward()


def _make_programs(trained: _Trained, plan: Plan, layouts: RestingLayouts, options: StepOptions) -> StepPrograms:
    spec = DataStepSpec(
        plan.microbatches,
        len(trained.buckets),
        layouts,
        has_clip=options.clip is not None or plan.precision == "fp16",
        allows_unused=plan.unused == "allow",
        update=plan.update,
        has_trust_ratios=trained.is_layerwise and trained.is_sharded,
    )
    return StepPrograms(spec, is_local=plan.sync == "local", interval=plan.sync_interval)


def _make_batches(
    model: nn.Module,
    loss: Callable[[Any, Any], Any] | None,
    plan: Plan,
    world: Communicator,
    meter: CommMeter,
    *,
    seed: int,
) -> BatchLayout:
    if loss is None or plan.sp == 1:
        return WholeSamples(world.device)
    return TokenShards(SequenceParallel(model, loss, plan, world, meter, seed=seed), world.device)


def _make_dry_run(model: nn.Module, objective: Objective, plan: Plan, weights: Weights, world: Communicator) -> DryRun:
    return DryRun(
        model,
        objective,
        plan,
        world.device,
        weights,
        num_local_ranks=world.world.local_size,
        is_log_rank=world.rank == 0,
    )
