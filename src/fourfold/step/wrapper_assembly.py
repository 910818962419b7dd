"""Wrapper assembly: make what a DistributedOptimizer works with, of its model, its optimizer, a plan and the ranks.

Law: each function makes one part. What a plan, an optimizer or the number of ranks asks for is decided here, once.
"""

from collections.abc import Mapping, Sequence

from torch import nn
from torch.optim import Optimizer

from fourfold.axes.data.work.flat_params import param_specs
from fourfold.axes.data.work.grad_buckets import GradBuckets
from fourfold.comm import transports
from fourfold.comm.communicator import Communicator
from fourfold.comm.meter import CommMeter
from fourfold.comm.reduce.protocol import spec_of_request
from fourfold.comm.topology import gather_topology, topology_along
from fourfold.model.batch_statistics import batch_norms, make_exchange
from fourfold.model.closure_losses import ClosureLosses, MeanLosses, OwnLosses, uses_loss
from fourfold.model.loop_statistics import LoopStatistics, OwnInLoop, SyncedInLoop
from fourfold.model.memory_formats import MemoryFormats
from fourfold.optim.option_tracker import OptionTracker
from fourfold.plan.lowering import lower
from fourfold.plan.plan import Plan
from fourfold.plan.update_spec import UpdateSpec
from fourfold.proof.digests.batches import DuplicateBatches
from fourfold.proof.digests.weights import DriftChecker
from fourfold.step.grad_averager import AllUsed, GradAverager, UsedOnSomeRanks
from fourfold.step.optimizer_steps import OptimizerSteps, StepCheck
from fourfold.step.unreduced_grads import ReducedGrad, UnreducedGrads
from fourfold.step.wrapper_checks import WrapperChecks

WRAPPER_HINT = (
    "the same seeds, hooks, edits and loaded state on every rank; optimizer.broadcast_state() copies one rank's to all"
)


def make_checks(
    optimizer: Optimizer, model: nn.Module, plan: Plan, world: Communicator, *, same_batches: str, drift_check: int
) -> WrapperChecks:
    """What ranks compare. Raises SettingError for a wrong `same_batches` or `drift_check`."""
    duplicate_batches = DuplicateBatches(same_batches, data_ranks=range(plan.dp), is_log_rank=world.rank == 0)
    with_frozen = not plan.batch_split.has_local_batch_norm
    drift_checker = DriftChecker(world, drift_check, with_frozen=with_frozen, attempt=WRAPPER_HINT)
    return WrapperChecks(model, OptionTracker(optimizer), world.along("dp"), duplicate_batches, drift_checker)


def make_averager(
    trainable: Mapping[str, nn.Parameter], optimizer: Optimizer, plan: Plan, world: Communicator
) -> GradAverager:
    """The buckets of the trainable parameters, and their transport. Collective; `world` lies on the plan's mesh."""
    topology, data_ranks = gather_topology(world), world.along("dp", "cp")
    blueprint = lower(plan, param_specs(trainable, {}), topology, UpdateSpec())
    group = blueprint.group_of(world.rank)
    meter, spec, allow_unused = CommMeter(), spec_of_request(group.request), plan.unused == "allow"
    channel = transports.make_world_channel(world, topology, plan.transport, meter)
    transport = transports.make_data_transport(
        data_ranks,
        topology_along(world, topology, data_ranks),
        spec,
        meter=meter,
        calls=channel.calls,
        choice=plan.transport,
    )
    # Hooks of backward never wait for a buffer: every round ends with all of them acquired.
    gradients = GradBuckets(dict(trainable), group.buckets, transport.grads, meter, allow_unused=allow_unused)
    buffers = transport.grads.grad_buffers
    reduced = [
        ReducedGrad(slot.name, trainable[slot.name], buffers[bucket.index])
        for bucket in group.buckets
        for slot in bucket.slots
    ]
    used = UsedOnSomeRanks(gradients.countdown, transport.scalars) if allow_unused else AllUsed(len(reduced))
    return GradAverager(channel, transport, gradients, reduced, used, MemoryFormats(trainable, optimizer))


def make_statistics(model: nn.Module, plan: Plan, world: Communicator) -> LoopStatistics:
    """The statistics of the model's batch normalizations. Collective; `world` lies on the plan's mesh."""
    if plan.batch_norm != "sync" or not batch_norms(model):
        return OwnInLoop()
    return SyncedInLoop(model, make_exchange(world, CommMeter(), transport=plan.transport))


def make_steps(
    optimizer: Optimizer, norms: Sequence[StepCheck], averager: GradAverager, unreduced: UnreducedGrads
) -> OptimizerSteps:
    """The steps of the wrapped optimizer. The weights of one rank may change by any gradient."""
    checks: list[StepCheck] = [*norms]
    losses: ClosureLosses = OwnLosses()
    if averager.num_ranks > 1:
        checks.insert(0, unreduced)
        if uses_loss(optimizer):
            losses = MeanLosses(averager.world, averager.num_ranks, type(optimizer).__name__)
    return OptimizerSteps(optimizer, unreduced, checks, losses)
