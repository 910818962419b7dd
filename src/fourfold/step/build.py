"""Build: a model, a loss, an optimizer and a plan become one training step.

TrainStep  one optimizer update per call, the same on every mesh
record     what the first step taught and all later steps keep: the launch order and the nominal count
Law: after k steps, losses and weights equal those of one process that saw all the samples.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import psutil
import torch
from torch import Tensor, nn

from fourfold.environment.host_memory import available_bytes
from fourfold.environment.world import num_cores
from fourfold.parts import memory, mixed_precision
from fourfold.parts.codec import registry
from fourfold.parts.comm import transports
from fourfold.parts.data import grad_buckets, local_sgd
from fourfold.parts.data.unbucketed_grads import UnbucketedGrads
from fourfold.parts.optim import flat_optimizer
from fourfold.parts.optim.master_weights import MasterWeightPolicy, offload_device
from fourfold.parts.optim.option_tracker import OptionTracker
from fourfold.parts.optim.step_hooks import StepHooks
from fourfold.plan.data import (
    RESTING_LAYOUTS,
    Bucket,
    DataStepSpec,
    ParamSpec,
    RestingLayouts,
    effective_bucket_bytes,
    grad_buffer_indices,
    lower_step,
    make_buckets,
)
from fourfold.plan.intervals import DRIFT_CHECK, is_due
from fourfold.plan.memory import has_unbucketed_grads
from fourfold.plan.plan import Plan
from fourfold.plan.precision import LossScaler, compute_specs, gradient_bucket
from fourfold.plan.rng import generator_seed
from fourfold.plan.sample_order import BatchRange
from fourfold.step import replica_drift, state_validation
from fourfold.step.actions import Actions
from fourfold.step.argument_checks import check_arguments
from fourfold.step.batch import Microbatch, split_microbatches, unpack_batch
from fourfold.step.batch_norm import FrozenBatchNorms
from fourfold.step.codec_state import CodecState
from fourfold.step.context import StepContext
from fourfold.step.dry_run.first_batch import DryRun
from fourfold.step.duplicate_batches import DuplicateBatches, fingerprint
from fourfold.step.executor import Executor
from fourfold.step.meta_model import build_meta_model
from fourfold.step.metrics import Metrics
from fourfold.step.model_call import eval_mode
from fourfold.step.model_checks import check_model_loss, check_plan_for_model, check_plan_on_ranks, check_update_timing
from fourfold.step.nan_guard import NanGuard
from fourfold.step.objective import ForwardResult, Objective
from fourfold.step.persistent_state import PersistentState, cloned
from fourfold.step.rank_agreement import check_same_on_ranks
from fourfold.step.same_source import check_same_source
from fourfold.step.sequence.batch_consistency import batch_mismatch_problem
from fourfold.step.sequence.sequence_parallel import SequenceParallel
from fourfold.step.tensor_tree import tree_map
from fourfold.step.uneven_means import is_uneven, uneven_problem
from fourfold.step.user_optimizer import OptimizerWatch, check_user_optimizer
from fourfold.step.weights import Weights, trainable_parameters
from fourfold.words.argument_checks import format_argument
from fourfold.words.errors import (
    DivergenceError,
    FourfoldError,
    OptimizerError,
    Problem,
    SettingError,
    TaskError,
    TrainingError,
)
from fourfold.words.layout import SPLIT
from fourfold.words.program import LOSS, Action
from fourfold.words.task import Task
from fourfold.words.trace_events import Recorder


def parallelize(
    model: nn.Module,
    loss: Callable[[Any, Any], Any] | None,
    optimizer: flat_optimizer.OptimizerFactory,
    plan: Plan | None = None,
    *,
    clip: float | None = None,
    seed: int = 0,
    skip_nan: int = 0,
    same_batches: str = "refuse",
    drift_check: int = DRIFT_CHECK,
) -> "TrainStep":
    """Lay one training step over the ranks of the plan. Collective. Without a plan, all ranks are data ranks.

    Reads the launcher's environment and joins the process group that is there, or makes one. Rank 0's weights and
    buffers are broadcast first. `loss(outputs, targets)` returns unreduced values (their global mean is trained),
    a pair (sum, count), or a scalar: a mean over what torch's loss functions count, else over its samples. None: the
    model's own loss, of batches that are dicts of its inputs, labels among them. `optimizer` is called once, with the
    original parameters; its options are then used by an update over flat buffers. `clip` bounds the global norm of
    the gradient. `seed` seeds torch's generator, differently on every data index. `skip_nan` is how many steps in a row
    may be left out because the global loss, or with `clip` the norm, is not finite; the next one raises TrainingError.
    Steps raise TaskError where all data ranks give the same batches, three different ones in a row, unless
    `same_batches="allow"`; batches of a `Feed` are never the same.
    After every `drift_check` steps, ranks compare the weights that several of them hold (0: never), and raise
    DivergenceError where these differ.

    Raises PlanError, OptimizerError or TaskError where the plan cannot be carried out.
    """
    check_arguments(model=model, loss=loss, optimizer=optimizer, plan=plan, clip=clip, seed=seed, skip_nan=skip_nan)
    ranks = transports.init_communicator()
    plan = plan or Plan(dp=ranks.size)
    check_plan_on_ranks(model, plan, ranks, clip=clip)
    _set_threads(ranks)
    torch.manual_seed(generator_seed(seed, plan.mesh.coordinates(ranks.rank)["dp"]))
    options = {"clip": clip, "skip_nan": skip_nan, "seed": seed}
    options |= {"same_batches": same_batches, "drift_check": drift_check}
    return TrainStep(model.to(ranks.device), loss, optimizer, plan=plan, communicator=ranks, **options)


class CommStats(NamedTuple):
    """What a rank has waited for others, and sent to them."""

    waiting_seconds: float
    sent_bytes: float


class TrainStep:
    """`step(batch)` is one optimizer update; the batch is this rank's part of the global one, and may be empty."""

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Any, Any], Any] | None,
        optimizer: flat_optimizer.OptimizerFactory,
        *,
        plan: Plan,
        communicator: transports.Communicator,
        clip: float | None,
        skip_nan: int = 0,
        seed: int = 0,
        same_batches: str = "refuse",
        drift_check: int = DRIFT_CHECK,
    ) -> None:
        check_model_loss(loss, plan)
        self.model, self.plan, self._communicator = model, plan, communicator
        self.objective = Objective(loss)
        self.optimizer = flat_optimizer.build_optimizer(optimizer, list(model.parameters()))
        check_update_timing(self.optimizer, plan)
        check_user_optimizer(self.optimizer, plan)
        self._optimizer_watch = OptimizerWatch(self.optimizer, plan)
        self._frozen_norms = FrozenBatchNorms(model, plan)
        trainable = trainable_parameters(model)
        own = grad_buckets.param_specs(trainable, flat_optimizer.group_indices(self.optimizer, trainable))
        shapes = {name: list(p.shape) for name, p in trainable.items()}
        self._duplicate_batches = DuplicateBatches(
            same_batches, num_data_ranks=plan.dp, is_log_rank=communicator.rank == 0
        )
        options = {"clip": clip, "skip_nan": skip_nan, "same_batches": same_batches, "drift_check": drift_check}
        check_same_on_ranks(communicator, own, shapes, plan=plan, options=options, optimizer=self.optimizer)
        self._options = OptionTracker(self.optimizer)
        # A split over one rank is whole.
        rest = RESTING_LAYOUTS[plan.zero if plan.num_shards > 1 else 0]
        split = rest.state == SPLIT
        specs = compute_specs(own, plan.precision, excluded=mixed_precision.full_precision_params(model))
        self.buckets = _build_buckets(plan, specs, communicator, num_shards=plan.reduce_group_size if split else 1)
        by_bucket = [[trainable[slot.name] for slot in bucket.slots] for bucket in self.buckets]
        codecs = _build_codecs(plan, self.buckets, by_bucket)
        layerwise = flat_optimizer.is_layerwise(self.optimizer)
        allow_unused = plan.unused == "allow"
        in_place = (
            UnbucketedGrads(trainable, self.buckets, allow_unused=allow_unused) if has_unbucketed_grads(plan) else None
        )
        request = _transport_spec(
            plan, self.buckets, rest, num_norms=2 * len(trainable) if layerwise else len(trainable)
        )
        held = None if in_place is None else in_place.local_grads
        self._transport, self.transport_name = transports.make_transport(
            communicator, request, choice=plan.transport, codecs=codecs, unbucketed_grads=held
        )
        if rest.weight == SPLIT and not self._transport.unshards_params:
            rest = RESTING_LAYOUTS[2]  # the weights exist once per host: nothing is gathered before use
        self.codec_state = CodecState(codecs, communicator)
        apart = transports.LocalSGDTransport(self._transport) if plan.sync == "local" else None
        self._transport = apart or self._transport
        policy = MasterWeightPolicy(plan.precision, split, offload_device(plan.offload, communicator.device))
        outer = (
            local_sgd.OuterOptimizer(plan.outer_lr, plan.outer_momentum)
            if apart is not None
            else local_sgd.OuterOptimizer()
        )
        self._weights = Weights(model, self.buckets, self._transport, communicator, policy, is_mean=outer.is_mean)
        self._local_sgd = None
        if apart is not None:
            self._local_sgd = local_sgd.LocalSGD(self._weights.flats, self.buckets, apart, outer)
        by_slot = allow_unused or layerwise
        if in_place is not None:
            self._gradients = in_place
            pieces = in_place.update_slices(self._weights.flats, self.buckets)
        else:
            self._gradients = grad_buckets.GradBuckets(
                trainable, self.buckets, self._transport, allow_unused=allow_unused
            )
            pieces = grad_buckets.update_slices(
                self._weights, self.buckets, self._transport, split_by_param=by_slot, is_chunked=split
            )
        prepare = self._transport.reduce_range if split else None
        flat = flat_optimizer.FlatOptimizer(self.optimizer, self.buckets, pieces, prepare_grads=prepare)
        self._state = PersistentState(
            self._weights,
            self.buckets,
            flat,
            self._transport,
            communicator,
            self.codec_state,
            self._local_sgd,
            is_sharded=split,
        )
        # What gradients are divided by: of all ranks, or of one, if each learns by itself.
        self._count_divisor = plan.dp if self._local_sgd is not None else 1
        self._loss_scaler = LossScaler() if plan.precision == "fp16" else None
        in_grad = in_place is not None
        hooks = StepHooks(self.optimizer, self.buckets, by_bucket, is_unbucketed=in_grad, can_skip_params=by_slot)
        parts = StepContext(
            self._gradients,
            self._transport,
            flat,
            by_bucket,
            self._weights.flats,
            rest,
            self._weights.edits,
            self._weights.sharded_params,
            self._local_sgd,
            hooks,
            self._loss_scaler,
        )
        self._actions = Actions(
            model,
            self.objective,
            parts,
            clip=clip,
            update=plan.update,
            all_reduce_count=lambda count: sum(communicator.all_gather_json(count)) / self._count_divisor,
            blocks_in_backward=plan.sp > 1 or parts.sharded_params is not None or _may_block_in_backward(plan, rest),
        )
        self._sequence_parallel = (
            SequenceParallel(model, loss, plan, communicator, seed=seed) if loss is not None and plan.sp > 1 else None
        )
        self._dry_run = DryRun(
            model,
            self.objective,
            plan,
            communicator.device,
            self._weights,
            num_local_ranks=communicator.world.local_size,
            is_log_rank=communicator.rank == 0,
        )
        self._executor = Executor(self._actions)
        self._nan_guard = NanGuard(communicator, model, limit=skip_nan)
        self._drift_checker = replica_drift.DriftChecker(communicator, drift_check)
        self._step_spec = DataStepSpec(
            plan.microbatches,
            len(self.buckets),
            rest,
            clip is not None or self._loss_scaler is not None,
            allow_unused,
            plan.update,
            has_trust_ratios=layerwise and split,
        )
        self._lower_programs()
        self._has_record, self._num_calls = False, 0
        self.program: tuple[Action, ...]
        """What a step does; with local steps one that ends with a meeting, the others do `program_apart`."""
        self.num_steps = 0
        """Steps done, those before a resumption included: errors name them."""

    def _lower_programs(self) -> None:
        """Make the programs of what is known of a step."""
        if self._local_sgd is None:
            self.program = self.local_program = lower_step(self._step_spec)
            return
        self.program = lower_step(self._step_spec._replace(sync="meet"))
        self.local_program = lower_step(self._step_spec._replace(sync="apart"))

    @property
    def is_synchronized(self) -> bool:
        """Whether all ranks have the same weights: always, or with local steps when they have just met."""
        return self.num_steps % self.plan.sync_interval == 0

    @property
    def rank(self) -> int:
        return self._communicator.rank

    def request_stop(self, stop: bool) -> None:
        """Whether this rank wants the run to stop: `asked` tells all ranks after the next step."""
        self._actions.stop_requested = stop

    @property
    def stop_requested(self) -> bool:
        """Whether some rank wanted the run to stop when the last step ended; the same on every rank."""
        totals = self._actions.totals
        return totals is not None and totals.num_stop_requests > 0

    def peer_is_dead(self, rank: int) -> bool:
        """Whether a rank's process has ended, as far as this host can tell. Not collective: waits ask it."""
        return self._communicator.is_peer_dead(rank)

    def check_peers(self) -> None:
        """Raise PeerError where another rank of this host has ended. Not collective: waits call it."""
        self._communicator.check_peers()

    def set_recorder(self, recorder: Recorder) -> None:
        """From now on `recorder` hears of every action, bucket and wait of this rank; `SILENT` ends it."""
        self._executor.recorder = self._actions.recorder = recorder
        for way in (
            self._transport,
            *(self._sequence_parallel.ring_groups if self._sequence_parallel is not None else ()),
        ):
            way.recorder = recorder
        if self._local_sgd is None:
            self._gradients.recorder = recorder  # elsewhere gradients go nowhere

    @property
    def busy_seconds(self) -> dict[str, float]:
        """What this rank's last step was spent on, by the verbs' names, waiting left out."""
        return self._executor.busy_seconds

    @property
    def dp_index(self) -> int:
        """This rank's place on the data axis."""
        return self.plan.mesh.coordinates(self.rank)["dp"]

    @property
    def device(self) -> torch.device:
        return self._communicator.device

    def __call__(self, batch: Any) -> Metrics:
        """One optimizer update on this rank's batch `(inputs, targets)`. Collective.

        Raises DivergenceError where another rank is in another call, or has another part of the feed's order.
        """
        begin, (waited, sent) = time.perf_counter(), self._comm_stats()
        samples = getattr(batch, "samples", None)
        self._check_unchanged()
        call = _call_name(f"step {self.num_steps + 1}", samples)
        self._transport.begin_call(transports.with_options(call, self._options.text()))
        watches = self._duplicate_batches.is_active and samples is None
        compares_sources = self._num_calls == 0 and samples is not None
        if not self._has_record or watches or compares_sources:
            self._transport.check_same_call()  # The first step also exchanges what is no sum.
        if compares_sources:
            check_same_source(self._communicator.all_gather_json(getattr(batch, "probe", None)))
        if watches:
            self._compare_batches(batch)
        self.dry_run(batch, training=True)
        batch, self._actions.batch_mismatch = self._compare_sequence_batch(batch)
        self._nan_guard.save_buffers()
        loss_scale = None if self._loss_scaler is None else self._loss_scaler.value
        program = self.local_program if (self.num_steps + 1) % self.plan.sync_interval else self.program
        with self._local_microbatches(batch, self.plan.microbatches) as microbatches:
            self._executor.run(program, microbatches)
        if self._actions.has_called_hooks:
            self._weights.check_storage()  # a hook may have given parameters other storage
        totals = self._actions.totals
        assert totals is not None
        if self._num_calls == 0:
            self.objective.finish_first_step()
        self._num_calls, self.num_steps = self._num_calls + 1, self.num_steps + 1
        if self.device.type == "cpu":
            _tune_freed_memory(self._num_calls)
        skipped = self._nan_guard.check(self._actions, self.num_steps, samples)
        if self._drift_checker.is_due(self.num_steps, self.plan.sync_interval):
            self._drift_checker.compare(
                list(self._replicated_tensors()),
                f"after step {self.num_steps}",
                update_kind=self._options.implementation(),
            )
        if not self._has_record and skipped is None:
            self._set_record(
                self._communicator.all_gather_json(self._gradients.completion_order)[0],
                totals.count / self._count_divisor,
            )
        if not self._has_record and not totals.count:
            self._actions.nominal_count = None  # what was estimated from no elements is no estimate
        return Metrics(
            loss=totals.loss / totals.count if totals.count else float("nan"),
            samples=round(totals.num_samples / self.plan.sp),
            tokens=round(totals.num_tokens) or None,
            grad_norm=self._actions.grad_norm,
            seconds=time.perf_counter() - begin,
            waiting_seconds=self._comm_stats().waiting_seconds - waited,
            sent_bytes=self._comm_stats().sent_bytes - sent,
            skipped=skipped,
            loss_scale=loss_scale,
            overflowed=self._actions.overflowed,
        )

    @torch.no_grad()
    def evaluate(self, batch: Any) -> Metrics:
        """The loss of the global batch without training on it; NaN where it is empty everywhere. Collective."""
        begin, (waited, _) = time.perf_counter(), self._comm_stats()
        self._begin_call("evaluate()", getattr(batch, "samples", None))
        self._actions.flush()
        self.dry_run(batch)
        batch, problem = self._compare_sequence_batch(batch)
        local = torch.zeros(7, dtype=torch.float64)
        with self._weights.unsharded("evaluate"), self._local_microbatches(batch) as (part,), eval_mode(self.model):
            if part.num_samples:
                loss = self.objective(self.model, part).loss
                values = [
                    loss.total,
                    loss.count,
                    part.num_samples,
                    part.num_tokens,
                    0.0,
                    loss.other_count,
                    loss.other_square,
                ]
                local = torch.tensor([float(value) for value in values], dtype=torch.float64)
        local[4] = problem is not None
        total, count, samples, tokens, num_unlike, other, square = self._all_reduce(local)
        if num_unlike:
            raise TaskError(problem or batch_mismatch_problem(), where="the batch")
        if is_uneven(count, other, square):
            raise TaskError(uneven_problem(self.objective.loss_names), where="the loss")
        return Metrics(
            loss=total / count if count else float("nan"),
            samples=round(samples / self.plan.sp),
            tokens=round(tokens) or None,
            grad_norm=None,
            seconds=time.perf_counter() - begin,
            waiting_seconds=self._comm_stats().waiting_seconds - waited,
        )

    def dry_run(self, batch: Any, *, training: bool = False) -> None:
        """Show by a first batch that the loss and the model can be cut as the plan has it. Collective.

        Raises TaskError, on every rank, where they cannot. The first step does it too. `training`: it is a step's.
        """
        if self._sequence_parallel is not None and not self._sequence_parallel.has_dry_run:
            self._transport.check_same_call()
            self._sequence_parallel.dry_run(batch, self._weights.unsharded("try out"))
            self._weights.edits.accept_edits()
        if self._dry_run.is_needed(training=training):
            self._transport.check_same_call()
            few = batch if self._sequence_parallel is None else self._sequence_parallel.dry_run_batch(batch)
            self._dry_run.run(few, self._weights.unsharded, self._communicator.all_gather_json, training=training)
            self._weights.edits.accept_edits()

    @contextlib.contextmanager
    def local_batch(self, batch: Any) -> Iterator[Microbatch]:
        """This rank's part of a batch; within, the model's attention reaches all tokens of it.

        Collective among the ranks that share sequences. Raises TaskError on them where their batches are not the same.
        """
        batch, problem = self._compare_sequence_batch(batch)
        if problem is not None:
            raise TaskError(problem, where="the batch")
        with self._local_microbatches(batch) as (part,):
            yield part

    def run_forward(self, batch: Any) -> tuple[Microbatch, ForwardResult]:
        """What the model makes of this rank's part of a batch that is not empty: see `reading`."""
        with self.local_batch(batch) as part:
            return part, self.objective(self.model, part)

    @contextlib.contextmanager
    def _local_microbatches(self, batch: Any, num_microbatches: int = 1) -> Iterator[list[Microbatch]]:
        """The same in microbatches, of a batch that has been compared."""
        if self._sequence_parallel is None:
            yield split_microbatches(batch, num_microbatches, self.device)
            return
        part, kept = self._sequence_parallel.shard_batch(batch)
        parts = split_microbatches(part, num_microbatches, self.device, real_tokens=kept)
        with self._sequence_parallel.distribute_attention(parts, self.num_steps, getattr(batch, "samples", None)):
            yield parts

    def _compare_sequence_batch(self, batch: Any) -> tuple[Any, Problem | None]:
        """The batch; where ranks that share its sequences have other ones none of its samples, and what is wrong."""
        problem = None if self._sequence_parallel is None else self._sequence_parallel.batch_mismatch(batch)
        return (batch if problem is None else tree_map(unpack_batch(batch), lambda tensor: tensor[:0])), problem

    def _compare_batches(self, batch: Any) -> None:
        """Raise TaskError, on every rank, where all data ranks train on the same batches. Collective."""
        everyone = self._communicator.all_gather_json(fingerprint(batch))
        places = [self.plan.mesh.coordinates(rank) for rank in range(self._communicator.size)]
        self._duplicate_batches.compare([one for one, place in zip(everyone, places, strict=True) if place["sp"] == 0])

    def all_reduce(self, values: Tensor) -> list[float]:
        """The elements of a tensor, flattened and in float64, summed over the data ranks. Collective.

        Raises SettingError for what is no tensor of real numbers, and DivergenceError where ranks give different
        numbers of elements.
        """
        if not isinstance(values, Tensor) or values.is_complex():
            got = "values of complex numbers" if isinstance(values, Tensor) else format_argument("values", values)
            problem = Problem(got, "a tensor of real numbers", "torch.tensor([…]), or torch.view_as_real(…)")
            call = f"sum() of no tensor of real numbers after step {self.num_steps}"
            self._raise_after_mismatch(call, SettingError(problem, where="the arguments of sum()"))
        self._begin_call(f"sum() of {values.numel()} values")
        return self._all_reduce(values.detach().double().flatten())

    def _all_reduce(self, values: Tensor) -> list[float]:
        sums: list[float] = []
        for some in values.split(
            transports.NUM_LOSS_SCALARS
        ):  # no values are one empty part: the ranks meet all the same
            self._transport.all_reduce_scalars_async(LOSS, some)
            sums += self._transport.wait_scalars(LOSS)
        return sums

    def all_gather_json(self, value: Any) -> list[Any]:
        """Every rank's JSON value, in rank order. Collective."""
        self._begin_call("exchange()")
        self._transport.check_same_call()
        return self._communicator.all_gather_json(value)

    def check_drift(self) -> None:
        """Compare the weights that several ranks hold now, as `drift_check` does every so many steps. Collective.

        Raises DivergenceError, on every rank, where they differ in a bit, and TrainingError between meetings of local
        steps.
        """
        self._begin_call("check_drift()")
        self._transport.check_same_call()
        self._actions.flush()
        self._check_synchronized()
        self._drift_checker.compare(
            list(self._replicated_tensors()), f"after step {self.num_steps}", update_kind=self._options.implementation()
        )

    def _replicated_tensors(self) -> Iterator[replica_drift.ReplicatedTensor]:
        """The weights in this rank's own memory."""
        weights, gathered, shares = self._weights, self._weights.sharded_params is not None, self._state.shard_ranges
        for name, parameter in self.model.named_parameters():
            if name not in weights.trainable:
                if replica_drift.compares_frozen(self.plan):
                    yield replica_drift.ReplicatedTensor(replica_drift.FROZEN, name, 0, parameter)
            elif gathered:
                yield replica_drift.ReplicatedTensor(
                    replica_drift.WEIGHTS, name, shares[name][0], weights.model_shard(name)
                )
            elif self._transport.shared_weights is None or self._transport.is_writer:
                yield replica_drift.ReplicatedTensor(replica_drift.WEIGHTS, name, 0, parameter)
            if name in weights.master_weights.param_names:
                start = shares[name][0] if weights.master_weights.is_sharded else 0
                yield replica_drift.ReplicatedTensor(
                    replica_drift.MASTER_WEIGHTS, name, start, weights.master_weights.local_shard(name)
                )

    @contextlib.contextmanager
    def edit(self) -> Iterator[nn.Module]:
        """Change weights by hand: inside the block they are yours, after it every rank has rank 0's. Collective."""
        self._check_no_edits("edit()")
        self._begin_call("edit()")
        self._transport.check_same_call()
        self._actions.flush()
        with self._weights.edit():
            yield self.model
        if self._local_sgd is not None:
            self._local_sgd.finish_sync()
        torch.autograd.graph.increment_version(list(self.model.parameters()))
        self._weights.edits.accept_edits()

    @contextlib.contextmanager
    def unsharded(self) -> Iterator[nn.Module]:
        """Call the model by hand: within, on any rank and as often as one likes, without training it. Collective.

        Needed only where weights rest split among hosts (zero 3): outside of steps parameters are placeholders there,
        NaN in their shapes. Other ranks wait at the end of the block until no rank needs their shares any more.
        """
        self._begin_call("read()")
        self._actions.flush()
        with torch.no_grad(), self._weights.unsharded("read"):
            yield self.model

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every trainable weight by name, one after the other; read only. Collective: every rank goes to the end."""
        self._begin_call("weights()")
        self._actions.flush()
        return self._weights.named_weights()

    def flush(self) -> None:
        """Have the weights as they are after the last step: `update = "in_forward"` leaves it to the next. Collective.

        All that is done with a step, such as `evaluate` and `state_dict`, sees to it by itself. Before weights are
        used in another way, all ranks call this; where they do not, TrainingError is raised at the use.
        """
        self._begin_call("flush()")
        self._actions.flush()

    def load_weights(self, values: Mapping[str, Tensor]) -> None:
        """Replace trainable weights, by name; the same values on every rank. Collective.

        Raises TaskError, having changed nothing, where names or shapes are none of the model's.
        """
        self._check_no_edits("put()")
        self._begin_call("put()")
        self._transport.check_same_call()  # all are here: nobody reads weights any more
        self._raise_on_all_ranks(state_validation.weight_problems(values, self._weights.trainable), where="the weights")
        self._actions.flush()
        self._weights.load_weights(values)
        if self._local_sgd is not None:
            self._local_sgd.update_reference(values)

    @property
    def weight_shards(self) -> dict[str, Tensor]:
        """Of each trainable parameter what this rank has of its weights, as training goes on from them: no copies.

        The parameter; or, where the update has weights of its own, its flattened elements `shares` of these.
        """
        return {name: self._weights.weight_shard(name) for name in self._weights.trainable}

    @contextlib.contextmanager
    def swapped_weights(self, weights: Mapping[str, Tensor]) -> Iterator[None]:
        """Within, trainable weights are others, given as `shares_of_weights` has them. Collective."""
        self._check_no_edits("replaced()")
        self._begin_call("replaced()")
        self._transport.check_same_call()
        self._actions.flush()
        with self._weights.swapped_weights(weights):
            yield
            self._begin_call("the end of replaced()")
            self._transport.check_same_call()  # nobody computes with them any more

    def state_dict(self) -> dict[str, Any]:
        """All state by parameter name, independent of the mesh; tensors are copies. Collective.

        "model": name -> tensor, weights as the update has them; "optimizer": name -> key -> tensor in the parameter's
        shape or a scalar; "groups": options by group; "record": launch order, nominal count, and the scale of the loss
        where it has one; "codec": name -> key -> [ranks, elements], what each rank's codec remembers; "outer": with
        local steps, the outer momentum by name. Then the optimizer's tensors are means over ranks, and TrainingError is
        raised between meetings.
        """
        self._check_no_edits("state_dict()", compare_all=True)
        self._begin_call("state_dict()")
        self._transport.check_same_call()
        self._actions.flush()
        self._check_synchronized()
        return {**self._groups_and_record(), **self._state.state_dict()}

    def state_refs(self) -> dict[str, Any]:
        """`state_dict` without a copy: the optimizer's tensors are lists of consecutive flat stretches.

        Where optimizer states rest split these are this rank's only: `shares` says which elements they are. With local
        steps too: each rank has states of its own. Collective where updates wait for the next forward: see `flush`.
        """
        self._check_synchronized()
        self._actions.flush()
        return {**self._groups_and_record(), **self._state.state_refs()}

    def _check_synchronized(self) -> None:
        if not self.is_synchronized:
            got = f"the state after step {self.num_steps}, with local_steps = {self.plan.sync_interval}"
            need = "weights that all ranks have alike"
            after = -(-self.num_steps // self.plan.sync_interval) * self.plan.sync_interval
            raise TrainingError(Problem(got, need, f"after step {after}"))

    @property
    def shard_ranges(self) -> Mapping[str, tuple[int, int]]:
        """By parameter: the elements [start, stop) of its flattened form whose optimizer state is this rank's."""
        return self._state.shard_ranges

    @property
    def is_secondary_replica(self) -> bool:
        """Whether other ranks, whose numbers are less, hold the same shares as this one."""
        return self._transport.replica_index > 0

    @property
    def has_sharded_state(self) -> bool:
        """Whether optimizer states rest split over the data ranks."""
        return self._state.is_sharded

    def _groups_and_record(self) -> dict[str, Any]:
        record: dict[str, Any] = {
            "order": list(self._step_spec.launch_order),
            "nominal_count": self._actions.nominal_count,
            "optimizer": type(self.optimizer).__name__,
        }
        if self._loss_scaler is not None:
            record["scale"] = self._loss_scaler.state
        groups = [{k: cloned(v) for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups]
        return {"groups": groups, "record": record}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put back what `state_dict` gave, on this or another mesh. Collective.

        Raises TaskError, having changed nothing, where it is not the state of such a model and optimizer.
        """
        self._begin_call("load_state_dict()")
        self._transport.check_same_call()
        found = state_validation.state_problems(
            state, self._weights.model_state_dict(), self._weights.trainable, self.optimizer
        )
        self._raise_on_all_ranks(found, where="the state")
        self._actions.flush()
        self._state.load_state_dict(state)
        for group, options in zip(self.optimizer.param_groups, state["groups"], strict=True):
            # How an update is carried out was chosen when the step was built.
            group.update({k: cloned(v) for k, v in options.items() if k not in flat_optimizer.IMPLEMENTATION_OPTIONS})
        record = state["record"]
        if self._loss_scaler is not None and record.get("scale"):
            self._loss_scaler.load_state(record["scale"])
        # The launch order is of use only where the buckets are the same; else this mesh records one of its own.
        if sorted(record["order"]) == list(range(len(self.buckets))):
            self._set_record(list(record["order"]), record["nominal_count"])
        else:
            self._actions.nominal_count = record["nominal_count"]
        self._state.load_codec_state(state)

    def _raise_on_all_ranks(self, found: Sequence[Problem], *, where: str) -> None:
        """Raise TaskError on every rank where any has found a problem: nobody may wait for it. Collective."""
        told = dict.fromkeys(tuple(each) for problems in self._communicator.all_gather_json(found) for each in problems)
        if told:
            raise TaskError([Problem(*each) for each in told], where=where)

    def _comm_stats(self) -> CommStats:
        """What this rank has waited and sent so far."""
        ways = (self._transport, *(self._sequence_parallel.ring_groups if self._sequence_parallel is not None else ()))
        return CommStats(sum(way.waiting_seconds for way in ways), sum(way.sent_bytes for way in ways))

    def _check_unchanged(self) -> None:
        """Raise where the optimizer or the model has since the build what a step would leave out."""
        call = f"step {self.num_steps + 1}"
        if problems := self._optimizer_watch.problems():
            self._raise_after_mismatch(
                f"{call}, which its optimizer cannot do", OptimizerError(problems, where="the optimizer")
            )
        if problems := [*self._weights.problems(), *self._frozen_norms.problems()]:
            self._raise_after_mismatch(f"{call}, which its model cannot do", TaskError(problems, where="the model"))
        # Loops that write weights in each step are found in their first steps, whatever they write.
        is_early = self._num_calls & (self._num_calls - 1) == 0
        self._check_no_edits(
            call, compare_all=is_early or is_due(self.num_steps, self._drift_checker.every, self.plan.sync_interval)
        )

    def _check_no_edits(self, call: str, *, compare_all: bool = False) -> None:
        """Raise TaskError where somebody has written weights that the next update would not go on from."""
        if self._local_sgd is not None and self.is_synchronized:
            self._weights.edits.accept_edits()  # they become the anchor
        if problems := self._weights.edit_problems(
            compare_all=compare_all, sampled=not self._actions.has_pending_updates
        ):
            self._raise_after_mismatch(
                f"{call}, with weights that were written", TaskError(problems, where="the model")
            )

    def _raise_after_mismatch(self, call: str, error: FourfoldError) -> NoReturn:
        """Raise an error of this rank's; ranks that have no such error raise DivergenceError."""
        self._transport.begin_call(call)
        try:
            self._transport.check_same_call()
        except DivergenceError as divergence:
            raise error from divergence
        raise error

    def _begin_call(self, call: str, samples: BatchRange | None = None) -> None:
        self._transport.begin_call(_call_name(f"{call} after step {self.num_steps}", samples))

    def _set_record(self, order: list[int], count: float) -> None:
        """Freeze what the first step taught: the same on every rank from now on."""
        self._step_spec = self._step_spec._replace(launch_order=tuple(order))
        self._lower_programs()
        self._gradients.launch_order = list(order)
        before = self._actions.nominal_count
        if before is not None and before != count and isinstance(self._transport, transports.CompressedTransport):
            # What is remembered was divided by the count of before.
            self._transport.rescale_residuals(before / count)
        self._actions.nominal_count = count
        self._has_record = True


def _call_name(call: str, samples: BatchRange | None) -> str:
    """A call, and its part of the feed's order where it is known: ranks may be as many steps on, and a batch apart."""
    return call if samples is None else f"{call}, {samples}, {samples.num_samples} samples"


def _build_codecs(
    plan: Plan, buckets: Sequence[Bucket], by_bucket: Sequence[Sequence[nn.Parameter]]
) -> list[registry.Codec]:
    """One for each bucket, or none at all."""
    coding = plan.codec_spec
    if coding is None:
        return []
    return [
        registry.make_codec(
            coding, gradient_bucket(bucket, plan.reduce_dtype), [tuple(p.shape) for p in some], device=some[0].device
        )
        for bucket, some in zip(buckets, by_bucket, strict=True)
    ]


def _build_buckets(
    plan: Plan, specs: Sequence[ParamSpec], communicator: transports.Communicator, *, num_shards: int
) -> tuple[Bucket, ...]:
    # With a codec on one host too: what it keeps depends on the buckets, and the training is to be the same.
    travels = communicator.num_hosts > 1 or plan.codec != "none"
    return make_buckets(
        specs,
        bucket_bytes=effective_bucket_bytes(specs, plan.bucket_bytes, is_inter_host=travels),
        num_shards=num_shards,
    )


def _may_block_in_backward(plan: Plan, rest: RestingLayouts) -> bool:
    """Whether a rank may wait for a sum within backward while another waits there for the totals of all hosts."""
    # Split gradients pass through a few slots: backward waits for one to be free. Updates in backward need the totals.
    return plan.update == "in_backward" and rest.gradient == SPLIT


def _transport_spec(
    plan: Plan, buckets: Sequence[Bucket], rest: RestingLayouts, *, num_norms: int
) -> transports.TransportSpec:
    """What the buckets of a plan need of a transport."""
    return transports.TransportSpec(
        sizes=tuple(bucket.size for bucket in buckets),
        dtypes=tuple(grad_buckets.bucket_dtype(gradient_bucket(bucket, plan.reduce_dtype)) for bucket in buckets),
        buffer_indices=grad_buffer_indices(len(buckets), is_cyclic=rest.gradient == SPLIT),
        rest=rest,
        num_scalars=max(8, num_norms),
        num_shards=plan.num_shards if rest.state == SPLIT else None,
        weight_dtypes=tuple(grad_buckets.bucket_dtype(bucket) for bucket in buckets),
    )


def preflight(task: Task, plan: Plan) -> nn.Module:
    """The outline of a task's model.

    Raise TaskError, PlanError, OptimizerError or SettingError for what can be known of a task before processes are
    started.
    """
    model = build_meta_model(task, max_bytes=available_bytes())
    check_plan_for_model(model, plan, clip=task.clip)
    check_model_loss(task.loss, plan)
    transports.check_transport_device(plan.transport, "cuda" if torch.cuda.is_available() else "cpu")
    optimizer = flat_optimizer.build_optimizer(task.optimizer, list(model.parameters()))
    check_update_timing(optimizer, plan)
    check_user_optimizer(optimizer, plan)
    return model


def _tune_freed_memory(num_steps: int) -> None:
    """After each step of a process on a CPU: what its C library keeps of what is freed."""
    if num_steps == 1:
        # Not before: states are made in the first step, and would lie between gradients that are gone after it.
        memory.keep_freed_memory()
    elif num_steps == 2:
        memory.trim_freed_memory()


def _set_threads(communicator: transports.Communicator) -> None:
    # torch's own default is the number of physical cores: only another number was somebody's choice.
    defaults = {num_cores(), psutil.cpu_count(logical=False)}
    chosen = "OMP_NUM_THREADS" in os.environ or torch.get_num_threads() not in defaults
    if communicator.world.local_size > 1 and not chosen:
        torch.set_num_threads(max(1, num_cores() // communicator.world.local_size))
