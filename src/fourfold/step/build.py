"""Build: make a training step of a model, a loss, an optimizer and a plan.

TrainStep  one optimizer update per call, the same on every mesh
record     what later steps keep of the first: the launch order of buckets and the nominal count
Law: after k steps, losses and weights equal those of one process that trains on all the samples.
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
from fourfold.parts.codec.protocol import Codec
from fourfold.parts.comm import init, transports
from fourfold.parts.comm.communicator import Communicator
from fourfold.parts.comm.reduce.compressed import CompressedTransport
from fourfold.parts.comm.reduce.divergence_report import with_options
from fourfold.parts.comm.reduce.fingerprint_check import NUM_LOSS_SCALARS
from fourfold.parts.comm.reduce.local_sgd import LocalSGDTransport
from fourfold.parts.comm.reduce.transport_spec import TransportSpec
from fourfold.parts.data import grad_buckets, local_sgd
from fourfold.parts.data.flat_params import param_specs
from fourfold.parts.data.unbucketed_grads import UnbucketedGrads
from fourfold.parts.dtypes import bucket_dtype
from fourfold.parts.optim import flat_optimizer
from fourfold.parts.optim.master_weights import MasterWeightPolicy, offload_device
from fourfold.parts.optim.option_text import IMPLEMENTATION_OPTIONS
from fourfold.parts.optim.option_tracker import OptionTracker
from fourfold.parts.optim.step_hooks import StepHooks
from fourfold.parts.optim.update_slices import update_slices
from fourfold.parts.optim.user_optimizer import OptimizerFactory, build_optimizer, group_indices, is_layerwise
from fourfold.plan.data.buckets import Bucket, ParamSpec, effective_bucket_bytes, make_buckets
from fourfold.plan.data.step_program import DataStepSpec, StepSync, lower_step
from fourfold.plan.data.zero import RESTING_LAYOUTS, RestingLayouts, grad_buffer_indices
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
from fourfold.step.drift_report import FROZEN, MASTER_WEIGHTS, WEIGHTS
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
from fourfold.step.saved_state import SavedState, readers_of
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
    optimizer: OptimizerFactory,
    plan: Plan | None = None,
    *,
    clip: float | None = None,
    seed: int = 0,
    skip_nan: int = 0,
    same_batches: str = "refuse",
    drift_check: int = DRIFT_CHECK,
) -> "TrainStep":
    """Lay one training step over the ranks of a plan. Collective.

    Joins the existing process group, or makes one from the launcher's environment; then rank 0's weights and buffers
    are broadcast.

    loss          loss(outputs, targets) returns unreduced values (their global mean is trained), a pair (sum, count),
                  or a scalar: the mean over the elements that torch's loss functions count, else over the samples.
                  None: the model returns its own loss, of batches that are dicts of its inputs with the labels
    optimizer     called once, with the model's parameters; flat buffers are then updated with its options
    plan          None: all ranks are data ranks
    clip          bounds the global norm of the gradient
    seed          seeds torch's generator, differently on each data index
    skip_nan      how many steps in a row may be skipped because the global loss, or with `clip` the norm, is not
                  finite; one more raises TrainingError
    same_batches  "refuse": raise TaskError where all data ranks train on the same batches, three different ones in a
                  row; "allow": never raise. Batches of a `Feed` always differ
    drift_check   ranks compare the weights that several of them have after every so many steps, and raise
                  DivergenceError if they differ; 0: never

    Raises SettingError for arguments of the wrong kind, and PlanError, OptimizerError or TaskError if the plan cannot
    be carried out with them.
    """
    check_arguments(model=model, loss=loss, optimizer=optimizer, plan=plan, clip=clip, seed=seed, skip_nan=skip_nan)
    comm = init.init_communicator()
    plan = plan or Plan(dp=comm.size)
    check_plan_on_ranks(model, plan, comm, clip=clip)
    _set_threads(comm)
    torch.manual_seed(generator_seed(seed, plan.mesh.coordinates(comm.rank)["dp"]))
    options = {"clip": clip, "skip_nan": skip_nan, "seed": seed}
    options |= {"same_batches": same_batches, "drift_check": drift_check}
    return TrainStep(model.to(comm.device), loss, optimizer, plan=plan, communicator=comm, **options)


class CommStats(NamedTuple):
    """How long a rank has waited for others, and how much it has sent to them."""

    waiting_seconds: float
    sent_bytes: float


class TrainStep:
    """One training step: `step(batch)` is one optimizer update. `ff.parallelize` makes it.

    The batch is this rank's part of the global batch; it may be empty. Every rank must call the methods that say
    "Collective", in the same order; DivergenceError names the ranks that are in different calls.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Any, Any], Any] | None,
        optimizer: OptimizerFactory,
        *,
        plan: Plan,
        communicator: Communicator,
        clip: float | None,
        skip_nan: int = 0,
        seed: int = 0,
        same_batches: str = "refuse",
        drift_check: int = DRIFT_CHECK,
    ) -> None:
        check_model_loss(loss, plan)
        self.model, self.plan, self._communicator = model, plan, communicator
        self.objective = Objective(loss)
        self.optimizer = build_optimizer(optimizer, list(model.parameters()))
        check_update_timing(self.optimizer, plan)
        check_user_optimizer(self.optimizer, plan)
        self._optimizer_watch = OptimizerWatch(self.optimizer, plan)
        self._frozen_norms = FrozenBatchNorms(model, plan)
        trainable = trainable_parameters(model)
        own_specs = param_specs(trainable, group_indices(self.optimizer, trainable))
        shapes = {name: list(p.shape) for name, p in trainable.items()}
        self._duplicate_batches = DuplicateBatches(
            same_batches, num_data_ranks=plan.dp, is_log_rank=communicator.rank == 0
        )
        options = {"clip": clip, "skip_nan": skip_nan, "same_batches": same_batches, "drift_check": drift_check}
        check_same_on_ranks(communicator, own_specs, shapes, plan=plan, options=options, optimizer=self.optimizer)
        self._options = OptionTracker(self.optimizer)
        # Split over one rank is whole.
        layouts = RESTING_LAYOUTS[plan.zero if plan.num_shards > 1 else 0]
        is_sharded = layouts.state == SPLIT
        specs = compute_specs(own_specs, plan.precision, excluded=mixed_precision.full_precision_params(model))
        self.buckets = _build_buckets(plan, specs, communicator, num_shards=plan.reduce_group_size if is_sharded else 1)
        by_bucket = [[trainable[slot.name] for slot in bucket.slots] for bucket in self.buckets]
        codecs = _build_codecs(plan, self.buckets, by_bucket)
        layerwise = is_layerwise(self.optimizer)
        allow_unused = plan.unused == "allow"
        unbucketed = (
            UnbucketedGrads(trainable, self.buckets, allow_unused=allow_unused) if has_unbucketed_grads(plan) else None
        )
        transport_spec = _transport_spec(
            plan, self.buckets, layouts, num_norms=2 * len(trainable) if layerwise else len(trainable)
        )
        local_grads = None if unbucketed is None else unbucketed.local_grads
        self._transport, self.transport_name = transports.make_transport(
            communicator, transport_spec, choice=plan.transport, codecs=codecs, unbucketed_grads=local_grads
        )
        if layouts.weight == SPLIT and not self._transport.unshards_params:
            layouts = RESTING_LAYOUTS[2]  # the weights exist once per host: nothing to unshard before use
        self.codec_state = CodecState(codecs, communicator)
        local_transport = LocalSGDTransport(self._transport, communicator.size) if plan.sync == "local" else None
        self._transport = local_transport or self._transport
        policy = MasterWeightPolicy(plan.precision, is_sharded, offload_device(plan.offload, communicator.device))
        outer = (
            local_sgd.OuterOptimizer(plan.outer_lr, plan.outer_momentum)
            if local_transport is not None
            else local_sgd.OuterOptimizer()
        )
        self._weights = Weights(model, self.buckets, self._transport, communicator, policy, is_mean=outer.is_mean)
        self._local_sgd = None
        if local_transport is not None:
            self._local_sgd = local_sgd.LocalSGD(self._weights.flats, self.buckets, local_transport, outer)
        by_slot = allow_unused or layerwise
        if unbucketed is not None:
            self._gradients = unbucketed
            slices = unbucketed.update_slices(self._weights.flats, self.buckets)
        else:
            self._gradients = grad_buckets.GradBuckets(
                trainable, self.buckets, self._transport, allow_unused=allow_unused
            )
            slices = update_slices(
                self._weights, self.buckets, self._transport, split_by_param=by_slot, is_chunked=is_sharded
            )
        prepare = self._transport.reduce_range if is_sharded else None
        flat = flat_optimizer.FlatOptimizer(self.optimizer, self.buckets, slices, prepare_grads=prepare)
        self._state = PersistentState(
            self._weights,
            self.buckets,
            flat,
            self._transport,
            communicator,
            self.codec_state,
            self._local_sgd,
            is_sharded=is_sharded,
        )
        # With local steps each rank divides gradients by its own count, not by that of all ranks.
        self._count_divisor = plan.dp if self._local_sgd is not None else 1
        self._loss_scaler = LossScaler() if plan.precision == "fp16" else None
        is_unbucketed = unbucketed is not None
        hooks = StepHooks(self.optimizer, self.buckets, by_bucket, is_unbucketed=is_unbucketed, can_skip_params=by_slot)
        context = StepContext(
            self._gradients,
            self._transport,
            flat,
            by_bucket,
            self._weights.flats,
            layouts,
            self._weights.edits,
            self._weights.sharded_params,
            self._local_sgd,
            hooks,
            self._loss_scaler,
        )
        self._actions = Actions(
            model,
            self.objective,
            context,
            clip=clip,
            update=plan.update,
            all_reduce_count=lambda count: sum(communicator.all_gather_json(count)) / self._count_divisor,
            blocks_in_backward=plan.sp > 1
            or context.sharded_params is not None
            or _may_block_in_backward(plan, layouts),
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
            layouts,
            clip is not None or self._loss_scaler is not None,
            allow_unused,
            plan.update,
            has_trust_ratios=layerwise and is_sharded,
        )
        self._lower_programs()
        self._has_record, self._num_calls = False, 0
        self.program: tuple[Action, ...]
        """The actions of a step. With local steps: of one at whose end weights are averaged; else `local_program`."""
        self.num_steps = 0
        """Steps done, including those before a resume: errors name them."""

    def _lower_programs(self) -> None:
        """Make the programs from the step spec."""
        if self._local_sgd is None:
            self.program = self.local_program = lower_step(self._step_spec)
            return
        self.program = lower_step(self._step_spec._replace(sync=StepSync.WEIGHTS))
        self.local_program = lower_step(self._step_spec._replace(sync=StepSync.NOTHING))

    @property
    def is_synchronized(self) -> bool:
        """Whether all ranks have the same weights: always, or with local steps just after they are averaged."""
        return self.num_steps % self.plan.sync_interval == 0

    @property
    def rank(self) -> int:
        return self._communicator.rank

    def request_stop(self, stop: bool) -> None:
        """Whether this rank wants to stop the run. If any rank does, `stop_requested` is True on all after a step."""
        self._actions.stop_requested = stop

    @property
    def stop_requested(self) -> bool:
        """Whether any rank had requested a stop when the last step began; the same on every rank."""
        totals = self._actions.totals
        return totals is not None and totals.num_stop_requests > 0

    def peer_is_dead(self, rank: int) -> bool:
        """Whether a rank's process has ended, as far as this host can tell. Not collective: waits poll it."""
        return self._communicator.is_peer_dead(rank)

    def check_peers(self) -> None:
        """Raise PeerError if another rank of this host has ended. Not collective: waits call it."""
        self._communicator.check_peers()

    def set_recorder(self, recorder: Recorder) -> None:
        """Record this rank's actions, buckets and waits from now on; `NULL_RECORDER` ends it. Not collective."""
        self._executor.recorder = self._actions.recorder = recorder
        for channel in self._channels():
            channel.recorder = recorder
        if self._local_sgd is None:
            self._gradients.recorder = recorder  # with local steps gradients are not sent

    def _channels(self) -> tuple[Any, ...]:
        """The transport and the rings through which this rank communicates in a step."""
        rings = self._sequence_parallel.ring_groups if self._sequence_parallel is not None else ()
        return (self._transport, *rings)

    @property
    def busy_seconds(self) -> dict[str, float]:
        """The time of this rank's last step by verb name, without waits."""
        return self._executor.busy_seconds

    @property
    def dp_index(self) -> int:
        """This rank's index on the data axis."""
        return self.plan.mesh.coordinates(self.rank)["dp"]

    @property
    def device(self) -> torch.device:
        return self._communicator.device

    def __call__(self, batch: Any) -> Metrics:
        """One optimizer update on this rank's batch `(inputs, targets)`. Collective.

        Raises DivergenceError if another rank is in another call, or at another place in the feed's order.
        """
        begin, (waited, sent) = time.perf_counter(), self._comm_stats()
        samples = getattr(batch, "samples", None)
        self._check_unchanged()
        call = _call_name(f"step {self.num_steps + 1}", samples)
        self._transport.begin_call(with_options(call, self._options.text()))
        compares_batches = self._duplicate_batches.is_active and samples is None
        compares_sources = self._num_calls == 0 and samples is not None
        if not self._has_record or compares_batches or compares_sources:
            self._transport.check_same_call()  # before other collectives than sums
        if compares_sources:
            check_same_source(self._communicator.all_gather_json(getattr(batch, "probe", None)))
        if compares_batches:
            self._compare_batches(batch)
        self.dry_run(batch, training=True)
        batch, self._actions.batch_mismatch = self._compare_sequence_batch(batch)
        self._nan_guard.save_buffers()
        loss_scale = None if self._loss_scaler is None else self._loss_scaler.value
        program = self.local_program if (self.num_steps + 1) % self.plan.sync_interval else self.program
        with self._local_microbatches(batch, self.plan.microbatches) as microbatches:
            self._executor.run(program, microbatches)
        if self._actions.has_called_hooks:
            self._weights.check_storage()  # a hook may have replaced the storage of parameters
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
            self._actions.nominal_count = None  # no elements, no estimate
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
        """The loss of the global batch, without training on it; NaN if the batch is empty on all ranks. Collective."""
        begin, (waited, _) = time.perf_counter(), self._comm_stats()
        self._begin_call("evaluate()", getattr(batch, "samples", None))
        self._actions.flush()
        self.dry_run(batch)
        batch, problem = self._compare_sequence_batch(batch)
        sums = torch.zeros(7, dtype=torch.float64)
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
                sums = torch.tensor([float(value) for value in values], dtype=torch.float64)
        sums[4] = problem is not None
        total, count, samples, tokens, num_mismatches, other_count, other_square = self._all_reduce(sums)
        if num_mismatches:
            raise TaskError(problem or batch_mismatch_problem(), where="the batch")
        if is_uneven(count, other_count, other_square):
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
        """Check with one batch that the plan may split the batch and the model computes the same. Collective.

        Raises TaskError, on every rank, if not. The first step does the same. `training`: a step on this batch follows.
        """
        if self._sequence_parallel is not None and not self._sequence_parallel.has_dry_run:
            self._transport.check_same_call()
            self._sequence_parallel.dry_run(batch, self._weights.unsharded("try out"))
            self._weights.edits.accept_edits()
        if self._dry_run.is_needed(training=training):
            self._transport.check_same_call()
            small = batch if self._sequence_parallel is None else self._sequence_parallel.dry_run_batch(batch)
            self._dry_run.run(small, self._weights.unsharded, self._communicator.all_gather_json, training=training)
            self._weights.edits.accept_edits()

    @contextlib.contextmanager
    def local_batch(self, batch: Any) -> Iterator[Microbatch]:
        """This rank's part of a batch; inside, the model's attention reaches all of its tokens.

        Collective among the ranks of one sequence; raises TaskError on them if their batches differ.
        """
        batch, problem = self._compare_sequence_batch(batch)
        if problem is not None:
            raise TaskError(problem, where="the batch")
        with self._local_microbatches(batch) as (part,):
            yield part

    def run_forward(self, batch: Any) -> tuple[Microbatch, ForwardResult]:
        """Forward and loss of this rank's part of a batch, which must not be empty; collective as `local_batch` is."""
        with self.local_batch(batch) as part:
            return part, self.objective(self.model, part)

    @contextlib.contextmanager
    def _local_microbatches(self, batch: Any, num_microbatches: int = 1) -> Iterator[list[Microbatch]]:
        """This rank's microbatches of a batch that has been compared."""
        if self._sequence_parallel is None:
            yield split_microbatches(batch, num_microbatches, self.device)
            return
        shard, real_tokens = self._sequence_parallel.shard_batch(batch)
        microbatches = split_microbatches(shard, num_microbatches, self.device, real_tokens=real_tokens)
        samples = getattr(batch, "samples", None)
        with self._sequence_parallel.distribute_attention(microbatches, self.num_steps, samples):
            yield microbatches

    def _compare_sequence_batch(self, batch: Any) -> tuple[Any, Problem | None]:
        """The batch; if the ranks of its sequences have different batches, an empty batch and the problem."""
        problem = None if self._sequence_parallel is None else self._sequence_parallel.batch_mismatch(batch)
        return (batch if problem is None else tree_map(unpack_batch(batch), lambda tensor: tensor[:0])), problem

    def _compare_batches(self, batch: Any) -> None:
        """Raise TaskError, on every rank, where all data ranks train on the same batches. Collective."""
        by_rank = self._communicator.all_gather_json(fingerprint(batch))
        coordinates = map(self.plan.mesh.coordinates, range(self._communicator.size))
        self._duplicate_batches.compare([each for each, at in zip(by_rank, coordinates, strict=True) if at["sp"] == 0])

    def all_reduce(self, values: Tensor) -> list[float]:
        """The elements of a tensor, flattened and in float64, summed over the data ranks. Collective.

        Raises SettingError for anything but a tensor of real numbers, and DivergenceError if ranks give different
        numbers of elements.
        """
        if not isinstance(values, Tensor) or values.is_complex():
            got = "values of complex numbers" if isinstance(values, Tensor) else format_argument("values", values)
            problem = Problem(got, "a tensor of real numbers", "torch.tensor([…]), or torch.view_as_real(…)")
            call = f"all_reduce() of values that are refused after step {self.num_steps}"
            self._raise_after_mismatch(call, SettingError(problem, where="the arguments of all_reduce()"))
        self._begin_call(f"all_reduce() of {values.numel()} values")
        return self._all_reduce(values.detach().double().flatten())

    def _all_reduce(self, values: Tensor) -> list[float]:
        sums: list[float] = []
        # split() of no values gives one empty chunk: the ranks are still compared.
        for chunk in values.split(NUM_LOSS_SCALARS):
            self._transport.all_reduce_scalars_async(LOSS, chunk)
            sums += self._transport.wait_scalars(LOSS)
        return sums

    def all_gather_json(self, value: Any) -> list[Any]:
        """Every rank's JSON value, in rank order. Collective."""
        self._begin_call("all_gather_json()")
        self._transport.check_same_call()
        return self._communicator.all_gather_json(value)

    def check_drift(self) -> None:
        """Compare the weights that several ranks have now, as `drift_check` does after every so many steps. Collective.

        Raises DivergenceError, on every rank, if they differ in a bit; with local steps, TrainingError unless the ranks
        have just averaged their weights.
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
        weights, ranges = self._weights, self._state.shard_ranges
        is_sharded = weights.sharded_params is not None
        for name, parameter in self.model.named_parameters():
            if name not in weights.trainable:
                if replica_drift.compares_frozen(self.plan):
                    yield replica_drift.ReplicatedTensor(FROZEN, name, 0, parameter)
            elif is_sharded:
                yield replica_drift.ReplicatedTensor(WEIGHTS, name, ranges[name][0], weights.model_shard(name))
            elif self._transport.shared_weights is None or self._transport.is_writer:
                yield replica_drift.ReplicatedTensor(WEIGHTS, name, 0, parameter)
            if name in weights.master_weights.param_names:
                start = ranges[name][0] if weights.master_weights.is_sharded else 0
                yield replica_drift.ReplicatedTensor(
                    MASTER_WEIGHTS, name, start, weights.master_weights.local_shard(name)
                )

    @contextlib.contextmanager
    def edit(self) -> Iterator[nn.Module]:
        """Change weights by hand, inside the block; after it every rank has rank 0's weights. Collective."""
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
        """Inside the block, any rank may call the model, as often as it likes, without training it. Collective.

        Needed only if weights rest split among hosts (zero 3): outside of steps parameters are placeholders there,
        filled with NaN. Ranks wait at the end of the block until no rank needs their shards.
        """
        self._begin_call("unsharded()")
        self._actions.flush()
        with torch.no_grad(), self._weights.unsharded("unsharded"):
            yield self.model

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every trainable weight by name, whole, one at a time; read only. Collective: all ranks iterate to the end."""
        self._begin_call("named_weights()")
        self._actions.flush()
        return self._weights.named_weights()

    def flush(self) -> None:
        """Run the updates that `update = "in_forward"` leaves to the next forward. Collective.

        The step's own methods, such as `evaluate` and `state_dict`, do it themselves. Before weights are used in any
        other way, all ranks must call this; otherwise the use raises TrainingError.
        """
        self._begin_call("flush()")
        self._actions.flush()

    def load_weights(self, values: Mapping[str, Tensor]) -> None:
        """Replace trainable weights, by name; the same values on every rank. Collective.

        Raises TaskError, before anything is changed, for names or shapes that the model does not have.
        """
        self._check_no_edits("load_weights()")
        self._begin_call("load_weights()")
        self._transport.check_same_call()  # all ranks are here: none reads weights
        self._raise_on_all_ranks(state_validation.weight_problems(values, self._weights.trainable), where="the weights")
        self._actions.flush()
        self._weights.load_weights(values)
        if self._local_sgd is not None:
            self._local_sgd.update_reference(values)

    @property
    def weight_shards(self) -> dict[str, Tensor]:
        """This rank's shard of every trainable parameter, of its master weights if it has them; no copies.

        A parameter without master weights that rests whole is given itself; all others are flat, the elements
        `shard_ranges`. Not collective.
        """
        return {name: self._weights.weight_shard(name) for name in self._weights.trainable}

    @contextlib.contextmanager
    def swapped_weights(self, weights: Mapping[str, Tensor]) -> Iterator[None]:
        """Inside, the trainable weights are others, given in the form of `weight_shards`. Collective."""
        self._check_no_edits("swapped_weights()")
        self._begin_call("swapped_weights()")
        self._transport.check_same_call()
        self._actions.flush()
        with self._weights.swapped_weights(weights):
            yield
            self._begin_call("the end of swapped_weights()")
            self._transport.check_same_call()  # no rank computes with them any more

    def state_dict(self) -> dict[str, Any]:
        """All state by parameter name, independent of the mesh; tensors are copies. Collective.

        model      name -> tensor: master weights if the parameter has them
        optimizer  name -> key -> a tensor in the parameter's shape, or a scalar
        groups     the options of each parameter group
        record     launch order, nominal count, and the loss scale if there is one
        codec      name -> key -> [ranks, elements]: what each rank's codec keeps between steps
        outer      name -> tensor: the outer momentum of local steps

        With local steps the optimizer's tensors are means over the ranks, and TrainingError is raised unless ranks have
        just averaged their weights.
        """
        self._check_no_edits("state_dict()", compare_all=True)
        self._begin_call("state_dict()")
        self._transport.check_same_call()
        self._actions.flush()
        self._check_synchronized()
        return {**self._groups_and_record(), **self._state.state_dict()}

    def state_refs(self) -> dict[str, Any]:
        """`state_dict` without copies: each optimizer tensor is a list of consecutive flat slices.

        If optimizer states rest split, these are this rank's only: the elements `shard_ranges`. With local steps each
        rank has states of its own. Collective if updates wait for the next forward: see `flush`.
        """
        self._check_synchronized()
        self._actions.flush()
        return {**self._groups_and_record(), **self._state.state_refs()}

    def _check_synchronized(self) -> None:
        if not self.is_synchronized:
            got = f"the state after step {self.num_steps}, with local_steps = {self.plan.sync_interval}"
            need = "the same weights on all ranks, which they have just after averaging them"
            after = -(-self.num_steps // self.plan.sync_interval) * self.plan.sync_interval
            raise TrainingError(Problem(got, need, f"after step {after}"))

    @property
    def shard_ranges(self) -> Mapping[str, tuple[int, int]]:
        """By parameter: the elements [start, stop) of its flattened form whose optimizer state is this rank's."""
        return self._state.shard_ranges

    @property
    def shard_replica(self) -> tuple[int, int]:
        """Which of how many ranks with the same shards this rank is: (0, 1) unless several have them."""
        return self._state.shard_replica

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
        """Restore what `state_dict` returned, on this mesh or another. Collective.

        Raises TaskError, before anything is changed, if it is not the state of such a model and optimizer.
        """
        self._begin_call("load_state_dict()")
        self._transport.check_same_call()
        problems = state_validation.state_problems(
            state, self._weights.model_state_dict(), self._weights.trainable, self.optimizer
        )
        self._raise_on_all_ranks(problems, where="the state")
        self._load(readers_of(state))

    def load_saved_state(self, saved: SavedState) -> None:
        """Restore a state that is read a tensor at a time, and that fits this model and optimizer. Collective."""
        self._begin_call("load_saved_state()")
        self._transport.check_same_call()
        self._load(saved)

    def _load(self, saved: SavedState) -> None:
        self._actions.flush()
        self._state.load(saved)
        for group, options in zip(self.optimizer.param_groups, saved.groups, strict=True):
            # Options such as `foreach` choose an implementation; that was done when the step was built.
            group.update({k: cloned(v) for k, v in options.items() if k not in IMPLEMENTATION_OPTIONS})
        record = saved.record
        if self._loss_scaler is not None and record.get("scale"):
            self._loss_scaler.load_state(record["scale"])
        # The launch order is valid only for the same number of buckets; otherwise the next step records a new one.
        if sorted(record["order"]) == list(range(len(self.buckets))):
            self._set_record(list(record["order"]), record["nominal_count"])
        else:
            self._actions.nominal_count = record["nominal_count"]
        self._state.load_codec_state(saved.codec)

    def _raise_on_all_ranks(self, problems: Sequence[Problem], *, where: str) -> None:
        """Raise TaskError on every rank if any rank has a problem, so that none waits for another. Collective."""
        by_rank = self._communicator.all_gather_json(problems)
        distinct = dict.fromkeys(tuple(problem) for each in by_rank for problem in each)
        if distinct:
            raise TaskError([Problem(*each) for each in distinct], where=where)

    def _comm_stats(self) -> CommStats:
        """How long this rank has waited and how much it has sent so far."""
        channels = self._channels()
        return CommStats(sum(each.waiting_seconds for each in channels), sum(each.sent_bytes for each in channels))

    def _check_unchanged(self) -> None:
        """Raise if the optimizer or the model has changed since the build in a way that a step would ignore."""
        call = f"step {self.num_steps + 1}"
        if problems := self._optimizer_watch.problems():
            self._raise_after_mismatch(
                f"{call}, which its optimizer cannot do", OptimizerError(problems, where="the optimizer")
            )
        if problems := [*self._weights.problems(), *self._frozen_norms.problems()]:
            self._raise_after_mismatch(f"{call}, which its model cannot do", TaskError(problems, where="the model"))
        # In steps 0, 1, 2, 4, 8, … all weights are compared: a loop that writes weights is found early.
        is_early = self._num_calls & (self._num_calls - 1) == 0
        self._check_no_edits(
            call, compare_all=is_early or is_due(self.num_steps, self._drift_checker.every, self.plan.sync_interval)
        )

    def _check_no_edits(self, call: str, *, compare_all: bool = False) -> None:
        """Raise TaskError if weights have been written outside of `edit`, and the next update would ignore it."""
        if self._local_sgd is not None and self.is_synchronized:
            self._weights.edits.accept_edits()  # they become the reference weights
        if problems := self._weights.edit_problems(
            compare_all=compare_all, sampled=not self._actions.has_pending_updates
        ):
            self._raise_after_mismatch(
                f"{call}, with weights that were written", TaskError(problems, where="the model")
            )

    def _raise_after_mismatch(self, call: str, error: FourfoldError) -> NoReturn:
        """Raise this rank's error, and DivergenceError on the ranks that do not have it."""
        self._transport.begin_call(call)
        try:
            self._transport.check_same_call()
        except DivergenceError as divergence:
            raise error from divergence
        raise error

    def _begin_call(self, call: str, samples: BatchRange | None = None) -> None:
        self._transport.begin_call(_call_name(f"{call} after step {self.num_steps}", samples))

    def _set_record(self, order: list[int], count: float) -> None:
        """Fix the launch order and the nominal count for all later steps, the same on every rank."""
        self._step_spec = self._step_spec._replace(launch_order=tuple(order))
        self._lower_programs()
        self._gradients.launch_order = list(order)
        before = self._actions.nominal_count
        if before is not None and before != count and isinstance(self._transport, CompressedTransport):
            # Residuals were divided by the previous nominal count.
            self._transport.rescale_residuals(before / count)
        self._actions.nominal_count = count
        self._has_record = True


def _call_name(call: str, samples: BatchRange | None) -> str:
    """The call, and its samples in the feed's order if known: ranks in the same step may be at different batches."""
    return call if samples is None else f"{call}, {samples}, {samples.num_samples} samples"


def _build_codecs(plan: Plan, buckets: Sequence[Bucket], by_bucket: Sequence[Sequence[nn.Parameter]]) -> list[Codec]:
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
        for bucket, params in zip(buckets, by_bucket, strict=True)
    ]


def _build_buckets(
    plan: Plan, specs: Sequence[ParamSpec], communicator: Communicator, *, num_shards: int
) -> tuple[Bucket, ...]:
    # A codec's residuals depend on the buckets: with a codec, one host has the same buckets as several.
    is_inter_host = communicator.num_hosts > 1 or plan.codec != "none"
    return make_buckets(
        specs,
        bucket_bytes=effective_bucket_bytes(specs, plan.bucket_bytes, is_inter_host=is_inter_host),
        num_shards=num_shards,
    )


def _may_block_in_backward(plan: Plan, layouts: RestingLayouts) -> bool:
    """Whether, within backward, one rank may wait for a reduction while another waits for the totals of all hosts."""
    # Split gradients pass through a few buffers: backward waits for a free one. Updates in backward need the totals.
    return plan.update == "in_backward" and layouts.gradient == SPLIT


def _transport_spec(plan: Plan, buckets: Sequence[Bucket], layouts: RestingLayouts, *, num_norms: int) -> TransportSpec:
    """What the transport must provide for these buckets."""
    return TransportSpec(
        sizes=tuple(bucket.size for bucket in buckets),
        dtypes=tuple(bucket_dtype(gradient_bucket(bucket, plan.reduce_dtype)) for bucket in buckets),
        buffer_indices=grad_buffer_indices(len(buckets), is_cyclic=layouts.gradient == SPLIT),
        rest=layouts,
        num_scalars=max(8, num_norms),
        num_shards=plan.num_shards if layouts.state == SPLIT else None,
        weight_dtypes=tuple(bucket_dtype(bucket) for bucket in buckets),
    )


def preflight(task: Task, plan: Plan) -> nn.Module:
    """Check a task and a plan before processes are started; returns the task's meta model.

    Raises TaskError, PlanError, OptimizerError or SettingError.
    """
    model = build_meta_model(task, max_bytes=available_bytes())
    check_plan_for_model(model, plan, clip=task.clip)
    check_model_loss(task.loss, plan)
    transports.check_transport_device(plan.transport, "cuda" if torch.cuda.is_available() else "cpu")
    optimizer = build_optimizer(task.optimizer, list(model.parameters()))
    check_update_timing(optimizer, plan)
    check_user_optimizer(optimizer, plan)
    return model


def _tune_freed_memory(num_steps: int) -> None:
    """After each step on a CPU: set how much freed memory the C library keeps."""
    if num_steps == 1:
        # Not before: the first step makes optimizer states, which would lie between gradients that are freed after it.
        memory.keep_freed_memory()
    elif num_steps == 2:
        memory.trim_freed_memory()


def _set_threads(communicator: Communicator) -> None:
    """Divide the cores of the host among its ranks, unless the user has chosen a number of threads."""
    # torch's default is the number of physical cores: any other number is the user's choice.
    defaults = {num_cores(), psutil.cpu_count(logical=False)}
    is_chosen = "OMP_NUM_THREADS" in os.environ or torch.get_num_threads() not in defaults
    if communicator.world.local_size > 1 and not is_chosen:
        torch.set_num_threads(max(1, num_cores() // communicator.world.local_size))
