"""Step hooks: the hooks of the user's optimizer, around an update over flat buffers.

pre-hook   called after all gradients are reduced and clipped, before the first weight changes; may change `.grad`
post-hook  called after all weights are updated; may change them in place
Law: a hook sees what it would see in one process: the model's parameters and, in `.grad`, the gradient of the global
batch, as this rank's own copy. Access to anything else raises.
"""

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler

from fourfold.axes.data.rules.buckets import Bucket
from fourfold.comm.memory_order import shaped
from fourfold.comm.reduce.protocol import GradReducer
from fourfold.torch_kit.torch_private import StepHook, has_any_hook, step_post_hooks, step_pre_hooks
from fourfold.words.errors import OptimizerError, Problem


def has_custom_step(optimizer: Optimizer) -> bool:
    """Whether user code has replaced `step`, on the instance or its class. A torch scheduler's wrapper is allowed."""
    step: Any = optimizer.__dict__.get("step")
    if step is not None:
        # A scheduler's wrapper is known by its globals: `functools.wraps` would copy any other mark.
        while getattr(step, "__globals__", None) is vars(lr_scheduler):
            step = step.__wrapped__
        if getattr(step, "__func__", step) is not type(optimizer).step:
            return True
    step = type(optimizer).step
    while step is not None:
        if not step.__module__.startswith(("torch.", "fourfold.")) or not _is_torch_or_fourfold(step):
            return True
        step = getattr(step, "__wrapped__", None)
    return False


def _is_torch_or_fourfold(function: Any) -> bool:
    return function.__globals__.get("__name__", "").startswith(("torch.", "fourfold."))


class _ForbiddenState:
    """Replaces `optimizer.state` while hooks run: states rest in flat buffers, not by parameter."""

    def _raise(self, *_: Any, **__: Any) -> NoReturn:
        need = "hooks that use parameters and gradients only: the states are stored in flat buffers"
        raise OptimizerError(Problem("the state of the optimizer in a step hook", need, "ff.DistributedOptimizer"))

    __getitem__ = __setitem__ = __delitem__ = __iter__ = __len__ = __contains__ = __getattr__ = _raise


class StepHooks:
    """The step hooks of one optimizer."""

    def __init__(
        self,
        optimizer: Optimizer,
        buckets: Sequence[Bucket],
        parameters: Sequence[Sequence[nn.Parameter]],
        *,
        is_unbucketed: bool,
        can_skip_params: bool,
    ) -> None:
        """`parameters` are by bucket and slot.

        is_unbucketed    gradients are in `.grad` anyway, and the update reads them there
        can_skip_params  the update can leave out a parameter that has no gradient
        """
        self._optimizer, self._buckets, self._parameters = optimizer, buckets, parameters
        self._is_unbucketed, self._can_skip_params = is_unbucketed, can_skip_params
        self.bucket_grads: Sequence[Tensor | None] = [None] * len(buckets)
        """By bucket, after the pre-hooks: the gradient to update with in place of the sums; None: use the sums."""
        self._saved_grads: list[tuple[nn.Parameter, Tensor | None]] = []

    @property
    def has_any_hook(self) -> bool:
        return has_any_hook(self._optimizer)

    def run_pre_hooks(
        self, reducer: GradReducer, used: Sequence[float] | None, factor: float
    ) -> Sequence[float] | None:
        """Call the pre-hooks, after all reductions have ended. Not collective.

        used    by slot of all buckets: on how many ranks it has a gradient; None = all
        factor  what the sums must still be multiplied by
        Returns `used` as the hooks leave it.
        """
        if not self._is_unbucketed:
            self.bucket_grads = [self._full_grad(bucket, reducer, factor) for bucket in self._buckets]
            self._expose_grads(used)
        self._call_hooks(step_pre_hooks(self._optimizer))
        if not self._is_unbucketed:
            used = self._collect_grads(used)
        self._saved_grads = [(p, p.grad) for p in self._all_params()]
        return used

    def run_post_hooks(self) -> None:
        """Call the post-hooks, after all weights are updated. Afterwards no parameter has a gradient."""
        for parameter, gradient in self._saved_grads:
            parameter.grad = gradient
        self._call_hooks(step_post_hooks(self._optimizer))
        for parameter in self._all_params():
            parameter.grad = None
        self._saved_grads, self.bucket_grads = [], [None] * len(self._buckets)

    def _all_params(self) -> list[nn.Parameter]:
        return [parameter for members in self._parameters for parameter in members]

    @torch.no_grad()
    def _full_grad(self, bucket: Bucket, reducer: GradReducer, factor: float) -> Tensor:
        first = self._parameters[bucket.index][0]
        # A copy: a hook may write into it, while other ranks still read the sums.
        full = torch.zeros(bucket.size, dtype=first.dtype, device=first.device)
        for view in reducer.reduced_views(bucket.index):
            full[view.start : view.stop] = view.flat
        return full if factor == 1.0 else full.mul_(factor)

    def _views(self) -> list[Tensor]:
        return [
            shaped(flat[slot.start : slot.stop], parameter)
            for bucket, flat, members in zip(self._buckets, self.bucket_grads, self._parameters, strict=True)
            for slot, parameter in zip(bucket.slots, members, strict=True)
            if flat is not None
        ]

    def _expose_grads(self, used: Sequence[float] | None) -> None:
        for index, (parameter, view) in enumerate(zip(self._all_params(), self._views(), strict=True)):
            parameter.grad = view if used is None or used[index] else None

    @torch.no_grad()
    def _collect_grads(self, used: Sequence[float] | None) -> Sequence[float] | None:
        """Copy what the hooks have put into `.grad` to the flat copies."""
        names = [slot.name for bucket in self._buckets for slot in bucket.slots]
        has_grad = [parameter.grad is not None for parameter in self._all_params()]
        if not (self._can_skip_params or all(has_grad)):
            got = f"a step pre-hook that sets the gradient of {names[has_grad.index(False)]} to None"
            raise OptimizerError(Problem(got, "a gradient for every parameter", 'unused = "allow", or a gradient of 0'))
        for parameter, view in zip(self._all_params(), self._views(), strict=True):
            if parameter.grad is not None and parameter.grad.data_ptr() != view.data_ptr():
                view.copy_(parameter.grad)
        return used if all(has_grad) and used is None else has_grad

    def _call_hooks(self, hooks: Sequence[StepHook]) -> None:
        optimizer: Any = self._optimizer
        args, state = (optimizer,), optimizer.state
        optimizer.state = _ForbiddenState()
        try:
            for hook in hooks:
                result = hook(optimizer, args, {})
                if result is not None and result != (args, {}):
                    got = "a step hook that returns other arguments for step"
                    raise OptimizerError(Problem(got, "None: the update takes no arguments", "ff.DistributedOptimizer"))
        finally:
            optimizer.state = state
