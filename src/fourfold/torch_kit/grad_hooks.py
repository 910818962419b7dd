"""Gradient hooks: ours run after all post-accumulate hooks of the user.

Our hooks move the gradient out of `.grad`. torch runs a parameter's hooks in the order of registration, so a hook that
the user registers after ours would find None there.
Law: whenever a user registers a hook, it sees this rank's gradient in `.grad`, and what it writes there is used.

Law: each error names the parameter and says what to change in the user's code.
"""

import contextlib
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn, Protocol

import torch
from torch import Tensor

from fourfold.torch_kit.param_access import untracked_access
from fourfold.torch_kit.torch_private import post_accumulate_hooks, set_post_accumulate_hooks, tensor_hooks
from fourfold.words.errors import Problem, TaskError, TrainingError

GradHook = Callable[[Tensor], None]


class _OrderedHooks(OrderedDict[int, GradHook]):
    """A parameter's post-accumulate hooks by handle id. The ids in `last_ids` stay behind all others."""

    def __init__(self) -> None:
        super().__init__()
        self.last_ids: list[int] = []

    def __setitem__(self, key: int, hook: GradHook) -> None:
        super().__setitem__(key, hook)
        for last_id in self.last_ids:
            self.move_to_back(last_id)

    def move_to_back(self, key: int) -> None:
        # Not move_to_end: it does not change the order of the underlying dict, which torch reads.
        hook = self[key]
        del self[key]
        super().__setitem__(key, hook)


def register_last_hook(parameter: Tensor, hook: GradHook) -> None:
    """Register a post-accumulate hook that runs after those of the user, even those registered later.

    Several of ours run in the order of registration.
    """
    earlier = post_accumulate_hooks(parameter)
    if not isinstance(earlier, _OrderedHooks):
        set_post_accumulate_hooks(parameter, _OrderedHooks())
        for key in earlier or ():
            assert earlier is not None
            parameter.register_post_accumulate_grad_hook(_call_if_registered(earlier, key))
    handle = parameter.register_post_accumulate_grad_hook(hook)
    hooks = post_accumulate_hooks(parameter)
    assert isinstance(hooks, _OrderedHooks)
    hooks.last_ids.append(handle.id)
    hooks.move_to_back(handle.id)  # registering it has moved our earlier hooks behind it


def _call_if_registered(hooks: dict[int, GradHook], key: int) -> GradHook:
    """A hook that calls `hooks[key]` as long as it is there: its handle removes it from `hooks`."""

    def call(parameter: Tensor) -> None:
        if key in hooks:
            hooks[key](parameter)

    return call


def has_user_hooks(parameter: Tensor) -> bool:
    """Whether someone else has registered hooks on a parameter: they expect its gradient in backward."""
    return _has_user_post_hooks(parameter) or bool(tensor_hooks(parameter))


def _has_user_post_hooks(parameter: Tensor) -> bool:
    hooks = post_accumulate_hooks(parameter)
    num_own = len(hooks.last_ids) if isinstance(hooks, _OrderedHooks) else 0
    return len(hooks or ()) > num_own


def check_not_cleared(parameter: Tensor, name: str) -> None:
    """Raise TaskError for a parameter without `.grad`, if a hook may have removed it.

    Else backward gave it none, as an autograd function does that returns None for it.
    """
    if _has_user_post_hooks(parameter):
        raise_grad_cleared(name)


class GradSink(Protocol):
    """Takes gradients from autograd."""

    def on_grad(self, param_index: int) -> None: ...


class GradHooks:
    """The hooks of some parameters. They call `sink`, or nothing while it is None."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.sink: GradSink | None = None
        """Who takes the gradients of the current backward; None outside of steps, whose backwards are the user's."""
        for index, parameter in enumerate(parameters):
            register_last_hook(parameter, _weak_hook(self, index))

    @contextlib.contextmanager
    def calling(self, sink: GradSink) -> Iterator[None]:
        """Inside, the sink takes the gradients."""
        self.sink = sink
        try:
            yield
        finally:
            self.sink = None


def _weak_hook(hooks: GradHooks, param_index: int) -> GradHook:
    """A hook that passes a gradient to the sink. It holds the hooks' object weakly."""
    # The garbage collector does not traverse a parameter's hooks: with a strong reference the whole step, with its
    # shared memory, would live as long as the process.
    weak_hooks = weakref.ref(hooks)

    def hook(_: Tensor) -> None:
        hooks = weak_hooks()
        if hooks is not None and hooks.sink is not None:
            with untracked_access():
                hooks.sink.on_grad(param_index)

    return hook


# ---- Gradient checks: gradients that cannot be reduced --------------------------------------------------------------


def raise_grad_cleared(name: str) -> NoReturn:
    """Raise TaskError for a gradient that a hook has removed before it could be reduced."""
    got = f"a hook has set .grad of {name} to None"
    need = "the gradient left in .grad: the update takes it from there, after all hooks"
    raise TaskError(Problem(got, need, "a hook that reads .grad, or changes it"))


def raise_grad_written(name: str) -> NoReturn:
    """Raise TrainingError for a `.grad` that something else has written in the same backward."""
    got = f".grad of {name}, written again in the backward that it was taken from (by DistributedDataParallel?)"
    need = "one that reduces gradients: a second one would lose them"
    raise TrainingError(Problem(got, need, "the plain model in the loop: model.module(…) in place of model(…)"))


def raise_grad_has_graph(name: str) -> NoReturn:
    """Raise TaskError for a gradient that has a graph: its derivative would be lost in the reduction."""
    got = f"backward(create_graph=True), which gives .grad of {name} a graph"
    need = "gradients without a graph: a mean over ranks has none"
    attempt = "torch.autograd.grad(loss, parameters, create_graph=True) in the loss, then backward()"
    raise TaskError(Problem(got, need, attempt))


def check_dense(gradient: Tensor | None, name: str) -> None:
    """Raise TaskError for a sparse gradient."""
    if gradient is not None and gradient.layout is not torch.strided:
        raise TaskError(Problem(f"{name} has a sparse gradient", "dense gradients", "sparse=False"))


def second_grad_problem(name: str) -> Problem:
    """The problem of a parameter that gets two gradients in one backward."""
    got = f"two gradients of {name} in one backward (a reentrant checkpoint around its layer?)"
    return Problem(got, "one, with all uses added up", "checkpoint(…, use_reentrant=False)")


def raise_second_grad(name: str) -> NoReturn:
    """Raise TaskError for the second gradient of a parameter in one backward."""
    raise TaskError(second_grad_problem(name))
