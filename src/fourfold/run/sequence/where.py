"""Where: the module that is running, for messages, and what each module makes.

Law: hooks are there inside the `with` only.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple, Self

from torch import Tensor, nn


class Made(NamedTuple):
    """The first tensor that a module without children returned."""

    name: str
    kind: str
    result: Tensor


class Names:
    """Within, `here` is the name of the module that is running."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._stack: list[str] = []
        self._made: list[Made] | None = None

    @property
    def here(self) -> str:
        return self._stack[-1] if self._stack else type(self._model).__name__

    def __enter__(self) -> Self:
        self._hooks = []
        for name, module in self._model.named_modules():
            shown = name or type(module).__name__
            self._hooks.append(module.register_forward_pre_hook(lambda m, i, name=shown: self._stack.append(name)))
            self._hooks.append(module.register_forward_hook(self._leave, always_call=True))
        return self

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        name = self._stack.pop()
        if self._made is not None and not any(True for _ in module.children()):
            tensor = output[0] if isinstance(output, tuple) and output else output
            if isinstance(tensor, Tensor):
                self._made.append(Made(name, type(module).__name__, tensor))

    @contextlib.contextmanager
    def recording(self) -> Iterator[list[Made]]:
        """Within, what modules without children make is added to the list."""
        self._made = made = []
        try:
            yield made
        finally:
            self._made = None
