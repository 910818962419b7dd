"""Step hooks: the hooks of the user's optimizer around an update over flat buffers.

pre-hook   called when all gradients are reduced and clipped, before the first weight changes; may change `.grad`
post-hook  called when all weights are updated; may change them in place
Law: a hook sees what it sees in one process: the model's parameters and, in `.grad`, the gradient of the global batch,
a copy of this rank's own. What it cannot see raises.
"""

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler

from fourfold.parts.comm.reduce.protocol import Transport
from fourfold.parts.torch_private import StepHook, has_any_hook, step_post_hooks, step_pre_hooks
from fourfold.plan.data.buckets import Bucket
from fourfold.words.errors import OptimizerError, Problem


def has_custom_step(optimizer: Optimizer) -> bool:
    """Whether somebody has replaced `step`, of the instance or of its class. A torch scheduler's wrapper is not one."""
    step: Any = optimizer.__dict__.get("step")
    if step is not None:
        # By its globals: `functools.wraps` copies every mark that a scheduler leaves.
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
    """In place of `optimizer.state` while hooks run: states rest in flat buffers, not by parameter."""

    def _raise(self, *_: Any, **__: Any) -> NoReturn:
        need = "hooks that use parameters and gradients only: the states rest in flat buffers"
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
        """`parameters` are by bucket and slot. `in_place`: gradients are in `.grad` anyway, and used there.

        `by_slot`: the update can leave out a parameter that has no gradient.
        """
        self._optimizer, self._buckets, self._parameters = optimizer, buckets, parameters
        self._is_unbucketed, self._can_skip_params = is_unbucketed, can_skip_params
        self.bucket_grads: Sequence[Tensor | None] = [None] * len(buckets)
        """By bucket, after the pre-hooks: what to update with in place of the sums; None: with the sums."""
        self._saved_grads: list[tuple[nn.Parameter, Tensor | None]] = []

    @property
    def has_any_hook(self) -> bool:
        return has_any_hook(self._optimizer)

    def run_pre_hooks(
        self, transport: Transport, used: Sequence[float] | None, factor: float
    ) -> Sequence[float] | None:
        """Call the pre-hooks; all sums are there. Not collective.

        `used`: by slot of all buckets, on how many ranks it has a gradient; None: all. Returns the same, as the hooks
        leave it. `factor` is what the sums are still to be multiplied by.
        """
        if not self._is_unbucketed:
            self.bucket_grads = [self._full_grad(bucket, transport, factor) for bucket in self._buckets]
            self._expose_grads(used)
        self._call_hooks(step_pre_hooks(self._optimizer))
        if not self._is_unbucketed:
            used = self._collect_grads(used)
        self._saved_grads = [(p, p.grad) for p in self._all_params()]
        return used

    def run_post_hooks(self) -> None:
        """Call the post-hooks; all weights are new. Afterwards no parameter has a gradient."""
        for parameter, gradient in self._saved_grads:
            parameter.grad = gradient
        self._call_hooks(step_post_hooks(self._optimizer))
        for parameter in self._all_params():
            parameter.grad = None
        self._saved_grads, self.bucket_grads = [], [None] * len(self._buckets)

    def _all_params(self) -> list[nn.Parameter]:
        return [parameter for members in self._parameters for parameter in members]

    @torch.no_grad()
    def _full_grad(self, bucket: Bucket, transport: Transport, factor: float) -> Tensor:
        first = self._parameters[bucket.index][0]
        # A copy: other ranks read the sums where they lie, and a hook may write.
        whole = torch.zeros(bucket.size, dtype=first.dtype, device=first.device)
        for part in transport.reduced_views(bucket.index):
            whole[part.start : part.stop] = part.flat
        return whole if factor == 1.0 else whole.mul_(factor)

    def _views(self) -> list[Tensor]:
        return [
            flat[slot.start : slot.stop].view(parameter.shape)
            for bucket, flat, members in zip(self._buckets, self.bucket_grads, self._parameters, strict=True)
            for slot, parameter in zip(bucket.slots, members, strict=True)
            if flat is not None
        ]

    def _expose_grads(self, used: Sequence[float] | None) -> None:
        for number, (parameter, view) in enumerate(zip(self._all_params(), self._views(), strict=True)):
            parameter.grad = view if used is None or used[number] else None

    @torch.no_grad()
    def _collect_grads(self, used: Sequence[float] | None) -> Sequence[float] | None:
        """Have what the hooks have put into `.grad` in the flat copies."""
        names = [slot.name for bucket in self._buckets for slot in bucket.slots]
        has = [parameter.grad is not None for parameter in self._all_params()]
        if not (self._can_skip_params or all(has)):
            got = f"a step pre-hook that sets the gradient of {names[has.index(False)]} to None"
            raise OptimizerError(Problem(got, "a gradient for every parameter", 'unused = "allow", or a gradient of 0'))
        for parameter, view in zip(self._all_params(), self._views(), strict=True):
            if parameter.grad is not None and parameter.grad.data_ptr() != view.data_ptr():
                view.copy_(parameter.grad)
        return used if all(has) and used is None else has

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
