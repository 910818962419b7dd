"""Full backward hooks, of one module or of all, in a model that is divided into stages.

Law: such a hook runs on the stage that runs the module's forward, with the gradients of what this returned.

torch sets these hooks up around a module's call, of which a stage leaves the one of its last block before that.
"""

from typing import Any

from torch import nn
from torch.utils.hooks import BackwardHook

from fourfold.axes.pipeline.work.values import Replacements
from fourfold.torch_kit.torch_private import BACKWARD_HOOKS_OF_CALL, called_backward_hooks


def without_hooks(module: nn.Module) -> Replacements:
    """What to replace in a module so that its hooks do not run."""
    return [(vars(module), BACKWARD_HOOKS_OF_CALL, lambda: ([], []))] if called_backward_hooks(module) else []


def hooks_inside(module: nn.Module) -> Replacements:
    """What to replace in a module so that its hooks are set up around its `forward`, not around its call."""
    hooks, inner = called_backward_hooks(module), module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        hook = BackwardHook(module, hooks, [])
        args = hook.setup_input_hook(args)
        return hook.setup_output_hook(inner(*args, **kwargs))

    return [(vars(module), "forward", forward), *without_hooks(module)] if hooks else []
