"""Attention replay: attention calls are recorded for full sequences, and played back for one shard of the tokens.

record     a call computes as usual; in backward, the gradients of its inputs and its output are recorded
play back  a call returns this rank's rows of the recorded output, and in backward this rank's rows of the recorded
           gradients of q, k and v; its own inputs are compared with the recorded ones
recompute  a checkpoint calls attention a second time, in backward
Law: in a replay no token interacts with others; if nothing differs, each computes what it does in a full sequence.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fourfold.model.sdpa_interception import AttentionCall

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
