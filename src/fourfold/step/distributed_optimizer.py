"""DistributedOptimizer: a plain loop, one wrapped optimizer; gradients are averaged while backward runs.

complete  when `backward()` returns, every `.grad` holds the mean over ranks
round     one backward that reduces, on all ranks; inside `join`, ranks without data answer it with zeros
Law: the wrapped optimizer does on every rank what it would have done alone on the mean gradient.
"""

import contextlib
import dataclasses
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from fourfold.parts.comm import transports
from fourfold.parts.data import grad_buckets
from fourfold.parts.data.grad_hooks import register_last_hook
from fourfold.parts.optim.flat_optimizer import group_indices
from fourfold.parts.optim.option_checks import check_options
from fourfold.parts.optim.option_tracker import OptionTracker
from fourfold.parts.torch_private import NO_BACKWARD_ID, call_after_backward, current_backward_id
from fourfold.plan.data import effective_bucket_bytes, grad_buffer_indices, make_buckets
from fourfold.plan.intervals import DRIFT_CHECK, is_due
from fourfold.plan.plan import Plan
from fourfold.step import replica_drift
from fourfold.step.argument_checks import check_join_states, check_wrapper_arguments
from fourfold.step.batch_norm import FrozenBatchNorms
from fourfold.step.broadcast_tree import broadcast_tree
from fourfold.step.duplicate_batches import DuplicateBatches, InputFingerprints
from fourfold.step.memory_formats import MemoryFormats, shape_and_strides
from fourfold.step.model_checks import check_plan_on_ranks
from fourfold.step.optimizer_steps import OptimizerSteps
from fourfold.step.rank_agreement import check_same_on_ranks
from fourfold.step.unreduced_grads import ReducedGrad, UnreducedGrads
from fourfold.step.weights import trainable_parameters
from fourfold.words.errors import OptimizerError, PlanError, Problem, TrainingError
from fourfold.words.program import LOSS, USED_PARAMS

PLAN_FIELDS = ("dp", "bucket_bytes", "unused", "batch_norm", "transport")  # of the plan, what is used here
WRAPPER_HINT = (
    "the same seeds, hooks, edits and loaded state on every rank; optimizer.broadcast() brings one rank's to all"
)
# The kind of scalar that counts the ranks with data. Losses are the loop's own here, and who reads this sum knows
# that all ranks are in the same call.
ACTIVE_RANKS = LOSS
_owners: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""By parameter: a weak reference to the DistributedOptimizer that reduces its gradient."""


@dataclasses.dataclass
class _JoinState:
    """A loop with unequal numbers of batches: what gradients are divided by, and the rounds this rank had data in."""

    divides_by_world_size: bool
    num_rounds: int = 0
    has_data: bool = True


class DistributedOptimizer(torch.optim.Optimizer):
    """Wrap any torch optimizer of `model`'s parameters; the loop around it stays as it is. Collective.

    Joins the process group that is there, or the one the launcher's environment speaks of. Rank 0's weights and
    buffers are broadcast first. Every rank must call `backward()` equally often outside `no_sync()`, and each of
    these must reach at least one trainable parameter. Of the plan `dp`, `bucket_bytes`, `unused`, `batch_norm` and
    `transport` are used; any other field must be at its default. Raises PlanError or OptimizerError for what cannot
    be carried out, TrainingError from `backward()` where a parameter got no gradient and the plan does not allow it,
    TaskError from `backward()` where all ranks call the model, for training, with the same inputs, three different ones
    in a row, unless `same_batches="allow"`.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: nn.Module,
        plan: Plan | None = None,
        *,
        same_batches: str = "refuse",
        communicator: transports.Communicator | None = None,
        drift_check: int = DRIFT_CHECK,
    ) -> None:
        check_wrapper_arguments(optimizer=optimizer, model=model, plan=plan)
        if isinstance(optimizer, DistributedOptimizer):
            raise OptimizerError(Problem("a DistributedOptimizer, wrapped again", "the torch optimizer itself, once"))
        check_options(optimizer)
        # The state, the groups and the hooks are the wrapped optimizer's: see __getattr__.
        self._optimizer, self._model, self._communicator = (
            optimizer,
            model,
            communicator or transports.init_communicator(),
        )
        plan = plan or Plan(dp=self._communicator.size)
        check_plan_on_ranks(model, plan, self._communicator)
        _check_plan_fields(plan)
        self._plan, self._frozen_norms = plan, FrozenBatchNorms(model, plan)
        strangers = {id(p) for group in optimizer.param_groups for p in group["params"]}
        strangers -= {id(p) for p in model.parameters()}
        if strangers:
            got = f"{len(strangers)} parameters that are not the model's"
            raise OptimizerError(Problem(got, "an optimizer of model.parameters()"))
        trainable = trainable_parameters(model)
        places = {p.device.type for p in trainable.values()}
        if places != {self._communicator.device.type}:
            got = f"parameters on {', '.join(sorted(places))}, ranks on {self._communicator.device.type}"
            raise OptimizerError(
                Problem(got, "one kind of device", f'model.to("{self._communicator.device.type}") first')
            )
        shapes = {name: shape_and_strides(p) for name, p in trainable.items()}
        self._duplicate_batches = DuplicateBatches(
            same_batches, num_data_ranks=plan.dp, is_log_rank=self._communicator.rank == 0
        )
        grouped = grad_buckets.param_specs(
            trainable, dict.fromkeys(trainable, -1) | group_indices(optimizer, trainable)
        )
        options = {"same_batches": same_batches, "drift_check": drift_check}
        check_same_on_ranks(self._communicator, grouped, shapes, plan=plan, options=options, optimizer=optimizer)
        self._input_fingerprints = InputFingerprints(model if self._duplicate_batches.is_active else None)
        self._options = OptionTracker(optimizer)
        self._drift_checker = replica_drift.DriftChecker(self._communicator, drift_check, attempt=WRAPPER_HINT)
        self._last_compared_step, self._num_loads_seen = 0, 0
        self._next_compare_step: float = 1  # steps
        self._broadcast_model(src=0)
        self._is_sync_enabled, self._backward_id = True, NO_BACKWARD_ID
        self._num_backwards = 0
        self._join_state: _JoinState | None = None
        self._is_replaced = False
        # Before those that take gradients: a round begins before its first gradient is taken. Hooks of tensors would
        # be called by torch.autograd.grad too, which leaves nothing to reduce.
        for parameter in trainable.values():
            register_last_hook(parameter, self._on_backward_begin)
        self._connect(trainable, plan)
        self._claim_parameters(trainable)
        self._is_built = True

    def _claim_parameters(self, trainable: dict[str, nn.Parameter]) -> None:
        """A parameter belongs to its last DistributedOptimizer alone: earlier ones would take its gradient first."""
        for parameter in trainable.values():
            owner = _owners.get(parameter)
            earlier = None if owner is None else owner()
            if earlier is not None:
                earlier._mark_replaced()
            _owners[parameter] = weakref.ref(self)

    def _mark_replaced(self) -> None:
        """Another one has taken over."""
        self._is_replaced, self._gradients.is_enabled = True, False
        self._steps.remove_hooks()
        self._input_fingerprints.remove_hook()

    def _connect(self, trainable: dict[str, nn.Parameter], plan: Plan) -> None:
        specs = grad_buckets.param_specs(trainable, {})
        buckets = make_buckets(
            specs,
            bucket_bytes=effective_bucket_bytes(
                specs, plan.bucket_bytes, is_inter_host=self._communicator.num_hosts > 1
            ),
        )
        request = transports.TransportSpec(
            sizes=tuple(bucket.size for bucket in buckets),
            dtypes=tuple(grad_buckets.bucket_dtype(bucket) for bucket in buckets),
            buffer_indices=grad_buffer_indices(len(buckets), is_cyclic=False),
            num_scalars=max(8, len(trainable)),
        )
        self._allow_unused = plan.unused == "allow"
        self._transport, self.transport_name = transports.make_transport(
            self._communicator, request, choice=plan.transport
        )
        self._gradients = grad_buckets.GradBuckets(trainable, buckets, self._transport, allow_unused=self._allow_unused)
        self._gradients.mark_last_backward()
        self._gradients.is_enabled = True
        slots = [(slot.name, self._transport.grad_buffers[bucket.index]) for bucket in buckets for slot in bucket.slots]
        self._parameters = [trainable[name] for name, _ in slots]
        self._num_buckets = len(buckets)
        reduced = [ReducedGrad(name, trainable[name], slot) for name, slot in slots]
        self._memory_formats = MemoryFormats(trainable, self._optimizer)
        self._unreduced = UnreducedGrads(reduced, self._gradients.views, self._optimizer)
        self._steps = OptimizerSteps(
            self._optimizer,
            self._model,
            self._unreduced,
            self._frozen_norms,
            self._transport,
            num_ranks=self._communicator.size,
        )

    def _on_backward_begin(self, _: Tensor) -> None:
        """Ask autograd, once a backward, to call `_finish` when it has ended."""
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
            got = "a backward after one that ended with an error, or within another one"
            raise TrainingError(Problem(got, "ranks that agree on what has been summed", "a new DistributedOptimizer"))
        self._backward_id = backward
        self._begin_round(has_data=True)
        self._gradients.copy_referenced_views()
        call_after_backward(self._on_backward_end)

    @torch.no_grad()
    def _on_backward_end(self) -> None:
        """Every `.grad` becomes the mean over ranks; it lies in this rank's slot."""
        try:
            self._gradients.store_leftover_grads()
            self._gradients.check_all_reached()
            self._gradients.finish_round()
            used = self._reduce(self._count_active_ranks())
            self._assign_grads(used)
            self._unreduced.mark_reduced(used)
            self._end_round()
            self._backward_id = NO_BACKWARD_ID
        finally:
            self._gradients.begin_step()
            self._gradients.mark_last_backward()
        if self._join_state is not None:
            self._join_state.num_rounds += 1
        self._compare_batches()

    def _assign_grads(self, used: Sequence[float]) -> None:
        """Each `.grad` is its slot; None where no rank has a gradient."""
        if self._memory_formats.uses_memory_order:
            self._memory_formats.check_unchanged()
        try:
            for parameter, view, count in zip(self._parameters, self._gradients.views, used, strict=True):
                parameter.grad = view if count else None
        except RuntimeError:  # torch refuses a `.grad` of another dtype or device
            self._memory_formats.check_unchanged()
            raise

    def _compare_batches(self) -> None:
        """Raise TaskError, on every rank, where all ranks train on the same batches. Collective, after each round."""
        if not self._duplicate_batches.is_active:
            return
        try:
            self._duplicate_batches.compare(self._communicator.all_gather_json(self._input_fingerprints.pop()))
        finally:
            if not self._duplicate_batches.is_active:
                self._input_fingerprints.remove_hook()

    def _begin_round(self, *, has_data: bool) -> None:
        self._num_backwards += 1
        self._steps.begin_round()
        if self._join_state is None:
            loads = f" and {self._steps.num_loads} × load_state_dict" if self._steps.num_loads else ""
            call = f"backward {self._num_backwards} after {self._steps.num_steps} steps of the optimizer{loads}"
            self._transport.begin_call(transports.with_options(call, self._options.text()))
        else:
            self._transport.begin_call(f"backward {self._num_backwards}, within join()")
            mark = float(self._options.short_digest())
            values = [1.0, mark, mark * mark] if has_data else [0.0] * 3
            self._join_state.has_data = has_data
            self._transport.all_reduce_scalars_async(ACTIVE_RANKS, torch.tensor(values, dtype=torch.float64))

    def _count_active_ranks(self) -> int:
        """How many ranks have data in this round. Raises DivergenceError where ranks are not in the same one."""
        if self._join_state is None:
            self._transport.check_same_call()
            self._check_drift()
            return self._communicator.size
        active, marks, squares = map(round, self._transport.wait_scalars(ACTIVE_RANKS))
        if active * squares != marks * marks:  # by Cauchy and Schwarz, they are the same exactly where all marks are
            self._raise_options_differ(self._join_state)
        return active

    def _raise_options_differ(self, joining: _JoinState) -> NoReturn:
        """Name the options that differ between ranks with data. Collective."""
        call, everyone = (
            f"backward {self._num_backwards}, within join()",
            self._communicator.all_gather_json(self._options.text() if joining.has_data else None),
        )
        calls = {rank: transports.with_options(call, text) for rank, text in enumerate(everyone) if text is not None}
        raise transports.divergence_error(
            calls, attempt="join(states=[scheduler]), after which all ranks have the same"
        )

    def _check_drift(self) -> None:
        """In the first backward after the first step, after one that uses loaded state, and after every so many.

        Then all ranks are known to have done as many steps. What is wrong from the start, such as noise that each rank
        draws for itself, is found before it has cost a run.
        """
        count = self._steps.num_steps
        if self._num_loads_seen != self._steps.num_loads:
            self._num_loads_seen, self._next_compare_step = self._steps.num_loads, count + 1
        is_wanted = count >= self._next_compare_step or is_due(count, self._drift_checker.every, 1)
        if self._drift_checker.every and count > self._last_compared_step and is_wanted:
            self._last_compared_step, self._next_compare_step = count, math.inf
            self._compare_weights()

    def check_drift(self) -> None:
        """Compare the ranks' weights now, as `drift_check` does every so many steps. Collective.

        Nothing else does after the last step. Raises DivergenceError, on every rank, where they differ in a bit.
        """
        self._check_not_replaced()
        self._transport.begin_call(f"check_drift() after {self._steps.num_steps} steps of the optimizer")
        self._transport.check_same_call()
        self._compare_weights()

    def _compare_weights(self) -> None:
        held = list(replica_drift.replicated_tensors(self._model, self._plan))
        self._drift_checker.compare(
            held, f"after step {self._steps.num_steps}", update_kind=self._options.implementation()
        )

    def _reduce(self, active: int) -> list[float]:
        """Slots become the mean over ranks; how many ranks have each gradient."""
        used = self._count_used()
        for bucket in range(self._num_buckets):
            self._transport.wait_reduce(bucket)
        by_all = self._join_state is None or self._join_state.divides_by_world_size
        self._transport.scale_grads(1.0 / (self._communicator.size if by_all else active))
        for bucket in range(self._num_buckets):
            self._transport.all_gather_grads(bucket)
        return used

    def _end_round(self) -> None:
        self._transport.end_step()
        # Autograd may add to `.grad` in place, and the optimizer change it: nobody else may still read it then.
        for bucket in range(self._num_buckets):
            self._transport.acquire_buffer(bucket)

    def _count_used(self) -> list[float]:
        if not self._allow_unused:
            return [1.0] * len(self._parameters)
        self._transport.all_reduce_scalars_async(
            USED_PARAMS, torch.tensor(self._gradients.reached, dtype=torch.float64)
        )
        return self._transport.wait_scalars(USED_PARAMS)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, gradients add up on this rank alone; the next backward outside sums what all have gathered."""
        self._check_not_replaced()
        self._is_sync_enabled = self._gradients.is_enabled = False
        try:
            yield
        finally:
            self._is_sync_enabled = True
            self._gradients.is_enabled = not self._is_replaced

    @contextlib.contextmanager
    def join(self, *, divide_by_initial_world_size: bool = True, states: Sequence[Any] = ()) -> Iterator[None]:
        """Around a loop whose ranks have unequal numbers of batches, or none. Collective: every rank enters it.

        A rank that leaves the block answers the others' reductions with zeros until all have left. A gradient is the
        sum over the ranks that still have data, divided by the number of all ranks, so that every sample weighs what
        it did before; or, with `divide_by_initial_world_size=False`, by the number of those that have data. The names
        and the meaning are those of DDP's `join`. At the end all ranks get weights, buffers and optimizer state of
        the one that was at it longest, and every `.grad` is None. So they do of `states`: schedulers, a GradScaler and
        whatever else has `state_dict()` and counts the steps of its own rank.

        Inside, ranks may not meet in other ways: those that have left do not come. What a rank has gathered under
        `no_sync()` and not yet reduced when it leaves is lost. One scalar more travels with each reduction.
        """
        self._check_not_replaced()
        check_join_states(states)
        if self._join_state is not None:
            raise TrainingError(Problem("join() within join()", "one around the whole loop"))
        joining = self._join_state = _JoinState(divides_by_world_size=divide_by_initial_world_size)
        self._steps.is_in_join = True
        try:
            yield
            with torch.no_grad():
                while self._shadow_round():
                    pass
        finally:
            self._join_state = None
            self._steps.is_in_join = False
        rounds, steps = zip(
            *self._communicator.all_gather_json([joining.num_rounds, self._steps.num_steps]), strict=True
        )
        self._steps.num_steps = max(steps)
        for parameter in self._parameters:
            parameter.grad = None
        if len(set(rounds)) > 1:
            source = rounds.index(max(rounds))
            told = self.broadcast_state([each.state_dict() for each in states], src=source)
            if self._communicator.rank != source:
                for each, state in zip(states, told, strict=True):
                    each.load_state_dict(state)

    def _shadow_round(self) -> bool:
        """Add nothing to a round of the others; False where nobody has data left."""
        self._begin_round(has_data=False)
        active = self._count_active_ranks()
        if not active:
            return False
        self._gradients.finish_round()
        self._reduce(active)
        self._end_round()
        self._gradients.begin_step()
        self._gradients.mark_last_backward()
        self._compare_batches()
        return True

    def broadcast_state(self, value: Any = None, *, src: int = 0) -> Any:
        """Rank `source`'s weights, buffers and optimizer state on every rank; returns its `value`. Collective.

        So a checkpoint need be read by one rank only. `value` is whatever else all should know, such as the epoch:
        dicts, lists, tuples, numbers, texts, None and tensors. Raises TrainingError for anything else.
        """
        self._broadcast_model(src=src)
        told = broadcast_tree(self._communicator, [self._optimizer.state_dict(), value], src=src)
        if self._communicator.rank != src:
            self._optimizer.load_state_dict(told[0])
        self._steps.num_loads = self._num_loads_seen = 0
        return told[1]

    def _broadcast_model(self, *, src: int) -> None:
        for tensor in (*self._model.parameters(), *self._model.buffers()):
            self._communicator.broadcast(tensor.data, src)
        torch.autograd.graph.increment_version(list(self._model.parameters()))

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale `.grad` so that the global norm is at most `max_norm`; returns the norm before. No communication."""
        return nn.utils.clip_grad_norm_(self._parameters, max_norm)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self._optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:  # type: ignore[override]
        self._optimizer.param_groups = groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self._optimizer.state

    @state.setter
    def state(self, state: Any) -> None:  # type: ignore[override]
        self._optimizer.state = state

    def step(self, closure: Callable[..., Any] | None = None, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """The wrapped optimizer's step, on mean gradients. A `closure` runs backward itself, or not at all.

        An optimizer that may step by the loss that a closure returns (LBFGS, and all that are not torch's) gets its
        mean over ranks; then `step` is collective. `args` and `kwargs` are the wrapped optimizer's own.
        Raises TrainingError, before a weight moves, for a `.grad` that no reduction has seen since the last step: one
        that was set by hand, or left by backwards within `no_sync()` alone; TaskError for batch normalizations that
        were in evaluation mode when this was made, and are not now. `step()` of the wrapped optimizer itself does the
        same.
        """
        self._check_not_replaced()
        return self._steps.step(closure, args, kwargs)

    def _check_not_replaced(self) -> None:
        if self._is_replaced:
            got = "a DistributedOptimizer some of whose parameters a newer one has taken over"
            attempt = "the newest, or one torch optimizer that calls several, wrapped once"
            raise TrainingError(Problem(got, "one DistributedOptimizer for a parameter", attempt))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: the buckets are made. Raises OptimizerError."""
        raise OptimizerError(Problem("add_param_group", "all parameters from the start", "a new DistributedOptimizer"))

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return self._optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._optimizer.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_optimizer"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        """What is not the wrapper's own, such as the scale that a GradScaler gives, is the wrapped optimizer's."""
        if self._is_wrapper_attribute(name):
            super().__setattr__(name, value)
        else:
            setattr(self._optimizer, name, value)

    def __delattr__(self, name: str) -> None:
        if self._is_wrapper_attribute(name):
            super().__delattr__(name)
        else:
            delattr(self._optimizer, name)

    def _is_wrapper_attribute(self, name: str) -> bool:
        own = self.__dict__
        return name in own or "_is_built" not in own or hasattr(type(self), name)

    def __reduce_ex__(self, _: Any) -> NoReturn:
        """Refused: copies and pickles. Raises OptimizerError."""
        need = "the one that reduces the gradients of its model, with the other ranks"
        attempt = "optimizer.state_dict(), and load_state_dict() of a new one"
        raise OptimizerError(Problem("a copy or a pickle of a DistributedOptimizer", need, attempt))


def _check_plan_fields(plan: Plan) -> None:
    """Raise PlanError for all that a plan asks for and a wrapped optimizer does not do."""
    given = {field.name: getattr(plan, field.name) for field in dataclasses.fields(plan)}
    asked = {name: value for name, value in given.items() if name not in PLAN_FIELDS and value != getattr(Plan(), name)}
    need = f"with DistributedOptimizer nothing but {', '.join(PLAN_FIELDS)}"
    attempts = {"microbatches": "no_sync()"}
    problems = [Problem(f"{n} = {v}", need, attempts.get(n, "ff.parallelize")) for n, v in asked.items()]
    if problems:
        raise PlanError(problems, where="the plan")
