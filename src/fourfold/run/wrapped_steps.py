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

from fourfold.parts.comm import Transport
from fourfold.run.batch_statistics import FrozenBatchNorms
from fourfold.run.unreduced import UnreducedGrads
from fourfold.words.action import LOSS
from fourfold.words.errors import Problem, TaskError, TrainingError


class WrappedSteps:
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
        self._optimizer, self._model, self._unreduced, self._frozen = optimizer, model, unreduced, frozen
        self._transport, self._num_ranks = transport, num_ranks
        self.count = 0
        """Steps done."""
        self.num_loads = 0
        """How often state has been loaded since all ranks were given the same."""
        self.is_joining = False
        """Whether ranks without data may be here: they answer reductions, and nothing else."""
        self._uses_loss = _uses_loss(optimizer)
        self._is_through_wrapper = False
        # Past the wrapper: a step may call the step of its parent class, which calls the same hooks again.
        self._depth = 0
        # An optimizer that has not called Optimizer.__init__ has no hooks: then only its wrapper is checked.
        self._handles = []
        if hasattr(optimizer, "_optimizer_step_pre_hooks"):
            self._handles = [
                optimizer.register_step_pre_hook(self._before),
                optimizer.register_step_post_hook(self._after),
                optimizer.register_load_state_dict_post_hook(self._loaded),
            ]

    def close(self) -> None:
        """Another wrapper has taken over."""
        for handle in self._handles:
            handle.remove()

    def take(self, closure: Any, args: Any, kwargs: Any) -> Any:
        """One step, through the wrapper."""
        self._is_through_wrapper = True
        try:
            if closure is None:
                self._refuse()
                result = self._optimizer.step(*args, **kwargs)
            else:
                result = self._optimizer.step(self._checked(closure), *args, **kwargs)
        finally:
            self._is_through_wrapper = False
        self._done()
        return result

    def begin_round(self) -> None:
        """A backward has begun. No step is under way that has not called it: one that was has ended with an error."""
        self._depth = 0

    def _before(self, _: Optimizer, args: Any, kwargs: Any) -> Any:
        if self._is_through_wrapper:
            return None
        if self._depth == 0:
            if "closure" in kwargs:
                kwargs = {**kwargs, "closure": self._checked(kwargs["closure"])}
            elif len(args) > 1:
                args = (args[0], self._checked(args[1]), *args[2:])
            else:
                self._refuse()
        self._depth += 1
        return args, kwargs

    def _after(self, *_: Any) -> None:
        if self._is_through_wrapper:
            return
        self._depth = max(0, self._depth - 1)
        if self._depth == 0:
            self._done()

    def _loaded(self, _: Optimizer) -> None:
        self.num_loads += 1

    def _done(self) -> None:
        self._unreduced.mark_stepped()
        self.count += 1

    def _checked(self, closure: Any) -> Any:
        """The closure, which then checks what it leaves in `.grad`; now, if it is none."""
        if callable(closure) and not isinstance(closure, nn.Module):  # the first argument of a user's step may be any
            return functools.partial(self._called, closure)
        self._refuse()
        return closure

    def _called(self, closure: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        depth, self._depth = self._depth, 0  # an error in here ends the step
        loss = closure(*args, **kwargs)
        self._refuse()
        if self._uses_loss and self._num_ranks > 1 and loss is not None:
            loss = self._mean(loss)
        self._depth = depth
        return loss

    def _refuse(self) -> None:
        if self._num_ranks > 1:
            self._unreduced.check(self._model)
        if problems := self._frozen.problems():
            raise TaskError(problems, where="the model")

    def _mean(self, loss: Any) -> Any:
        """The mean of all ranks' losses, the same bits on every rank. Collective."""
        kind = type(self._optimizer).__name__
        if self.is_joining:
            need = "the losses of all ranks: a line search steps by their mean, and ranks out of data have none"
            attempt = "equal numbers of batches and no join(), or an optimizer without a closure"
            raise TrainingError(Problem(f"{kind} with a closure, within join()", need, attempt), where="step()")
        if isinstance(loss, Tensor) and loss.numel() != 1:
            raise TrainingError(_no_number(f"a tensor of shape {list(loss.shape)}", kind), where="step()")
        try:
            value = float(loss.detach() if isinstance(loss, Tensor) else loss)
        except (TypeError, ValueError) as error:
            raise TrainingError(_no_number(f"a {type(loss).__name__}", kind), where="step()") from error
        self._transport.begin_call(f"the loss of a closure in step {self.count + 1} of the optimizer")
        self._transport.all_reduce_scalars_async(LOSS, torch.tensor([value], dtype=torch.float64))
        mean = self._transport.wait_scalars(LOSS)[0] / self._num_ranks
        if not isinstance(loss, Tensor):
            return mean
        told = loss.clone()  # with its graph: a step may call backward itself
        told.data.fill_(mean)
        return told


def _no_number(got: str, kind: str) -> Problem:
    need = f"one number, whose mean over the ranks {kind} may step by"
    return Problem(f"a closure that returns {got}", need, "return loss")


def _uses_loss(optimizer: Optimizer) -> bool:
    """Whether steps may depend on what a closure returns. torch's other optimizers hand it on."""
    known = type(optimizer).__module__.startswith(("torch.optim.", "fourfold."))
    return isinstance(optimizer, LBFGS) or not known
