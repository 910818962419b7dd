"""Attention replay: attention calls are recorded for full sequences, and played back for one shard of the tokens.

record     a call computes as usual; in backward, the gradients of its inputs and its output are recorded
play back  a call returns this rank's rows of the recorded output, and in backward this rank's rows of the recorded
           gradients of q, k and v; its own inputs are compared with the recorded ones
recompute  a checkpoint calls attention a second time, in backward
tracker    names the module whose forward calls; its hooks exist only inside the `with`
Law: in a replay no token interacts with others; if nothing differs, each computes what it does in a full sequence.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from fourfold.model.sdpa_interception import AttentionCall

# ---- module tracker -------------------------------------------------------------------------------------------------


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


# ---- attention replay -----------------------------------------------------------------------------------------------


QKV = ("q", "k", "v")
OUTPUT = "output"


class RecordedCall(NamedTuple):
    """One call for full sequences, the module that made it, and the gradients that backward has recorded, by name."""

    call: AttentionCall
    module_name: str
    output: Tensor
    gradients: dict[str, Tensor]


def tap_input(tensor: Tensor, gradients: dict[str, Tensor], name: str) -> Tensor:
    """A copy of an operation's input; backward stores in `gradients` the gradient that the operation gives it."""
    copy = tensor.clone()
    if copy.requires_grad:
        copy.register_hook(lambda gradient: gradients.__setitem__(name, gradient.detach()))
    return copy


def tap_output(tensor: Tensor, gradients: dict[str, Tensor], name: str) -> Tensor:
    """A copy of an operation's output; backward stores its gradient, after hooks on the copy, in `gradients`."""
    if tensor.requires_grad:
        tensor.register_hook(lambda gradient: gradients.__setitem__(name, gradient.detach()))
    return tensor.clone()


def record_call(call: AttentionCall, module_name: str) -> tuple[RecordedCall, Tensor]:
    """Make a call for full sequences. Returns its record and its output."""
    gradients: dict[str, Tensor] = {}
    raw, output = _compute_tapped(call, gradients)
    detached = call._replace(q=call.q.detach(), k=call.k.detach(), v=call.v.detach())
    return RecordedCall(detached, module_name, raw.detach(), gradients), output


def recompute_call(call: AttentionCall, recorded: RecordedCall | None) -> Tensor:
    """Repeat a call for a checkpoint, with the same nodes for autograd. A reentrant one records gradients only now."""
    return _compute_tapped(call, {} if recorded is None else recorded.gradients)[1]


def _compute_tapped(call: AttentionCall, gradients: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    q, k, v = (tap_input(tensor, gradients, name) for tensor, name in zip((call.q, call.k, call.v), QKV, strict=True))
    raw = call._replace(q=q, k=k, v=v).run_sdpa()
    return raw, tap_output(raw, gradients, OUTPUT)


class Playback(NamedTuple):
    """One call of a replay: the rows that it returns, and the function that maps their gradient to those of q, k, v."""

    output: Tensor
    backward: Callable[[Tensor], tuple[Tensor | None, ...]]

    def __call__(self, call: AttentionCall) -> Tensor:
        return _PlaybackFunction.apply(call.q, call.k, call.v, self)  # pyright: ignore[reportReturnType]


class _PlaybackFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, playback: Playback) -> Tensor:
        ctx.playback_backward = playback.backward
        return playback.output.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return (*ctx.playback_backward(gradients[0]), None)
