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

from fourfold.run.sequence.route import Call

INPUTS = ("q", "k", "v")
OUTPUT = "output"


class Recorded(NamedTuple):
    """One call for whole sequences, the module it was made in, and what backward has found: gradients by name."""

    call: Call
    where: str
    output: Tensor
    gradients: dict[str, Tensor]


def in_backward() -> bool:
    """Whether this thread runs a backward: a forward made here is a checkpoint's second one."""
    return torch._C._current_graph_task_id() != -1


def before(tensor: Tensor, found: dict[str, Tensor], name: str) -> Tensor:
    """A copy of an operation's input; backward leaves in `found` what the operation itself gives it as gradient."""
    copy = tensor.clone()
    if copy.requires_grad:
        copy.register_hook(lambda gradient: found.__setitem__(name, gradient.detach()))
    return copy


def after(tensor: Tensor, found: dict[str, Tensor], name: str) -> Tensor:
    """A copy of an operation's output; backward leaves its gradient in `found`, as hooks on the copy have made it."""
    if tensor.requires_grad:
        tensor.register_hook(lambda gradient: found.__setitem__(name, gradient.detach()))
    return tensor.clone()


def recorded(call: Call, where: str) -> tuple[Recorded, Tensor]:
    """Make a call for whole sequences; what is recorded of it, and its output."""
    found: dict[str, Tensor] = {}
    raw, output = _computed(call, found)
    plain = call._replace(q=call.q.detach(), k=call.k.detach(), v=call.v.detach())
    return Recorded(plain, where, raw.detach(), found), output


def again(call: Call, known: Recorded | None) -> Tensor:
    """Make a call once more, for a checkpoint, as autograd expects it; a reentrant one has its gradients now."""
    return _computed(call, {} if known is None else known.gradients)[1]


def _computed(call: Call, found: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    q, k, v = (before(tensor, found, name) for tensor, name in zip((call.q, call.k, call.v), INPUTS, strict=True))
    raw = call._replace(q=q, k=k, v=v).plain()
    return raw, after(raw, found, OUTPUT)


class Playback(NamedTuple):
    """One call of the replay: the rows that it returns, and who compares its gradient with the whole's and has rows."""

    output: Tensor
    backward: Callable[[Tensor], tuple[Tensor | None, ...]]

    def __call__(self, call: Call) -> Tensor:
        return _Played.apply(call.q, call.k, call.v, self)  # pyright: ignore[reportReturnType]


class _Played(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, playback: Playback) -> Tensor:
        ctx.backward_of = playback.backward
        return playback.output.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return (*ctx.backward_of(gradients[0]), None)
