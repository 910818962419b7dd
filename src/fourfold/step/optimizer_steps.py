"""Optimizer steps: the steps of a wrapped optimizer, checked and counted whoever calls them.

direct step  the user, a GradScaler or a framework calls `step()` of the wrapped optimizer itself, not of its wrapper
closure      computes a loss and its gradients
Law: a step changes weights only by what is the same on all ranks: mean gradients, and the mean of the losses.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer

from fourfold.step.closure_losses import ClosureLosses
from fourfold.step.unreduced_grads import UnreducedGrads
from fourfold.torch_kit.torch_private import takes_step_hooks


class StepCheck(Protocol):
    """What is checked before a step changes weights."""

    def check(self) -> None:
        """Raise TaskError or TrainingError if the step must not be made."""
        ...


class OptimizerSteps:
    """The steps of one wrapped optimizer, through its wrapper or direct."""

    def __init__(
        self,
        optimizer: Optimizer,
        unreduced: UnreducedGrads,
        checks: Sequence[StepCheck],
        losses: ClosureLosses,
    ) -> None:
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
        for each in self._checks:
            each.check()
