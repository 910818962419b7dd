"""DistributedOptimizer: a torch optimizer whose gradients are averaged over the ranks while backward runs.

complete     when `backward()` returns, every `.grad` holds the mean over the ranks
round        one backward that reduces, on all ranks
active rank  one that still has data; a rank that has none left adds zeros to the reductions of the others
Law: on every rank, the wrapped optimizer does what it would do on one device with the mean gradient.
Law: each function makes one part. What a plan, an optimizer or the number of ranks asks for is decided here, once.
Law: a round is over for all ranks when no rank is active. Ranks that are active in one round have the same optimizer
options, or all of them raise DivergenceError.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from fourfold.axes.data.work.gradients import GradBuckets, num_ranks_with_grad
from fourfold.axes.data.work.weight_storage import param_specs
from fourfold.comm import init, transports
from fourfold.comm.broadcast_tree import broadcast_model, broadcast_tree
from fourfold.comm.communicator import Communicator, gather_topology, topology_along
from fourfold.comm.meter import CommMeter
from fourfold.comm.reduce.protocol import spec_of_request
from fourfold.comm.reduce.scalars import WorldChannel, divergence_error, with_options
from fourfold.model.batch_statistics import LoopStatistics, SyncedInLoop, batch_norms, make_exchange
from fourfold.model.weights import trainable_parameters
from fourfold.optim.option_tracker import OptionTracker
from fourfold.optim.user_optimizer import OptimizerProxy, check_options
from fourfold.plan.intervals import DRIFT_CHECK
from fourfold.plan.lowering import lower
from fourfold.plan.param_spec import UpdateSpec
from fourfold.plan.plan import Plan
from fourfold.proof.digests.batches import DuplicateBatches
from fourfold.proof.digests.build import check_same_build
from fourfold.proof.digests.weights import DriftChecker
from fourfold.step import argument_checks
from fourfold.step.grad_averager import GradAverager, MemoryFormats, shape_and_strides
from fourfold.step.model_checks import check_plan_on_ranks, watch_norms
from fourfold.step.optimizer_steps import (
    MeanLosses,
    OptimizerSteps,
    OwnLosses,
    ReducedGrad,
    UnreducedGrads,
    WrapperChecks,
    uses_loss,
)
from fourfold.torch_kit.grad_hooks import register_last_hook
from fourfold.torch_kit.recompute import is_in_reentrant_backward
from fourfold.torch_kit.torch_private import NO_BACKWARD_ID, call_after_backward, current_backward_id
from fourfold.words.errors import OptimizerError, Problem, TrainingError
from fourfold.words.program import LOSS

# ---- uneven inputs -------------------------------------------------------------------------------------------------

# The kind of scalar that counts the active ranks. The kind LOSS is free: losses belong to the user's loop. A rank that
# has read this sum knows that all ranks are in the same call.
ACTIVE_RANKS = LOSS


class EvenInputs:
    """Every rank has a batch in every round: all ranks are in the same round, with the same options."""

    def __init__(self, world: WorldChannel, checks: WrapperChecks, steps: OptimizerSteps, *, num_ranks: int) -> None:
        self._world, self._checks, self._steps, self._num_ranks = world, checks, steps, num_ranks

    def begin_round(self, number: int) -> None:
        """Round `number` of this rank begins, with a batch."""
        loads = f" and {self._steps.num_loads} × load_state_dict" if self._steps.num_loads else ""
        call = f"backward {number} after {self._steps.num_steps} steps of the optimizer{loads}"
        self._world.calls.begin(with_options(call, self._checks.options.text()))

    def finish_round(self) -> int:
        """What the sums of this round are divided by. Collective. Raises DivergenceError if ranks differ."""
        self._world.calls.check_same()
        # Here, within a backward, all ranks have taken the same number of steps.
        self._checks.compare_weights_if_due(self._steps.num_steps, self._steps.num_loads)
        return self._num_ranks


class UnevenInputs:
    """One `join` block, on one rank."""

    def __init__(
        self,
        communicator: Communicator,
        world: WorldChannel,
        options: OptionTracker,
        *,
        min_divisor: int,
    ) -> None:
        """`min_divisor`: what sums are divided by at least, even if fewer ranks are active."""
        self._communicator, self._world, self._options = communicator, world, options
        self._min_divisor = min_divisor
        self.num_rounds = 0
        """In how many rounds this rank has had data."""
        self._call, self._is_active = "", True

    def begin_round(self, number: int) -> None:
        digest = float(self._options.short_digest())
        self._begin(number, 1.0, digest, digest * digest)

    def begin_shadow_round(self, number: int) -> None:
        """Round `number` of this rank begins, in which it has no data."""
        self._begin(number, 0.0, 0.0, 0.0)

    def _begin(self, number: int, *values: float) -> None:
        self._call, self._is_active = f"backward {number}, within join()", values[0] > 0
        self._world.calls.begin(self._call)
        self._world.scalars.all_reduce_async(ACTIVE_RANKS, torch.tensor(values, dtype=torch.float64))

    def finish_round(self) -> int:
        divisor = self.divisor(self.count_active_ranks())
        self.num_rounds += 1
        return divisor

    def count_active_ranks(self) -> int:
        """How many ranks are active in this round. Collective.

        Raises DivergenceError where ranks are in different rounds, or active ranks have different optimizer options.
        """
        num_active, digests, squares = map(round, self._world.scalars.wait(ACTIVE_RANKS))
        # Cauchy and Schwarz: equality holds if and only if all active ranks have the same digest.
        if num_active * squares != digests * digests:
            self._raise_options_differ()
        return num_active

    def divisor(self, num_active: int) -> int:
        """What the sum of the active ranks' gradients is divided by."""
        return max(num_active, self._min_divisor)

    def _raise_options_differ(self) -> NoReturn:
        """Raise DivergenceError with the options that differ between active ranks. Collective."""
        texts = self._communicator.all_gather_json(self._options.text() if self._is_active else None)
        calls = {rank: with_options(self._call, text) for rank, text in enumerate(texts) if text is not None}
        raise divergence_error(calls, attempt="join(states=[scheduler]), after which all ranks have the same")


# ---- assembly ------------------------------------------------------------------------------------------------------

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
    formats = MemoryFormats(trainable, optimizer)
    if allow_unused:
        count_used = functools.partial(num_ranks_with_grad, gradients.countdown, transport.scalars)
        return GradAverager(channel, transport, gradients, reduced, count_used, formats)
    ones = [1.0] * len(reduced)  # each parameter has a gradient on every rank, or the round has raised
    return GradAverager(channel, transport, gradients, reduced, lambda: ones, formats)


def make_statistics(model: nn.Module, plan: Plan, world: Communicator) -> LoopStatistics:
    """The statistics of the model's batch normalizations. Collective; `world` lies on the plan's mesh."""
    if plan.batch_norm != "sync" or not batch_norms(model):
        return LoopStatistics()
    return SyncedInLoop(model, make_exchange(world, CommMeter(), transport=plan.transport))


def make_steps(
    optimizer: Optimizer, norms: Sequence[Callable[[], None]], averager: GradAverager, unreduced: UnreducedGrads
) -> OptimizerSteps:
    """The steps of the wrapped optimizer. The weights of one rank may change by any gradient."""
    checks, losses = [*norms], OwnLosses()
    if averager.num_ranks > 1:
        checks.insert(0, unreduced.check)
        if uses_loss(optimizer):
            losses = MeanLosses(averager.world, averager.num_ranks, type(optimizer).__name__)
    return OptimizerSteps(optimizer, unreduced, checks, losses)


# ---- the wrapper ---------------------------------------------------------------------------------------------------


_owners: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""By parameter: a weak reference to the DistributedOptimizer that reduces its gradient."""
OWNER_KEY = "_fourfold_distributed_optimizer"


class DistributedOptimizer(OptimizerProxy):
    """Wraps any torch optimizer, so that a plain training loop runs on all ranks. Collective.

    The loop stays as it is: `backward()` averages the gradients over the ranks, and `step()` is the wrapped optimizer's
    own step on these means. Making one joins the existing process group, or makes one from the launcher's environment,
    and broadcasts rank 0's weights and buffers.

    Every rank must call `backward()` equally often outside `no_sync()` (`join()` lifts this), and each such backward
    must reach at least one trainable parameter. With `batch_norm = "sync"` the ranks also make each call of a batch
    normalization in training mode together.

    model         the module whose parameters `optimizer` trains
    plan          `dp`, `bucket_bytes`, `unused`, `batch_norm` and `transport` are used; all other fields must have
                  their defaults. Without a plan, all ranks are data ranks
    same_batches  "error": raise where all ranks train on the same inputs, three different ones in a row;
                  "allow": never raise
    communicator  the ranks, where they are joined already
    drift_check   ranks compare their weights after every so many steps; 0: never

    Raises SettingError for arguments of the wrong kind, and PlanError or OptimizerError for what cannot be carried out.
    `backward()` raises TrainingError for a parameter without a gradient, unless the plan has `unused = "allow"`,
    TaskError for the same inputs on all ranks, and DivergenceError where the ranks' weights or options differ.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: nn.Module,
        plan: Plan | None = None,
        *,
        same_batches: str = "error",
        communicator: Communicator | None = None,
        drift_check: int = DRIFT_CHECK,
    ) -> None:
        device = init.world().device if communicator is None else communicator.device
        argument_checks.check_wrapper_arguments(optimizer=optimizer, model=model, plan=plan, device=device)
        if isinstance(optimizer, DistributedOptimizer):
            raise OptimizerError(Problem("a DistributedOptimizer, wrapped again", "the torch optimizer itself, once"))
        check_options(optimizer)
        self._optimizer, self._model = optimizer, model
        world = communicator or init.init_communicator()
        plan = plan or Plan(dp=world.size)
        settings = {"same_batches": same_batches, "drift_check": drift_check}
        built = {"plan": plan, "options": settings, "optimizer": optimizer, "shape": shape_and_strides}
        check_same_build(world, "ff.DistributedOptimizer", model, **built)
        check_plan_on_ranks(model, plan, world)
        argument_checks.check_wrapper_plan(plan)
        world = world.on_mesh(plan.mesh)
        self._data_ranks = world.along("dp", "cp")
        trainable = trainable_parameters(model)
        argument_checks.check_wrapper_parameters(optimizer, model)
        self._checks = make_checks(optimizer, model, plan, world, same_batches=same_batches, drift_check=drift_check)
        broadcast_model(self._data_ranks, model)
        self._is_sync_enabled, self._is_replaced = True, False
        self._backward_id, self._num_backwards = NO_BACKWARD_ID, 0
        # Before the averager's hooks, which take gradients: a round must begin before its first gradient is taken. Not
        # hooks of tensors: torch.autograd.grad would call them too, which leaves nothing to reduce.
        for parameter in trainable.values():
            register_last_hook(parameter, _weak_hook(self))
        self._averager = make_averager(trainable, optimizer, plan, world)
        self._statistics = make_statistics(model, plan, world)
        self._unreduced = UnreducedGrads(self._averager.reduced_grads, self._averager.views, optimizer, model)
        norms = [*(each.check for each in watch_norms(model, plan)), self._statistics.check]
        self._steps = make_steps(optimizer, norms, self._averager, self._unreduced)
        self._even = EvenInputs(self._averager.world, self._checks, self._steps, num_ranks=self._averager.num_ranks)
        self._rounds: EvenInputs | UnevenInputs = self._even
        self._claim_parameters(trainable)
        self._statistics.begin()  # after an earlier owner has given the norms back
        self._is_built = True

    @property
    def transport_name(self) -> str:
        return self._averager.transport_name

    def _claim_parameters(self, trainable: dict[str, nn.Parameter]) -> None:
        """Make this the only owner of its parameters: an earlier one would take their gradients first."""
        for parameter in trainable.values():
            owner = _owners.get(parameter)
            earlier = None if owner is None else owner()
            if earlier is not None:
                earlier._mark_replaced()
            _owners[parameter] = weakref.ref(self)
        # A user may hold the optimizer only, and step it. The two refer to each other and are freed together.
        vars(self._optimizer)[OWNER_KEY] = self

    def _mark_replaced(self) -> None:
        """Stop listening: a newer DistributedOptimizer owns some of the parameters."""
        self._is_replaced = True
        vars(self._optimizer).pop(OWNER_KEY, None)
        self._averager.ignore()
        self._steps.remove_hooks()
        self._checks.remove_hook()
        self._statistics.remove()

    def _on_backward_begin(self, _: Tensor) -> None:
        """Begin a round, once per backward, and have autograd call `_on_backward_end` at its end."""
        if self._is_replaced:
            return
        if not self._is_sync_enabled:
            self._unreduced.mark_touched()
            self._steps.begin_round()
            return
        backward = current_backward_id()
        if backward == self._backward_id:
            return
        if self._backward_id != NO_BACKWARD_ID:
            if is_in_reentrant_backward():
                got = "a checkpoint with use_reentrant=True, whose backward runs within another one"
                attempt = "checkpoint(…, use_reentrant=False)"
                raise TrainingError(Problem(got, "one backward with all gradients", attempt))
            got = "a backward after one that ended with an error, or within another one"
            raise TrainingError(Problem(got, "ranks that agree on what has been summed", "a new DistributedOptimizer"))
        self._backward_id = backward
        self._rounds.begin_round(self._next_round())
        self._averager.begin_round()
        # Behind all other callbacks, those that are added later too: one of another wrapper may write `.grad`.
        call_after_backward(lambda: call_after_backward(self._on_backward_end))

    @torch.no_grad()
    def _on_backward_end(self) -> None:
        """Make every `.grad` the mean over the ranks."""
        try:
            self._statistics.end_backward()  # before this rank waits for anything else of the others
            self._averager.finish_backward()
            num_ranks_with_grad = self._averager.average(self._rounds.finish_round())
            self._averager.assign_grads(num_ranks_with_grad)
            self._unreduced.mark_reduced(num_ranks_with_grad)
            self._averager.end_round()
            self._backward_id = NO_BACKWARD_ID
        finally:
            self._averager.begin_next_round()
        self._checks.compare_batches()

    def _next_round(self) -> int:
        """Count a backward that reduces, or a shadow of one; returns its number, from 1."""
        self._steps.begin_round()
        self._num_backwards += 1
        return self._num_backwards

    def check_drift(self) -> None:
        """Compare the ranks' weights now, as `drift_check` does after every so many steps. Collective.

        Call it after the last step: no backward follows that would check this step.
        Raises DivergenceError, on every rank, where the weights differ in a bit.
        """
        self._check_not_replaced()
        self._averager.world.calls.begin(f"check_drift() after {self._steps.num_steps} steps of the optimizer")
        self._averager.world.calls.check_same()
        self._checks.compare_weights(self._steps.num_steps)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, gradients add up on this rank alone; the next backward outside reduces their sums."""
        self._check_not_replaced()
        self._is_sync_enabled = False
        self._averager.ignore()
        try:
            yield
        finally:
            self._is_sync_enabled = True
            if not self._is_replaced:
                self._averager.listen()

    @contextlib.contextmanager
    def join(self, *, divide_by_initial_world_size: bool = True, states: Sequence[Any] = ()) -> Iterator[None]:
        """Around a loop in which ranks have different numbers of batches, or none. Collective: every rank enters it.

        A rank that leaves the block adds zeros to the reductions of the others until all ranks have left. A gradient is
        the sum over the ranks that still have data, divided by the number of all ranks, so that the weight of a sample
        does not change; or, with `divide_by_initial_world_size=False`, by the number of ranks that still have data.
        Name and meaning are those of DDP's `join`.

        At the end all ranks get the weights, buffers and optimizer state of the rank that had data longest, and every
        `.grad` is None. The same holds for `states`: schedulers, a GradScaler, and any other object with `state_dict()`
        and `load_state_dict()` that counts the steps of its own rank.

        Inside, no other collective is allowed: ranks that have left do not take part. So `batch_norm = "sync"` refuses
        it. What a rank has added up under `no_sync()` and not reduced when it leaves is lost. Each reduction sends one
        message more, of three numbers.
        """
        self._check_not_replaced()
        argument_checks.check_join_states(states)
        self._statistics.check_join()
        if self._rounds is not self._even:
            raise TrainingError(Problem("join() within join()", "one around the whole loop"))
        min_divisor = self._data_ranks.size if divide_by_initial_world_size else 1
        rounds = UnevenInputs(self._data_ranks, self._averager.world, self._checks.options, min_divisor=min_divisor)
        losses = self._steps.losses
        self._rounds, self._steps.losses = rounds, losses.within_join()
        try:
            yield
            with torch.no_grad():
                while self._shadow_round(rounds):
                    pass
        finally:
            self._rounds, self._steps.losses = self._even, losses
        self._copy_longest_rank(rounds.num_rounds, states)

    def _copy_longest_rank(self, num_rounds: int, states: Sequence[Any]) -> None:
        """After a `join` block: give all ranks the state of the rank that had data in the most rounds. Collective."""
        rounds, steps = zip(*self._data_ranks.all_gather_json([num_rounds, self._steps.num_steps]), strict=True)
        self._steps.num_steps = max(steps)
        for parameter in self._averager.parameters:
            parameter.grad = None
        if len(set(rounds)) == 1:
            return
        src = rounds.index(max(rounds))
        values = self.broadcast_state([each.state_dict() for each in states], src=src)
        if self._data_ranks.rank != src:
            for each, value in zip(states, values, strict=True):
                each.load_state_dict(value)

    def _shadow_round(self, rounds: UnevenInputs) -> bool:
        """Add zeros to a round of the others; False where no rank has data left."""
        rounds.begin_shadow_round(self._next_round())
        num_active = rounds.count_active_ranks()
        if not num_active:
            return False
        self._averager.launch_all()
        self._averager.average(rounds.divisor(num_active))
        self._averager.end_round()
        self._averager.begin_next_round()
        self._checks.compare_batches()
        return True

    def broadcast_state(self, value: Any = None, *, src: int = 0) -> Any:
        """Give all ranks the weights, buffers and optimizer state of rank `src`; returns its `value`. Collective.

        So only one rank needs to read a checkpoint. `value` is anything else that all ranks should know, such as the
        epoch: dicts, lists, tuples, numbers, strings, None and tensors. Raises TrainingError for anything else.
        """
        broadcast_model(self._data_ranks, self._model, src=src)
        optimizer_state, value = broadcast_tree(self._data_ranks, [self._optimizer.state_dict(), value], src=src)
        if self._data_ranks.rank != src:
            self._optimizer.load_state_dict(optimizer_state)
        self._steps.num_loads = 0
        self._checks.restart_counting_loads()
        return value

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale `.grad` so that its global norm is at most `max_norm`; returns the norm before. No communication."""
        return nn.utils.clip_grad_norm_(self._averager.parameters, max_norm)

    def step(self, closure: Callable[..., Any] | None = None, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """The wrapped optimizer's step, on mean gradients; `args` and `kwargs` are passed on to it.

        A `closure` must call backward itself, or not at all. An optimizer that may use the loss that the closure
        returns (LBFGS, and every optimizer that is not torch's) gets the mean loss of all ranks; then `step` is
        collective.

        Before a weight changes, raises TrainingError for a `.grad` that has not been averaged since the last step
        (set by hand, or left by backwards within `no_sync()`), and TaskError for batch normalizations that were in
        evaluation mode when this was made and are not now. `step()` of the wrapped optimizer checks the same.
        """
        self._check_not_replaced()
        return self._steps.step(closure, args, kwargs)

    def _check_not_replaced(self) -> None:
        if self._is_replaced:
            got = "a DistributedOptimizer, and a newer one that has taken over some of its parameters"
            attempt = "the newest one, or one torch optimizer that calls several, wrapped once"
            raise TrainingError(Problem(got, "one DistributedOptimizer for each parameter", attempt))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises OptimizerError: the buckets are made already."""
        raise OptimizerError(Problem("add_param_group", "all parameters from the start", "a new DistributedOptimizer"))

    def __reduce_ex__(self, _: Any) -> NoReturn:
        """Raises OptimizerError: a DistributedOptimizer is neither copied nor pickled."""
        need = "one DistributedOptimizer, which reduces the gradients of its model together with the other ranks"
        attempt = "optimizer.state_dict(), and load_state_dict() of a new one"
        raise OptimizerError(Problem("a copy or a pickle of a DistributedOptimizer", need, attempt))


def _weak_hook(owner: DistributedOptimizer) -> Callable[[Tensor], None]:
    """A hook of a parameter that begins a round of its owner. See `torch_kit/grad_hooks.py` for why it is weak."""
    weak_owner = weakref.ref(owner)

    def hook(parameter: Tensor) -> None:
        owner = weak_owner()
        if owner is not None:
            owner._on_backward_begin(parameter)

    return hook
