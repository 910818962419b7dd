"""Module trace: what the modules of a model get and return in one forward, in the order of its computation.

Law: hooks exist only inside the `with`.
"""

from typing import Any, NamedTuple, Self

from torch import Tensor, nn

from fourfold.torch_kit.tensor_tree import tree_leaves
from fourfold.torch_kit.torch_private import is_in_backward
from fourfold.words.noop import noop

INPUT, OUTPUT = "input", "output"


class Event(NamedTuple):
    """The first floating-point tensor that a module got or returned, in its `call`-th call."""

    name: str
    kind: str
    call: int
    tensor: Tensor


class ModuleTrace:
    """Within, the forwards of all modules of a model are recorded; or without events, only which one runs."""

    def __init__(self, model: nn.Module, *, has_events: bool = True) -> None:
        self._model, self._record = model, self._add_event if has_events else noop
        self.events: list[Event] = []
        self._active: list[str] = []
        self._num_calls: dict[tuple[str, str], int] = {}
        self.failed_module: str | None = None
        """The innermost module that raised."""

    @property
    def current(self) -> str:
        """The name of the module that is running; "" is the model itself."""
        return self._active[-1] if self._active else ""

    @property
    def current_label(self) -> str:
        """The same for messages: of the model itself, its class."""
        return self.current or type(self._model).__name__

    def __enter__(self) -> Self:
        self._hooks = []
        for name, module in self._model.named_modules():
            enter, leave = self._hooks_of(name)
            self._hooks.append(module.register_forward_pre_hook(enter, with_kwargs=True))
            self._hooks.append(module.register_forward_hook(leave, always_call=True))
        return self

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _hooks_of(self, name: str) -> tuple[Any, Any]:
        def enter(_: nn.Module, args: Any, kwargs: Any) -> None:
            self._active.append(name)
            self._record(name, INPUT, (args, kwargs))

        def leave(_: nn.Module, args: Any, output: Any) -> None:
            if output is None and self.failed_module is None and not is_in_backward():
                self.failed_module = name  # torch calls the hook without an output if the forward has raised
            self._record(name, OUTPUT, output)
            self._active.pop()

        return enter, leave

    def _add_event(self, name: str, kind: str, tree: Any) -> None:
        tensor = next((each for each in tree_leaves(tree) if each.is_floating_point() or each.is_complex()), None)
        if tensor is not None and not is_in_backward():  # a checkpoint's second forward is not traced
            call = self._num_calls[name, kind] = self._num_calls.get((name, kind), 0) + 1
            self.events.append(Event(name, kind, call, tensor.detach()))

    def find(self, name: str, kind: str) -> Tensor | None:
        """The last tensor that a module got or returned; None: there is none."""
        return next((each.tensor for each in reversed(self.events) if (each.name, each.kind) == (name, kind)), None)
