"""Module tracker: which module is running, for messages, and what each module returns.

Law: hooks exist only inside the `with`.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple, Self

from torch import Tensor, nn


class ModuleOutput(NamedTuple):
    """The first tensor that a module without children has returned."""

    name: str
    type_name: str
    tensor: Tensor


class ModuleTracker:
    """Within, `current_module_name` is the module that is running."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._active_names: list[str] = []
        self._outputs: list[ModuleOutput] | None = None

    @property
    def current_module_name(self) -> str:
        return self._active_names[-1] if self._active_names else type(self._model).__name__

    def __enter__(self) -> Self:
        self._hooks = []
        for name, module in self._model.named_modules():
            label = name or type(module).__name__
            self._hooks.append(
                module.register_forward_pre_hook(lambda m, i, name=label: self._active_names.append(name))
            )
            self._hooks.append(module.register_forward_hook(self._exit_module, always_call=True))
        return self

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _exit_module(self, module: nn.Module, inputs: Any, output: Any) -> None:
        name = self._active_names.pop()
        if self._outputs is not None and not any(True for _ in module.children()):
            tensor = output[0] if isinstance(output, tuple) and output else output
            if isinstance(tensor, Tensor):
                self._outputs.append(ModuleOutput(name, type(module).__name__, tensor))

    @contextlib.contextmanager
    def record_outputs(self) -> Iterator[list[ModuleOutput]]:
        """Within, outputs of modules without children are added to the list."""
        self._outputs = outputs = []
        try:
            yield outputs
        finally:
            self._outputs = None
