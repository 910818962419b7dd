"""Optimizer steps: the steps of a wrapped optimizer, checked and counted whoever calls them.

direct step  the user, a GradScaler or a framework calls `step()` of the wrapped optimizer itself, not of its wrapper
closure      computes a loss and its gradients; some optimizers use the loss itself, for example in a line search
round        one backward that reduces, on all ranks
unreduced    a gradient that was set by hand, or left by a backward within `no_sync()`
late         a parameter that is in no bucket: frozen when the buckets were made, or given to the optimizer later
Law: a step changes weights only by what is the same on all ranks: mean gradients, and the mean of the losses, the same
bits on each. The check is local, without communication; a change of a reduced gradient on one rank only is not found.
Law: what is compared is compared on every rank in the same round, so that ranks that differ raise together, and none
waits for another.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from fourfold.comm.communicator import Communicator
from fourfold.comm.reduce.scalars import WorldChannel
from fourfold.optim.option_tracker import OptionTracker
from fourfold.proof.digests.batches import DuplicateBatches, InputDigests
from fourfold.proof.digests.weights import DriftChecker, DriftSchedule, replicated_tensors
from fourfold.torch_kit.torch_private import takes_step_hooks, version_of
from fourfold.words.errors import Problem, TrainingError
from fourfold.words.program import LOSS

# ---- wrapper checks -------------------------------------------------------------------------------------------------


class WrapperChecks:
    """The comparisons of one wrapped optimizer, on one rank."""

    def __init__(
        self,
        model: nn.Module,
        options: OptionTracker,
        data_ranks: Communicator,
        duplicate_batches: DuplicateBatches,
        drift_checker: DriftChecker,
    ) -> None:
        self._model, self._data_ranks = model, data_ranks
        self._duplicate_batches = duplicate_batches
        self._inputs = InputDigests(model if duplicate_batches.num_left else nn.Module())
        self.options = options
        """The options of the optimizer's groups, which the call of every round carries."""
        self._drift_checker, self._drift_schedule = drift_checker, DriftSchedule(drift_checker.every)

    def compare_batches(self) -> None:
        """Raise TaskError, on every rank, where all data ranks train on the same batches. Collective."""
        if not self._duplicate_batches.num_left:
            return
        try:
            self._duplicate_batches.compare(self._data_ranks.all_gather_json(self._inputs.pop()))
        finally:
            if not self._duplicate_batches.num_left:
                self._inputs.remove_hook()

    def compare_weights_if_due(self, num_steps: int, num_loads: int) -> None:
        """Compare the weights if `drift_check` says so after so many steps and loads of optimizer state. Collective."""
        if self._drift_schedule.is_due(num_steps, num_loads):
            self.compare_weights(num_steps)

    def compare_weights(self, num_steps: int) -> None:
        """Raise DivergenceError, on every rank, if the weights differ after so many steps. Collective."""
        tensors = replicated_tensors(self._model)
        self._drift_checker.compare(tensors, f"after step {num_steps}", update_kind=self.options.implementation())

    def restart_counting_loads(self) -> None:
        """All ranks have one rank's state: loads of optimizer state are counted from 0 again."""
        self._drift_schedule.num_loads = 0

    def remove_hook(self) -> None:
        """Stop looking at the model's inputs."""
        self._inputs.remove_hook()


# ---- closure losses -------------------------------------------------------------------------------------------------


class OwnLosses:
    """A step gets the loss of its own rank's closure: the optimizer only returns it, or there is one rank."""

    def share(self, loss: Any, step: int) -> Any:
        """What step number `step` gets where this rank's closure has returned `loss`. Collective, if it is a mean."""
        return loss

    def within_join(self) -> "OwnLosses":
        """What takes the place of this in a `join` block: ranks without data answer reductions only."""
        return self


class MeanLosses(OwnLosses):
    """A step gets the mean over the ranks; `kind` names the optimizer."""

    def __init__(self, world: WorldChannel, num_ranks: int, kind: str) -> None:
        self._world, self._num_ranks, self._kind = world, num_ranks, kind

    def share(self, loss: Any, step: int) -> Any:
        if isinstance(loss, Tensor) and loss.numel() != 1:
            raise self._refusal(f"a tensor of shape {list(loss.shape)}")
        try:
            value = float(loss.detach() if isinstance(loss, Tensor) else loss)
        except (TypeError, ValueError) as error:
            raise self._refusal(f"a {type(loss).__name__}") from error
        self._world.calls.begin(f"the loss of a closure in step {step} of the optimizer")
        self._world.scalars.all_reduce_async(LOSS, torch.tensor([value], dtype=torch.float64))
        mean = self._world.scalars.wait(LOSS)[0] / self._num_ranks
        if not isinstance(loss, Tensor):
            return mean
        result = loss.clone()  # with its graph: a step may call backward itself
        result.data.fill_(mean)
        return result

    def _refusal(self, got: str) -> TrainingError:
        need = f"one number: {self._kind} uses its mean over the ranks"
        return TrainingError(Problem(f"a closure that returns {got}", need, "return loss"), where="step()")

    def within_join(self) -> OwnLosses:
        return NoLosses(self._kind)


class NoLosses(OwnLosses):
    """In a `join` block there is no mean."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def share(self, loss: Any, step: int) -> Any:
        need = "a loss on every rank, since a line search uses their mean; ranks without data have none"
        attempt = "equal numbers of batches and no join(), or an optimizer without a closure"
        raise TrainingError(Problem(f"{self._kind} with a closure, within join()", need, attempt), where="step()")


def uses_loss(optimizer: Optimizer) -> bool:
    """Whether steps may depend on the closure's loss. torch's optimizers other than LBFGS only return it."""
    known = type(optimizer).__module__.startswith(("torch.optim.", "fourfold."))
    return isinstance(optimizer, LBFGS) or not known


# ---- unreduced gradients --------------------------------------------------------------------------------------------


MAX_NAMES = 3  # in a message


class ReducedGrad(NamedTuple):
    """A parameter whose gradient is reduced, and the buffer that holds it after a reduction."""

    name: str
    parameter: nn.Parameter
    slot: Tensor


class UnreducedGrads:
    """Tracks which gradients of a rank have not been reduced since the last step."""

    def __init__(
        self, reduced: Sequence[ReducedGrad], views: Sequence[Tensor], optimizer: Optimizer, model: nn.Module
    ) -> None:
        """`views`: the `.grad` of each parameter after a reduction. The list may change later."""
        self._reduced, self._views, self._optimizer, self._model = reduced, views, optimizer, model
        self._known_ids = {id(each.parameter) for each in reduced}
        self._slots = list({id(each.slot): each.slot for each in reduced}.values())
        self._all = range(len(reduced))
        self._maybe_unreduced: Sequence[int] = self._all
        # Autograd and the user may write into a gradient that the last step has used: that changes the slot's version.
        self._versions: dict[int, int] = {}

    def mark_touched(self) -> None:
        """A backward without reduction has added to gradients."""
        self._maybe_unreduced, self._versions = self._all, {}

    def mark_reduced(self, used: Sequence[float]) -> None:
        """A reduction has ended. `used`: on how many ranks each parameter has a gradient."""
        self._maybe_unreduced = [] if all(used) else [index for index in self._maybe_unreduced if not used[index]]

    def mark_stepped(self) -> None:
        """The optimizer has used what was in `.grad`."""
        self._maybe_unreduced = self._all
        self._versions = {id(slot): version_of(slot) for slot in self._slots}

    def check(self) -> None:
        """Raise TrainingError naming the parameters with an unreduced gradient."""
        not_averaged = "has not been averaged over the ranks since the last step"
        need = "the mean gradient: with different gradients the weights of the ranks would diverge"
        problems = []
        unreduced = [self._reduced[index].name for index in self._maybe_unreduced if self._is_unreduced(index)]
        if unreduced:
            attempt = "loss.backward() outside no_sync(), and edits of .grad only after it"
            problems.append(Problem(f".grad of {_name_list(unreduced)} {not_averaged}", need, attempt))
        # The present groups: parameters may have been added since the build.
        groups = self._optimizer.param_groups
        late = [p for group in groups for p in group["params"] if id(p) not in self._known_ids and _is_nonzero(p.grad)]
        if late:
            names = {id(parameter): name for name, parameter in self._model.named_parameters()}
            shown = _name_list([names.get(id(p), "a parameter without a name") for p in late])
            got = f".grad of {shown}, frozen when DistributedOptimizer was built, or not the model's, {not_averaged}"
            attempt = "requires_grad_(True) before DistributedOptimizer(…), or a new one around a new optimizer"
            problems.append(Problem(got, need, attempt))
        if problems:
            raise TrainingError(problems, where="step()")

    def _is_unreduced(self, index: int) -> bool:
        reduced = self._reduced[index]
        gradient = reduced.parameter.grad
        # The gradient of the last step, unchanged: a second step with it is the same on all ranks.
        is_unchanged = gradient is self._views[index] and self._versions.get(id(reduced.slot)) == version_of(
            reduced.slot
        )
        return not is_unchanged and _is_nonzero(gradient)


@torch.no_grad()
def _is_nonzero(gradient: Tensor | None) -> bool:
    """Whether there is a gradient with a nonzero element; zeros are harmless. A sparse gradient counts as nonzero."""
    return gradient is not None and (gradient.layout is not torch.strided or bool(gradient.any()))


def _name_list(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + more


# ---- optimizer steps ------------------------------------------------------------------------------------------------


class OptimizerSteps:
    """The steps of one wrapped optimizer, through its wrapper or direct."""

    def __init__(
        self,
        optimizer: Optimizer,
        unreduced: UnreducedGrads,
        checks: Sequence[Callable[[], None]],
        losses: OwnLosses,
    ) -> None:
        """`checks`: each raises TaskError or TrainingError if a step must not be made."""
        self._optimizer, self._unreduced, self._checks = optimizer, unreduced, checks
        self.losses = losses
        """Of closures; others within `join()`."""
        self.num_steps = 0
        """Steps done."""
        self.num_loads = 0
        """How often state has been loaded since the last `broadcast_state`."""
        self._is_through_wrapper = False
        # Nested direct steps: a step may call the step of its parent class, which calls the same hooks again.
        self._depth = 0
        # An optimizer that does not call Optimizer.__init__ has no hooks: then only steps of the wrapper are checked.
        self._handles = []
        if takes_step_hooks(optimizer):
            self._handles = [
                optimizer.register_step_pre_hook(self._on_pre_step),
                optimizer.register_step_post_hook(self._on_post_step),
                optimizer.register_load_state_dict_post_hook(self._on_load),
            ]

    def remove_hooks(self) -> None:
        """Stop checking: another wrapper has taken over the parameters."""
        for handle in self._handles:
            handle.remove()

    def step(self, closure: Any, args: Any, kwargs: Any) -> Any:
        """One step through the wrapper."""
        self._is_through_wrapper = True
        try:
            if closure is None:
                self._check_step()
                result = self._optimizer.step(*args, **kwargs)
            else:
                result = self._optimizer.step(self._wrap_closure(closure), *args, **kwargs)
        finally:
            self._is_through_wrapper = False
        self._count_step()
        return result

    def begin_round(self) -> None:
        """A backward begins. Inside a step only a closure runs one; any other step that has not ended has failed."""
        self._depth = 0

    def _on_pre_step(self, _: Optimizer, args: Any, kwargs: Any) -> Any:
        if self._is_through_wrapper:
            return None
        if self._depth == 0:
            if "closure" in kwargs:
                kwargs = {**kwargs, "closure": self._wrap_closure(kwargs["closure"])}
            elif len(args) > 1:
                args = (args[0], self._wrap_closure(args[1]), *args[2:])
            else:
                self._check_step()
        self._depth += 1
        return args, kwargs

    def _on_post_step(self, *_: Any) -> None:
        if self._is_through_wrapper:
            return
        self._depth = max(0, self._depth - 1)
        if self._depth == 0:
            self._count_step()

    def _on_load(self, _: Optimizer) -> None:
        self.num_loads += 1

    def _count_step(self) -> None:
        self._unreduced.mark_stepped()
        self.num_steps += 1

    def _wrap_closure(self, closure: Any) -> Any:
        """The closure with a check of `.grad` after it. If it is no closure, check now."""
        if callable(closure) and not isinstance(closure, nn.Module):  # the first argument of a step may be anything
            return functools.partial(self._run_closure, closure)
        self._check_step()
        return closure

    def _run_closure(self, closure: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        depth, self._depth = self._depth, 0  # stays 0 if the closure raises
        loss = closure(*args, **kwargs)
        self._check_step()
        if loss is not None:
            loss = self.losses.share(loss, self.num_steps + 1)
        self._depth = depth
        return loss

    def _check_step(self) -> None:
        for check in self._checks:
            check()
