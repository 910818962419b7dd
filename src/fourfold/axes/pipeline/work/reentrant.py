"""Reentrant checkpoints in the user's model, which a pipeline refuses.

reentrant  a checkpoint whose backward starts another one, of a graph that it makes: `use_reentrant=True`
Law: the first forward that is trained names the module in it; nothing is looked for after that.

A stage's backward begins at what it sends and ends at what it received, and both belong to one graph. The second
forward of a reentrant checkpoint runs as a graph of its own, which knows neither.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from fourfold.torch_kit.recompute import is_in_reentrant_checkpoint
from fourfold.words.errors import Problem, TaskError


class ReentrantCheck:
    """The check of one stage."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._has_ended = model, False

    @contextlib.contextmanager
    def looking(self) -> Iterator[None]:
        """Around a forward. Raises TaskError."""
        if self._has_ended or not torch.is_grad_enabled():
            yield
            return
        found: list[str] = []
        hooks = []
        for name, module in self._model.named_modules():

            def look(_: nn.Module, args: Any, name: str = name) -> None:
                if not found and is_in_reentrant_checkpoint():
                    found.append(name)

            hooks.append(module.register_forward_pre_hook(look))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        self._has_ended = True
        if found:
            got = f"pp > 1 and {found[0]} in a reentrant checkpoint"
            need = "one graph from what a stage sends back to what it received"
            attempt = 'checkpoint(…, use_reentrant=False), or recompute = "full" in the plan'
            raise TaskError(Problem(got, need, attempt), where="the pipeline")
