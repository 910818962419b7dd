"""Stage assembly: make what the actions of a stage work with, of its parameters, a plan and the ranks.

Law: what a plan asks for is decided here, once, and nowhere later.
"""

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import nn
from torch.optim import Optimizer

from fourfold.axes.data.rules.buckets import Bucket
from fourfold.axes.data.rules.step_program import update_verbs
from fourfold.axes.data.rules.zero import RestingLayouts
from fourfold.axes.data.work.gradients import GradBuckets, Gradients, UnbucketedGrads
from fourfold.axes.data.work.local_sgd import LocalSGD, OuterOptimizer
from fourfold.axes.data.work.sharded_params import ShardedParams
from fourfold.axes.data.work.weight_edits import RefusedEdits, TrainedEdits
from fourfold.axes.data.work.weight_storage import HostSharedWeights, ResidentWeights, ShardedWeights, WeightStorage
from fourfold.axes.tensor.attach.axis import TensorAxis
from fourfold.axes.tensor.work.whole_tensors import WholeTensors
from fourfold.comm import transports
from fourfold.comm.codec.protocol import Codec
from fourfold.comm.communicator import Communicator, gather_topology, topology_along
from fourfold.comm.memory_order import agree_on_memory_order
from fourfold.comm.meter import CommMeter
from fourfold.comm.rank_layout import RankLayout, SplitLayout, WholeLayout
from fourfold.comm.reduce.group import LocalSGDReducer, single_rank_transport
from fourfold.comm.reduce.protocol import DataTransport, spec_of_request
from fourfold.comm.reduce.scalars import CallChecker
from fourfold.model.weights import Weights, trainable_parameters
from fourfold.optim.flat_optimizer import FlatOptimizer, UpdateSlice, update_slices
from fourfold.optim.master_weights import MasterWeights, offload_device
from fourfold.optim.user_optimizer import StepHooks
from fourfold.plan.lowering import Blueprint, DataGroup, lower
from fourfold.plan.param_spec import ParamSpec, UpdateSpec
from fourfold.plan.plan import Plan
from fourfold.plan.topology import NO_SHARED_MEMORY, Topology
from fourfold.step.grad_strategies import (
    LocalSteps,
    OfAllRanks,
    OfWorker,
    OneRound,
    RoundEveryBackward,
    ScaledInUpdate,
    ScaledSums,
    sum_over_shards,
    sum_over_tensor_ranks,
)
from fourfold.step.persistent_state import CodecState, PersistentState, make_codecs
from fourfold.step.stage import Chunk, Stage
from fourfold.torch_kit import mixed_precision
from fourfold.torch_kit.deferred_grads import WholeBackward
from fourfold.torch_kit.grad_hooks import GradHooks
from fourfold.words.layout import SPLIT


class Trained(NamedTuple):
    """The trained parameters, and how lowering has laid them out for this rank."""

    model: nn.Module
    optimizer: Optimizer
    by_name: Mapping[str, nn.Parameter]
    blueprint: Blueprint
    group: DataGroup

    @property
    def plan(self) -> Plan:
        return self.blueprint.plan

    @property
    def buckets(self) -> Sequence[Bucket]:
        return self.group.buckets

    @property
    def by_bucket(self) -> list[list[nn.Parameter]]:
        """By bucket and slot."""
        return [[self.by_name[slot.name] for slot in bucket.slots] for bucket in self.buckets]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Of all buckets, as gradient hooks number them."""
        return list(itertools.chain.from_iterable(self.by_bucket))

    @property
    def layouts(self) -> RestingLayouts:
        """Where tensors rest on these hosts."""
        return self.group.resting_layouts

    @property
    def is_sharded(self) -> bool:
        """Whether optimizer states rest split."""
        return self.blueprint.is_sharded

    @property
    def updates_by_param(self) -> bool:
        """Whether the update works on one parameter at a time."""
        return self.plan.unused == "allow" or self.blueprint.update_spec.is_layerwise


class StageAssembly(NamedTuple):
    """A stage, and what lasts from step to step."""

    parts: Stage
    trained: Trained
    """As the transport lets tensors rest."""
    state: PersistentState


def make_stage(
    trained: Trained,
    world: Communicator,
    meter: CommMeter,
    calls: CallChecker,
    tensor: TensorAxis,
    chunks: Mapping[int, Chunk],
    halves: WholeBackward,
) -> StageAssembly:
    """Make the parts of a stage. Collective. Raises PlanError."""
    data_ranks, whole_tensors = world.along("dp", "cp"), tensor.whole_tensors
    agree_on_memory_order(trained.by_name, data_ranks, is_possible=trained.plan.has_plain_flats)
    codecs = make_codecs(trained.plan.codec_spec, trained.group.stage.gradient_buckets, trained.by_bucket)
    topology = topology_along(world, trained.blueprint.topology, data_ranks)
    gradients, transport, averager = _make_gradients(trained, data_ranks, topology, meter, calls, codecs)
    trained = _as_joined(trained, transport, world.rank)
    layout: RankLayout = WholeLayout(trained.by_name, trained.buckets, data_ranks)
    sum_norms, scaling = functools.partial(sum_over_tensor_ranks, tensor.group), ScaledSums()
    if trained.is_sharded:
        layout = SplitLayout(trained.by_name, trained.buckets, transport.grads, data_ranks)
        sum_norms = functools.partial(sum_over_shards, tensor.group, transport.scalars, transport.grads)
    weights = _make_weights(trained, transport, layout, data_ranks, whole_tensors)
    optimizer = _make_optimizer(trained, transport, gradients, weights)
    if trained.is_sharded or optimizer.converts_grads:  # the update goes over every gradient anyway
        scaling = ScaledInUpdate()
    parts = Stage(
        pp_index=trained.group.stage.stage,
        chunks=chunks,
        parameters=trained.by_bucket,
        bucket_stages=trained.group.stage.bucket_stages,
        gradients=gradients,
        grad_hooks=GradHooks(trained.parameters),
        halves=halves,
        reducer=transport.grads,
        gatherer=transport.weights,
        scalars=transport.scalars,
        optimizer=optimizer,
        weights=weights,
        step_hooks=StepHooks(
            trained.optimizer,
            trained.buckets,
            trained.by_bucket,
            is_unbucketed=trained.blueprint.has_unbucketed_grads,
            can_skip_params=trained.updates_by_param,
        ),
        rounds=RoundEveryBackward() if trained.layouts.gradient == SPLIT else OneRound(),
        scaling=scaling,
        update_verbs=update_verbs(trained.layouts),
        sum_norms=sum_norms,
        transport_name=transport.description,
    )
    codec_state = CodecState(codecs, data_ranks, whole_tensors)
    local = _make_local_steps(trained, weights, averager, tensor, world)
    state = PersistentState(weights, trained.buckets, optimizer, layout, data_ranks, codec_state, local)
    return StageAssembly(parts, trained, state)


def lay_out(
    model: nn.Module,
    optimizer: Optimizer,
    plan: Plan,
    world: Communicator,
    specs: Sequence[ParamSpec],
    update: UpdateSpec,
) -> Trained:
    """The buckets of the trained parameters. Collective.

    model          this rank's stage
    specs, update  of the whole model
    """
    blueprint = lower(plan, specs, gather_topology(world), update)
    return Trained(model, optimizer, trainable_parameters(model), blueprint, blueprint.group_of(world.rank))


def _as_joined(trained: Trained, transport: DataTransport, rank: int) -> Trained:
    """The same, with weights that are unsharded before use if the ranks of a host could not get shared memory."""
    if transport.weights.unshards_params == (trained.layouts.weight == SPLIT):
        return trained
    before = trained.blueprint
    topology = dataclasses.replace(before.topology, unshared_cause=NO_SHARED_MEMORY)
    blueprint = lower(before.plan, before.specs, topology, before.update_spec)
    return trained._replace(blueprint=blueprint, group=blueprint.group_of(rank))


class _GradientParts(NamedTuple):
    """The gradients, what reduces them, and what averages weights with local SGD."""

    gradients: Gradients
    transport: DataTransport
    averager: LocalSGDReducer


def _make_gradients(
    trained: Trained,
    data_ranks: Communicator,
    topology: Topology,
    meter: CommMeter,
    calls: CallChecker,
    codecs: Sequence[Codec],
) -> _GradientParts:
    """The gradients in their buckets, or where autograd puts them, and the transport that reduces them. Collective."""
    plan, spec, unbucketed = trained.plan, trained.group.request, None
    allow_unused = plan.unused == "allow"
    if trained.blueprint.has_unbucketed_grads:
        unbucketed = UnbucketedGrads(trained.by_name, trained.buckets, meter, allow_unused=allow_unused)
    transport = transports.make_data_transport(
        data_ranks,
        topology,
        spec_of_request(spec),
        meter=meter,
        calls=calls,
        choice=plan.transport,
        codecs=codecs,
        unbucketed_grads=None if unbucketed is None else unbucketed.local_grads,
    )
    averager = LocalSGDReducer(transport.grads)
    if unbucketed is not None:
        return _GradientParts(unbucketed, transport, averager)
    if plan.sync == "local":
        local = single_rank_transport(averager, spec.num_scalars)
        transport = local._replace(description=transport.description)
        meter = CommMeter()  # with local steps gradients are not sent, and not recorded
    # A rank that waits for others within its backward does not reduce meanwhile.
    waits_in_backward = transport.weights.unshards_params or plan.batch_norm == "sync" or plan.tp > 1
    gradients = GradBuckets(
        trained.by_name,
        trained.buckets,
        transport.grads,
        meter,
        allow_unused=allow_unused,
        may_block_in_backward=not waits_in_backward,
        uncounted=trained.group.stage.uncounted_ranges,
    )
    return _GradientParts(gradients, transport, averager)


def _make_weights(
    trained: Trained,
    transport: DataTransport,
    layout: RankLayout,
    data_ranks: Communicator,
    whole_tensors: WholeTensors,
) -> Weights:
    """The weights where they rest, and master weights. Collective: broadcasts the first rank's."""
    plan = trained.plan
    offloaded_to = offload_device(plan.offload, data_ranks.device)
    masters = MasterWeights(trained.by_name, trained.buckets, layout, plan.precision, offloaded_to)
    for name in masters.param_names:
        # Before the weights are copied into flats, which rounds them.
        data_ranks.broadcast(trained.by_name[name].data)
        masters.load({name: trained.by_name[name].data})
    if plan.precision != "keep":
        mixed_precision.cast_model(trained.model, plan.precision)
    storage: WeightStorage
    if transport.unsharder is not None:
        sharded = ShardedParams(trained.by_bucket, trained.buckets, layout, transport.unsharder)
        storage = ShardedWeights(trained.by_name, trained.buckets, sharded, layout, data_ranks)
    else:
        resident = ResidentWeights if transport.weights.shared_weights is None else HostSharedWeights
        storage = resident(trained.by_name, trained.buckets, transport.weights, data_ranks)
    edits = _make_edits(trained, storage, masters)
    return Weights(trained.model, storage, masters, edits, data_ranks, whole_tensors)


def _make_edits(trained: Trained, storage: WeightStorage, masters: MasterWeights) -> TrainedEdits:
    outer = _outer_optimizer(trained.plan)
    reason = storage.edit_loss_reason or masters.edit_loss_reason or outer.edit_loss_reason
    if not reason:
        return TrainedEdits(trained.by_name, trained.buckets)
    flats = [shard.flat for shard in storage.shards] if storage.whole_params else []
    return RefusedEdits(trained.by_name, trained.buckets, flats, masters, reason)


def _make_optimizer(
    trained: Trained, transport: DataTransport, gradients: Gradients, weights: Weights
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
            split_by_param=trained.updates_by_param,
            is_chunked=trained.is_sharded,
        )
    prepare = transport.grads.reduce_range if trained.is_sharded else None
    uncounted = trained.group.stage.uncounted_ranges
    return FlatOptimizer(trained.optimizer, trained.buckets, slices, prepare_grads=prepare, uncounted=uncounted)


def _outer_optimizer(plan: Plan) -> OuterOptimizer:
    return OuterOptimizer(plan.outer_lr, plan.outer_momentum) if plan.sync == "local" else OuterOptimizer()


def _make_local_steps(
    trained: Trained, weights: Weights, averager: LocalSGDReducer, tensor: TensorAxis, world: Communicator
) -> LocalSteps:
    plan, outer = trained.plan, _outer_optimizer(trained.plan)
    if plan.sync != "local":
        return LocalSteps(1, OfAllRanks(), LocalSGD([], [], averager, outer), [], world.along())
    local_sgd = LocalSGD(weights.flats, trained.buckets, averager, outer)
    scope = OfWorker(plan.dp, tensor.group, world.along("pp"))
    return LocalSteps(plan.sync_interval, scope, local_sgd, [weights.edits], world.along("dp", "cp"))
