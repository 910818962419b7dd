"""Recorded attention: what each call of attention gave for whole sequences, played back for one rank's tokens.

whole    a call computes as always, and the gradients of its inputs and its output are recorded in backward
replay   a call returns this rank's rows of the recorded output, and in backward this rank's rows of the recorded
         gradients of q, k and v; what comes in is compared with what was recorded
again    a checkpoint calls attention a second time, in backward
Law: in a replay a rank's tokens meet no others, and where nothing differs, each has what it has in the whole.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fourfold.step.sequence.sdpa_interception import AttentionCall

QKV = ("q", "k", "v")
OUTPUT = "output"


class RecordedCall(NamedTuple):
    """One call for whole sequences, the module it was made in, and what backward has found: gradients by name."""

    call: AttentionCall
    module_name: str
    output: Tensor
    gradients: dict[str, Tensor]


def tap_input(tensor: Tensor, found: dict[str, Tensor], name: str) -> Tensor:
    """A copy of an operation's input; backward leaves in `found` what the operation itself gives it as gradient."""
    copy = tensor.clone()
    if copy.requires_grad:
        copy.register_hook(lambda gradient: found.__setitem__(name, gradient.detach()))
    return copy


def tap_output(tensor: Tensor, found: dict[str, Tensor], name: str) -> Tensor:
    """A copy of an operation's output; backward leaves its gradient in `found`, as hooks on the copy have made it."""
    if tensor.requires_grad:
        tensor.register_hook(lambda gradient: found.__setitem__(name, gradient.detach()))
    return tensor.clone()


def record_call(call: AttentionCall, module_name: str) -> tuple[RecordedCall, Tensor]:
    """Make a call for whole sequences; what is recorded of it, and its output."""
    found: dict[str, Tensor] = {}
    raw, output = _compute_tapped(call, found)
    plain = call._replace(q=call.q.detach(), k=call.k.detach(), v=call.v.detach())
    return RecordedCall(plain, module_name, raw.detach(), found), output


def recompute_call(call: AttentionCall, known: RecordedCall | None) -> Tensor:
    """Make a call once more, for a checkpoint, as autograd expects it; a reentrant one has its gradients now."""
    return _compute_tapped(call, {} if known is None else known.gradients)[1]


def _compute_tapped(call: AttentionCall, found: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    q, k, v = (tap_input(tensor, found, name) for tensor, name in zip((call.q, call.k, call.v), QKV, strict=True))
    raw = call._replace(q=q, k=k, v=v).run_sdpa()
    return raw, tap_output(raw, found, OUTPUT)


class Playback(NamedTuple):
    """One call of the replay: the rows that it returns, and who compares its gradient with the whole's and has rows."""

    output: Tensor
    backward: Callable[[Tensor], tuple[Tensor | None, ...]]

    def __call__(self, call: AttentionCall) -> Tensor:
        return _PlaybackFunction.apply(call.q, call.k, call.v, self)  # pyright: ignore[reportReturnType]


class _PlaybackFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, playback: Playback) -> Tensor:
        ctx.backward_of = playback.backward
        return playback.output.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return (*ctx.backward_of(gradients[0]), None)
