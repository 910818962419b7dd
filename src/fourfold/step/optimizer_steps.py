"""Optimizer steps: the steps of a wrapped optimizer, checked and counted whoever calls them; the loss of a closure.

direct step  the user, a GradScaler or a framework calls `step()` of the wrapped optimizer itself, not of its wrapper
closure      computes a loss and its gradients; some optimizers use the loss itself, for example in a line search
Law: a step changes weights only by what is the same on all ranks: mean gradients, and the mean of the losses.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from fourfold.parts.comm.reduce.protocol import WorldChannel
from fourfold.parts.torch_private import takes_step_hooks
from fourfold.step.batch_norm import FrozenBatchNorms
from fourfold.step.unreduced_grads import UnreducedGrads
from fourfold.words.errors import Problem, TaskError, TrainingError
from fourfold.words.program import LOSS


class OptimizerSteps:
    """The steps of one wrapped optimizer, through its wrapper or direct."""

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        unreduced: UnreducedGrads,
        frozen: FrozenBatchNorms,
        world: WorldChannel,
        *,
        num_ranks: int,
    ) -> None:
        self._optimizer, self._model, self._unreduced, self._frozen_norms = optimizer, model, unreduced, frozen
        self._world, self._num_ranks = world, num_ranks
        self.num_steps = 0
        """Steps done."""
        self.num_loads = 0
        """How often state has been loaded since the last `broadcast_state`."""
        self.is_in_join = False
        """Whether this is inside `join()`: ranks without data answer reductions only."""
        self._uses_loss = _uses_loss(optimizer)
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
        if self._uses_loss and self._num_ranks > 1 and loss is not None:
            loss = self._mean_loss(loss)
        self._depth = depth
        return loss

    def _check_step(self) -> None:
        if self._num_ranks > 1:
            self._unreduced.check(self._model)
        if problems := self._frozen_norms.problems():
            raise TaskError(problems, where="the model")

    def _mean_loss(self, loss: Any) -> Any:
        """The mean of all ranks' losses, the same bits on every rank. Collective."""
        kind = type(self._optimizer).__name__
        if self.is_in_join:
            need = "a loss on every rank, since a line search uses their mean; ranks without data have none"
            attempt = "equal numbers of batches and no join(), or an optimizer without a closure"
            raise TrainingError(Problem(f"{kind} with a closure, within join()", need, attempt), where="step()")
        if isinstance(loss, Tensor) and loss.numel() != 1:
            raise TrainingError(_scalar_loss_problem(f"a tensor of shape {list(loss.shape)}", kind), where="step()")
        try:
            value = float(loss.detach() if isinstance(loss, Tensor) else loss)
        except (TypeError, ValueError) as error:
            raise TrainingError(_scalar_loss_problem(f"a {type(loss).__name__}", kind), where="step()") from error
        self._world.calls.begin(f"the loss of a closure in step {self.num_steps + 1} of the optimizer")
        self._world.scalars.all_reduce_async(LOSS, torch.tensor([value], dtype=torch.float64))
        mean = self._world.scalars.wait(LOSS)[0] / self._num_ranks
        if not isinstance(loss, Tensor):
            return mean
        result = loss.clone()  # with its graph: a step may call backward itself
        result.data.fill_(mean)
        return result


def _scalar_loss_problem(got: str, kind: str) -> Problem:
    need = f"one number: {kind} uses its mean over the ranks"
    return Problem(f"a closure that returns {got}", need, "return loss")


def _uses_loss(optimizer: Optimizer) -> bool:
    """Whether steps may depend on the closure's loss. torch's optimizers other than LBFGS only return it."""
    known = type(optimizer).__module__.startswith(("torch.optim.", "fourfold."))
    return isinstance(optimizer, LBFGS) or not known
