"""Actions: what each verb of a program does with this rank's tensors.

bad step       its global loss, or its gradient norm if one is measured, is not finite; or the global batch has no loss
               element, whose mean is NaN in torch
overflow       the norm of a scaled gradient is not finite, and a smaller loss scale may help: not a bad step
nominal count  what gradients are divided by during backward, while the step's own count is not known yet
Law: after a step's updates, weights have moved by the gradient of the mean over the global batch. After a bad step or
an overflow, neither weights nor optimizer states have changed; local steps average weights after a bad step too.
"""

import contextlib
import itertools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from fourfold.parts.data.grad_buckets import GradBuckets
from fourfold.parts.optim.step_hooks import StepHooks
from fourfold.plan.data.zero import layout_changes
from fourfold.step.batch import Microbatch
from fourfold.step.context import StepContext, StepTotals, UpdateArgs
from fourfold.step.forward_fusion import DeferredUpdates
from fourfold.step.loss_sum import Loss
from fourfold.step.objective import Objective
from fourfold.step.sequence.batch_consistency import batch_mismatch_problem
from fourfold.step.uneven_means import is_uneven, uneven_problem
from fourfold.words.errors import Problem, TaskError
from fourfold.words.layout import SPLIT, WHOLE, Change
from fourfold.words.program import GRAD_NORM, LOSS, TRUST_NORMS, USED_PARAMS, Action, Verb
from fourfold.words.trace_events import DONE_EVENT, NULL_RECORDER

NO_ELEMENTS = "a global batch without a loss element: all targets are ignored, or there are no samples"


class Actions:
    """A method for each verb, and the state of the current step."""

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        context: StepContext,
        *,
        clip: float | None,
        update: str,
        all_reduce_count: Callable[[float], float],
    ) -> None:
        """`update` is the plan's: when buckets are updated.

        `all_reduce_count` sums a number over the data ranks; it is called once, in the first step.
        """
        self._model, self._objective, self._context = model, objective, context
        self._clip, self._all_reduce_count = clip, all_reduce_count
        # In the first step the nominal count is an estimate, in all others the first step's count. Gradients are
        # multiplied by nominal / actual count after the reduction; that is 1 if all batches have the same count.
        self.nominal_count: float | None = None
        self.stop_requested = False
        """Whether this rank has been asked to stop; the step sums this over the ranks."""
        self.batch_mismatch: Problem | None = None
        """What is wrong if the ranks of one sequence have different batches; the step sums this over the ranks."""
        self.recorder = NULL_RECORDER
        self._reduces_every_backward = context.resting_layouts.gradient == SPLIT
        self._updates_after_backward = update == "after"
        self._gathers_weights = layout_changes(context.resting_layouts).after_update != Change.NONE
        self.deferred: DeferredUpdates | None = None
        """The updates that wait for the next forward, with `update = "in_forward"`."""
        if update == "in_forward":
            self.deferred = DeferredUpdates(
                context.parameters, context.transport, self._update_deferred, sharded_params=context.sharded_params
            )
        # Otherwise the update itself multiplies by the gradient scale.
        self._scales_before_update = context.resting_layouts.state == WHOLE and not context.optimizer.converts_grads
        if self._scales_before_update and isinstance(context.gradients, GradBuckets):
            context.gradients.grad_factor = self._known_factor
        if update == "in_backward":
            context.gradients.on_launch = self._update_early
        slots = [len(parameters) for parameters in context.parameters]
        self._offsets = [sum(slots[:bucket]) for bucket in range(len(slots))]

    def begin_step(self, microbatches: Sequence[Microbatch]) -> None:
        """Reset the state of the step."""
        self._microbatches = microbatches
        self._losses: dict[int, Loss] = {}
        self._counts: list[float | Tensor] = []
        self._has_added_samples = False
        flags = [float(self.stop_requested), float(self.batch_mismatch is not None)]
        self._host_totals = [0.0] * 4 + flags + [0.0] * 2
        """This rank's totals, in the order of StepTotals."""
        self._device_totals: list[tuple[int, Tensor]] = []
        """Index and value of totals that a device may still be computing; added when the totals are reduced."""
        self._last_nonempty = max((index for index, part in enumerate(microbatches) if part.num_samples), default=-1)
        rounds = len(microbatches) if self._reduces_every_backward else 1
        self._first_of_last_round = (rounds - 1) * len(self._context.parameters)
        self._is_round_finished, self._is_last_round, self._num_done_early = False, not self._reduces_every_backward, 0
        self._has_waited_for_weights = False
        self._has_averaged = False
        self.has_called_hooks = False
        """Whether the step has called the optimizer's step hooks."""
        self.done_early: set[Action] = set()
        """Actions that run within another one, and that the executor skips: updates in backward or in forward."""
        if self.deferred is not None:
            verbs, buckets = (Verb.UPDATE, Verb.GATHER), range(len(self._context.parameters))
            self.done_early = {Action(verb, 0, bucket) for verb in verbs for bucket in buckets}
            self.deferred.begin_step()
        self._num_ranks_with_grad: Sequence[float] | None = None
        self._squared_norms: Sequence[Tensor] | None = None
        self._loss_totals: list[tuple[int, Tensor]] = []
        self.bad_reason: str | None = None
        """Why the step is bad; the same on every rank."""
        self.overflowed = False
        self.totals: StepTotals | None = None
        self.grad_norm: float | None = None
        self._context.gradients.drop_grads()
        self._context.gradients.begin_step()
        self._context.gradients.is_enabled = True
        if self._context.local_sgd is not None:
            self._context.local_sgd.begin_step()

    def end_step(self) -> None:
        """End a step without an error: gradient buffers may be overwritten, unless deferred updates need them."""
        if self.has_called_hooks and self._context.step_hooks is not None:
            self._context.step_hooks.run_post_hooks()
        if self.deferred is None:
            self._context.transport.end_step()
        else:
            self._defer(self.deferred)
        if self._context.loss_scaler is not None and self.bad_reason is None:
            self._context.loss_scaler.update(overflowed=self.overflowed)
        if self._has_averaged and self._context.local_sgd is not None:
            self._context.local_sgd.finish_sync()
        self._context.edits.refresh_samples()

    def _defer(self, deferred: DeferredUpdates) -> None:
        """Leave the updates of this step to the next forward, with their arguments."""
        self._read_totals()
        self._wait_all()
        if self._is_skipped:
            self._context.gradients.drop_grads()
            self._context.transport.end_step()
            return
        self._context.gradients.detach_grads()
        self._context.transport.weights.signal_backward_done()
        self._update_args = UpdateArgs(self._grad_scale, self._num_ranks_with_grad, self._squared_norms)
        self._context.optimizer.set_options_frozen(frozen=True)
        # The bucket that backward completes last is mostly used first.
        deferred.defer(self._context.gradients.launch_order[::-1])

    def flush(self) -> None:
        """Run the updates that wait for the next forward. Collective."""
        if self.deferred is not None:
            self.deferred.flush()
            self._context.optimizer.set_options_frozen(frozen=False)
            self._context.edits.refresh_samples()

    @property
    def has_pending_updates(self) -> bool:
        """Whether updates wait for the next forward: this rank's, or those of ranks that share weights with it."""
        return self.deferred is not None and self.deferred.has_pending

    def _update_deferred(self, bucket: int) -> None:
        """Update a bucket with the gradient of the previous step."""
        with self.recorder.action(Action(Verb.UPDATE, 0, bucket)):
            self._context.transport.weights.wait_writable()
            self._context.gradients.restore_grads(bucket)
            self._run_optimizer(bucket, self._update_args)
            self._context.gradients.free_grads(bucket)
        if self._gathers_weights:
            with self.recorder.action(Action(Verb.GATHER, 0, bucket)):
                self.gather(bucket)

    def stop_listening(self) -> None:
        """After every step, failed or not: ignore the gradients of backwards outside of steps."""
        self._context.gradients.is_enabled = False

    @property
    def _device(self) -> torch.device:
        return self._context.parameters[0][0].device

    def _unsharded(self, kind: str) -> contextlib.AbstractContextManager[None]:
        """Inside, weights that rest split are unsharded when used. A rank that uses none takes part too."""
        params = self._context.sharded_params
        return contextlib.nullcontext() if params is None else params.phase(kind)

    def forward(self, index: int) -> None:
        if self.deferred is not None and self.deferred.has_pending:
            with self.deferred.in_forward():
                self._forward_unsharded(index)
            self._context.optimizer.set_options_frozen(frozen=False)
            return
        self._forward_unsharded(index)

    def _forward_unsharded(self, index: int) -> None:
        with self._unsharded("forward"):
            self._forward(index)

    def _forward(self, index: int) -> None:
        part = self._microbatches[index]
        if part.num_samples:
            loss = self._objective(self._model, part).loss
            self._losses[index] = loss
            self._counts.append(loss.count)
            self._loss_totals.append((index, loss.total.detach()))
            self._add_totals(loss, part)
        else:
            self._objective.dummy_forward(self._model)

    @property
    def _is_skipped(self) -> bool:
        return self.bad_reason is not None or self.overflowed

    def nonfinite_microbatches(self) -> list[range]:
        """The sample ranges of this rank's microbatches whose loss is not finite."""
        stops = list(itertools.accumulate(part.num_samples for part in self._microbatches))
        bad = [index for index, total in self._loss_totals if not math.isfinite(total.item())]
        return [range(stops[index] - self._microbatches[index].num_samples, stops[index]) for index in bad]

    def _add_totals(self, loss: Loss, part: Microbatch) -> None:
        """Add a microbatch to this rank's totals, without waiting for the device."""
        sums = [loss.total.detach(), loss.count, part.num_samples, part.num_tokens]
        values = [*sums, 0.0, 0.0, loss.other_count, loss.other_square]
        is_on_device = self._device.type != "cpu"
        for index, value in enumerate(values):
            if is_on_device and isinstance(value, Tensor):
                self._device_totals.append((index, value))
            else:
                self._host_totals[index] += float(value)

    def _local_totals(self) -> Tensor:
        """This rank's totals, float64 [8] on its device."""
        local = torch.tensor(self._host_totals, dtype=torch.float64, device=self._device)
        for index, value in self._device_totals:
            local[index] += value
        return local

    @property
    def _local_count(self) -> float:
        return float(sum(self._counts))

    def backward(self, index: int) -> None:
        if self.nominal_count is None:
            count = float(self._losses[index].count) if index in self._losses else 0.0
            self.nominal_count = max(1.0, self._all_reduce_count(count) * len(self._microbatches))
        if self._reduces_every_backward and index:
            assert isinstance(self._context.gradients, GradBuckets)  # split gradients are always in buckets
            self._context.gradients.begin_round()
            self._is_round_finished = False
        self._is_last_round = not self._reduces_every_backward or index == len(self._microbatches) - 1
        with self._unsharded("backward"):
            if index in self._losses:
                if index == self._last_nonempty or self._reduces_every_backward:
                    self._context.gradients.mark_last_backward()
                loss = self._losses.pop(index).total / self.nominal_count
                if not loss.requires_grad:
                    raise TaskError(_no_grad_problem())
                (loss if self._context.loss_scaler is None else loss * self._context.loss_scaler.value).backward()
                if self.deferred is not None and index == 0:
                    self.deferred.check_missed_accesses(self._context.gradients.first_reached)

    def measure(self, kind: int) -> None:
        world, transport = self._context.world, self._context.transport
        if kind == LOSS:
            world.scalars.all_reduce_async(LOSS, self._local_totals())
        elif kind == USED_PARAMS:
            self._finish_round()
            transport.scalars.all_reduce_async(
                USED_PARAMS, torch.tensor(self._context.gradients.reached, dtype=torch.float64)
            )
            self._num_ranks_with_grad = transport.scalars.wait(USED_PARAMS)
        elif kind == GRAD_NORM:
            self._finish_round()
            self._read_totals()
            self._wait_all()
            buckets = range(len(self._context.parameters))
            flats = list(itertools.chain(*map(self._context.gradients.local_grads, buckets)))
            # In two bytes each bucket's norm would be rounded, and in fp16 a norm above 65,504 would be infinite.
            dtypes = [torch.promote_types(flat.dtype, torch.float32) for flat in flats]
            norms = [torch.linalg.vector_norm(flat, dtype=dtype) for flat, dtype in zip(flats, dtypes, strict=True)]
            squares = torch.stack(norms).double().square().sum()
            if transport.grads.replica_index:
                squares = torch.zeros_like(squares)  # replica 0 adds the same shard
            if self._context.local_sgd is not None and not self._scales_before_update:
                squares *= self._grad_scale**2
            world.scalars.all_reduce_async(GRAD_NORM, squares.reshape(1))
            total = world.scalars.wait(GRAD_NORM)[0]
            if self._context.local_sgd is not None:
                self._apply_clip(squares.item() ** 0.5, global_norm=(total / transport.grads.size) ** 0.5)
                return
            norm = total**0.5 * (1.0 if self._scales_before_update else self._grad_scale)
            self._apply_clip(norm, global_norm=norm)
        elif kind == TRUST_NORMS:
            self._read_totals()
            self._wait_all()
            if not self._is_skipped:
                self._measure_trust_ratios()

    def _measure_trust_ratios(self) -> None:
        """Begin the layer-wise updates of all buckets: they need the norms of parameters that are split among ranks."""
        transport, slots = self._context.transport, [len(parameters) for parameters in self._context.parameters]
        local = [
            self._context.optimizer.begin_layerwise_update(
                bucket, used=self._used_slots(bucket, self._num_ranks_with_grad), factor=self._grad_scale
            )
            for bucket in range(len(slots))
        ]
        norms = torch.cat(local).flatten()
        # Only replica 0 adds the norms of a shard.
        is_replica = transport.grads.replica_index > 0
        transport.scalars.all_reduce_async(TRUST_NORMS, torch.zeros_like(norms) if is_replica else norms)
        total = torch.tensor(transport.scalars.wait(TRUST_NORMS), dtype=torch.float64, device=self._device)
        self._squared_norms = total.view(-1, 2).split(slots)

    def _apply_clip(self, norm: float, *, global_norm: float) -> None:
        """Clip. `norm` is of the gradient that this rank updates with, `global_norm` is the same on all ranks."""
        self.grad_norm = global_norm
        if self.bad_reason is None and not math.isfinite(global_norm):
            self.overflowed = self._context.loss_scaler is not None and self._context.loss_scaler.can_decrease
            if not self.overflowed:
                self.bad_reason = f"the gradient norm is {global_norm}"
        if self._clip is None:
            return
        # 1e-6 as in torch.nn.utils.clip_grad_norm_. In this order of arguments min() keeps a NaN.
        coefficient = min(self._clip / (norm + 1e-6), 1.0)
        if not self._scales_before_update:
            self._grad_scale *= coefficient
        elif coefficient != 1.0:
            self._context.transport.grads.scale_grads(coefficient)

    def reduce(self, index: int) -> None:
        # Hooks have launched the buckets that backward completed; finish_round launches the others, in program order.
        self._finish_round(last=index >= self._first_of_last_round)

    def _finish_round(self, *, last: bool = True) -> None:
        if not self._is_round_finished:
            if last and self._last_nonempty >= 0:
                self._context.gradients.check_all_reached()
            self._context.gradients.finish_round()
            self._is_round_finished = True

    def _wait_all(self) -> None:
        for bucket in range(len(self._context.parameters)):
            self._wait_bucket(bucket)

    def _wait_bucket(self, bucket: int) -> None:
        self._read_totals()
        self._context.transport.grads.wait_reduce(bucket, self._sum_factor)
        if self._context.local_sgd is None:
            self.recorder.instant(bucket, DONE_EVENT)

    def _read_totals(self) -> None:
        """Read the reduced totals; decide from them whether the step is bad, and compute the gradient scale."""
        if self.totals is not None:
            return
        self.totals = StepTotals(*self._context.world.scalars.wait(LOSS))
        if self.totals.num_mismatches:
            raise TaskError(self.batch_mismatch or batch_mismatch_problem(), where="the batch")
        if is_uneven(self.totals.count, self.totals.other_count, self.totals.other_square):
            raise TaskError(uneven_problem(self._objective.loss_names), where="the loss")
        if self.totals.count == 0:
            self.bad_reason = NO_ELEMENTS
        elif not math.isfinite(mean := self.totals.loss / self.totals.count):
            self.bad_reason = f"the loss is {mean}"
        assert self.nominal_count is not None
        count = self.totals.count if self._context.local_sgd is None else self._local_count
        # Without elements the gradient is zero: any scale will do.
        self._grad_scale = self.nominal_count / (count or self.nominal_count)
        if self._context.loss_scaler is not None:
            self._grad_scale /= self._context.loss_scaler.value

    @property
    def _sum_factor(self) -> float:
        """What every sum is multiplied by; the totals have been read."""
        return self._grad_scale if self._scales_before_update else 1.0

    def _known_factor(self) -> float | None:
        """The factor of the sums; None while a rank may still be adding to the totals."""
        if self.totals is None and not self._context.world.scalars.is_ready(LOSS):
            return None
        self._read_totals()
        return self._sum_factor

    def _update_early(self) -> None:
        """Within backward, after a launch: update the buckets that are reduced, in program order."""
        order, num_launched = self._context.gradients.launch_order, self._context.gradients.num_launched
        if self._is_last_round:
            # From now on other ranks of the host may write the bucket's weights, if they share them.
            self._context.edits.increment_version(order[num_launched - 1])
        while self._is_last_round and self._num_done_early < num_launched:
            bucket, factor = order[self._num_done_early], self._known_factor()
            if factor is None or not self._context.transport.grads.is_reduced(bucket, factor):
                return
            self._num_done_early += 1
            handlers = {Verb.UPDATE: self.update} | ({Verb.GATHER: self.gather} if self._gathers_weights else {})
            for verb, handler in handlers.items():
                action = Action(verb, 0, bucket)
                with self.recorder.action(action):
                    handler(bucket)
                self.done_early.add(action)

    def update_in_order(self, bucket: int) -> None:
        # With local steps this ends the backward. On a rank without samples that may have updated this bucket already.
        self._finish_round()
        if Action(Verb.UPDATE, 0, bucket) not in self.done_early:
            self.update(bucket)

    def update(self, bucket: int) -> None:
        self._read_totals()
        # Only this bucket: others may still be reduced.
        self._wait_bucket(bucket)
        if not self._is_skipped:
            self._update_bucket(bucket)
        self._context.gradients.free_grads(bucket)

    def _update_bucket(self, bucket: int) -> None:
        """Update a bucket that is reduced."""
        if self._updates_after_backward and not self._has_waited_for_weights:
            # Backward may read a weight after its gradient is complete, if the weight is also used without gradient.
            self._context.transport.weights.signal_backward_done()
            self._context.transport.weights.wait_writable()
            self._has_waited_for_weights = True
        if self._context.local_sgd is not None and not self._has_added_samples:
            assert self.totals is not None
            self._context.local_sgd.add_loss_counts(self._local_count, self.totals.count)
            self._has_added_samples = True
        if not self.has_called_hooks and self._context.step_hooks is not None and self._context.step_hooks.has_any_hook:
            self._call_pre_hooks(self._context.step_hooks)
        self._run_optimizer(bucket, UpdateArgs(self._grad_scale, self._num_ranks_with_grad, self._squared_norms))

    def _call_pre_hooks(self, hooks: StepHooks) -> None:
        """Before the first update of a step: hooks see all gradients as the update will use them."""
        self._wait_all()
        factor = 1.0 if self._scales_before_update else self._grad_scale
        self._num_ranks_with_grad = hooks.run_pre_hooks(
            self._context.transport.grads, self._num_ranks_with_grad, factor
        )
        self.has_called_hooks = True

    def _run_optimizer(self, bucket: int, update_args: UpdateArgs) -> None:
        squares = None if update_args.squared_norms is None else update_args.squared_norms[bucket]
        used = self._used_slots(bucket, update_args.num_ranks_with_grad)
        gradient = None if self._context.step_hooks is None else self._context.step_hooks.bucket_grads[bucket]
        self._context.optimizer.update(
            bucket, used=used, factor=update_args.grad_scale, squared_norms=squares, gradient=gradient
        )
        # So autograd refuses saved tensors of the old weights, instead of computing with the new ones.
        self._context.edits.increment_version(bucket)

    def gather(self, bucket: int) -> None:
        self._context.transport.weights.all_gather_async(bucket, self._context.weights[bucket])

    def push(self, bucket: int) -> None:
        assert self._context.local_sgd is not None
        self._context.local_sgd.push(bucket)

    def pull(self, bucket: int) -> None:
        assert self._context.local_sgd is not None
        self._context.local_sgd.pull(bucket)
        self._has_averaged = True
        self._context.edits.increment_version(bucket)

    def _used_slots(self, bucket: int, counts: Sequence[float] | None) -> Sequence[bool] | None:
        """Which slots of the bucket have a gradient on any rank; None: all."""
        if counts is None:
            return None
        first = self._offsets[bucket]
        return [bool(count) for count in counts[first : first + len(self._context.parameters[bucket])]]


def _no_grad_problem() -> Problem:
    need = "one that depends on trainable parameters through differentiable operations"
    attempt = "no .detach(), .item(), argmax or torch.no_grad() between parameters and loss"
    return Problem("a loss without a gradient", need, attempt)
