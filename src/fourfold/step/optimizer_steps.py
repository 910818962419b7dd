"""Steps of a wrapped optimizer: checked and counted, whoever calls them; and the loss of a closure.

past the wrapper  the user, a GradScaler or a framework calls `step()` of the wrapped optimizer itself
closure           computes a loss and its gradients; some optimizers step by the loss itself, as a line search does
Law: a step moves weights only by what all ranks have alike: mean gradients, and the mean of the losses.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from fourfold.parts.comm.reduce.protocol import Transport
from fourfold.parts.torch_private import takes_step_hooks
from fourfold.step.batch_norm import FrozenBatchNorms
from fourfold.step.unreduced_grads import UnreducedGrads
from fourfold.words.errors import Problem, TaskError, TrainingError
from fourfold.words.program import LOSS


class OptimizerSteps:
    """The steps of one wrapped optimizer, through its wrapper or past it."""

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        unreduced: UnreducedGrads,
        frozen: FrozenBatchNorms,
        transport: Transport,
        *,
        num_ranks: int,
    ) -> None:
        self._optimizer, self._model, self._unreduced, self._frozen_norms = optimizer, model, unreduced, frozen
        self._transport, self._num_ranks = transport, num_ranks
        self.num_steps = 0
        """Steps done."""
        self.num_loads = 0
        """How often state has been loaded since all ranks were given the same."""
        self.is_in_join = False
        """Whether ranks without data may be here: they answer reductions, and nothing else."""
        self._uses_loss = _uses_loss(optimizer)
        self._is_through_wrapper = False
        # Past the wrapper: a step may call the step of its parent class, which calls the same hooks again.
        self._depth = 0
        # An optimizer that has not called Optimizer.__init__ has no hooks: then only its wrapper is checked.
        self._handles = []
        if takes_step_hooks(optimizer):
            self._handles = [
                optimizer.register_step_pre_hook(self._on_pre_step),
                optimizer.register_step_post_hook(self._on_post_step),
                optimizer.register_load_state_dict_post_hook(self._on_load),
            ]

    def remove_hooks(self) -> None:
        """Another wrapper has taken over."""
        for handle in self._handles:
            handle.remove()

    def step(self, closure: Any, args: Any, kwargs: Any) -> Any:
        """One step, through the wrapper."""
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
        """A backward has begun. No step is under way that has not called it: one that was has ended with an error."""
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
        """The closure, which then checks what it leaves in `.grad`; now, if it is none."""
        if callable(closure) and not isinstance(closure, nn.Module):  # the first argument of a user's step may be any
            return functools.partial(self._run_closure, closure)
        self._check_step()
        return closure

    def _run_closure(self, closure: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        depth, self._depth = self._depth, 0  # an error in here ends the step
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
            need = "the losses of all ranks: a line search steps by their mean, and ranks out of data have none"
            attempt = "equal numbers of batches and no join(), or an optimizer without a closure"
            raise TrainingError(Problem(f"{kind} with a closure, within join()", need, attempt), where="step()")
        if isinstance(loss, Tensor) and loss.numel() != 1:
            raise TrainingError(_scalar_loss_problem(f"a tensor of shape {list(loss.shape)}", kind), where="step()")
        try:
            value = float(loss.detach() if isinstance(loss, Tensor) else loss)
        except (TypeError, ValueError) as error:
            raise TrainingError(_scalar_loss_problem(f"a {type(loss).__name__}", kind), where="step()") from error
        self._transport.begin_call(f"the loss of a closure in step {self.num_steps + 1} of the optimizer")
        self._transport.all_reduce_scalars_async(LOSS, torch.tensor([value], dtype=torch.float64))
        mean = self._transport.wait_scalars(LOSS)[0] / self._num_ranks
        if not isinstance(loss, Tensor):
            return mean
        told = loss.clone()  # with its graph: a step may call backward itself
        told.data.fill_(mean)
        return told


def _scalar_loss_problem(got: str, kind: str) -> Problem:
    need = f"one number, whose mean over the ranks {kind} may step by"
    return Problem(f"a closure that returns {got}", need, "return loss")


def _uses_loss(optimizer: Optimizer) -> bool:
    """Whether steps may depend on what a closure returns. torch's other optimizers hand it on."""
    known = type(optimizer).__module__.startswith(("torch.optim.", "fourfold."))
    return isinstance(optimizer, LBFGS) or not known
