"""Gradient hooks: ours run after all post-accumulate hooks of the user.

Ours move the gradient out of `.grad`, and torch runs a parameter's hooks in the order of registration. A hook that the
user registers later would find None there.
Law: whenever a user registers a hook, it sees the gradient of this rank in `.grad`, and what it writes there counts.
"""

from collections import OrderedDict
from collections.abc import Callable

from torch import Tensor

from fourfold.parts.torch_private import post_accumulate_hooks, set_post_accumulate_hooks

GradHook = Callable[[Tensor], None]


class _OrderedHooks(OrderedDict[int, GradHook]):
    """A parameter's post-accumulate hooks by handle id. Those whose ids are in `last` stay behind all others."""

    def __init__(self) -> None:
        super().__init__()
        self.last_ids: list[int] = []

    def __setitem__(self, key: int, hook: GradHook) -> None:
        super().__setitem__(key, hook)
        for ours in self.last_ids:
            self.move_to_back(ours)

    def move_to_back(self, key: int) -> None:
        # Not move_to_end: torch reads the underlying dict, whose order that does not change.
        moved = self[key]
        del self[key]
        super().__setitem__(key, moved)


def register_last_hook(parameter: Tensor, hook: GradHook) -> None:
    """Register a post-accumulate hook that runs after the user's, those registered later included.

    Several of ours run in the order of registration.
    """
    earlier = post_accumulate_hooks(parameter)
    if not isinstance(earlier, _OrderedHooks):
        set_post_accumulate_hooks(parameter, _OrderedHooks())
        for key in earlier or ():
            parameter.register_post_accumulate_grad_hook(_call_if_registered(earlier, key))
    handle = parameter.register_post_accumulate_grad_hook(hook)
    hooks = post_accumulate_hooks(parameter)
    assert isinstance(hooks, _OrderedHooks)
    hooks.last_ids.append(handle.id)
    hooks.move_to_back(handle.id)  # those of ours that were there have just been moved behind it


def _call_if_registered(hooks: dict[int, GradHook], key: int) -> GradHook:
    """Calls a hook as long as it is among `hooks`: there its handle removes it."""

    def call(parameter: Tensor) -> None:
        if key in hooks:
            hooks[key](parameter)

    return call
