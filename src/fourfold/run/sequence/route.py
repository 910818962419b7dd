"""Route: calls of scaled_dot_product_attention go where they are sent, whoever makes them.

call    one call, with the arguments of torch's scaled_dot_product_attention
mode    a TorchFunctionMode: sees what a thread calls, in whatever way it came by the function; not what torch's own
        composites call, such as nn.MultiheadAttention, since a mode is off while it is asked
patch   of every module that has the function under some name: sees those, and the second forward of a checkpoint,
        since backward has no mode
Law: inside `routed` no call of this thread reaches torch's own kernel unasked; outside, every call does.
"""

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fourfold.parts.lost_arguments import DROPPED_ARGUMENTS, restore_arguments
from fourfold.words.errors import Problem, TaskError

KERNEL = F.scaled_dot_product_attention
DROPOUTS = (F.dropout, torch.dropout, torch.dropout_)
ROUTED = {KERNEL, torch.ops.aten.scaled_dot_product_attention, torch.ops.aten.scaled_dot_product_attention.default}


class Call(NamedTuple):
    """q [B, H, l, D], k [B, G, l, D] and v [B, G, l, Dv], with the options of scaled_dot_product_attention."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None = None
    dropout: float = 0.0
    causal: bool = False
    scale: float | None = None
    grouped: bool = False

    def plain(self) -> Tensor:
        """What torch makes of it: [B, H, l, Dv]. A mask may come with `causal`, which torch does not take."""
        mask, causal = self.mask, self.causal
        if mask is not None and causal:
            mask, causal = (
                both(mask, torch.ones(self.q.shape[2], self.k.shape[2], device=mask.device).tril() > 0),
                False,
            )
        return KERNEL(self.q, self.k, self.v, mask, self.dropout, causal, scale=self.scale, enable_gqa=self.grouped)


def both(mask: Tensor, other: Tensor) -> Tensor:
    """A mask, and a boolean one beside it."""
    return mask & other if mask.dtype == torch.bool else mask.masked_fill(~other, float("-inf"))


Target = Callable[[Call], Tensor]


Watch = Callable[[Any, tuple[Any, ...], dict[str, Any]], None]
Instead = Mapping[Any, Callable[..., Any]]


class _Here(threading.local):
    """The routes that are open in a thread, the innermost last; None: closed while a target works."""

    def __init__(self) -> None:
        self.targets: list[Target | None] = []
        self.instead: list[Instead] = []


class _Everywhere:
    """The routes that are open in any thread."""

    def __init__(self) -> None:
        self.targets: list[Target] = []
        self.instead: list[Instead] = []


_here = _Here()
_lock = threading.Lock()
_everywhere = _Everywhere()
_patched: list[tuple[Any, str, Any]] = []


@contextlib.contextmanager
def routed(target: Target, *, watch: Watch | None = None, instead: Instead | None = None) -> Iterator[None]:
    """Within, each call of this thread, and of the threads of its backward, is `target`'s.

    `watch(func, args, kwargs)` hears of every other torch function that the thread calls; what is in `instead` is
    called as `instead[func](func, *args, **kwargs)`; in a checkpoint's second forward if it is of DROPOUTS.
    """
    instead = instead or {}
    _here.targets.append(target)
    _here.instead.append(instead)
    with _lock:
        _everywhere.targets.append(target)
        _everywhere.instead.append(instead)
        if not _patched:
            _patched.extend(_bindings(len(sys.modules)))
            for module, name, own in _patched:
                setattr(module, name, _stands[id(own)])
    try:
        with _Mode(watch, instead):
            yield
    finally:
        _here.targets.pop()
        _here.instead.pop()
        with _lock:
            index = _everywhere.targets.index(target)
            del _everywhere.targets[index], _everywhere.instead[index]
            if not _everywhere.targets:
                for module, name, own in _patched:
                    setattr(module, name, own)
                _patched.clear()


@functools.lru_cache(1)
def _bindings(num_modules: int) -> list[tuple[Any, str, Any]]:
    """The modules that have one of torch's functions, its name there, and it; looked for again with more modules."""
    found = []
    for module in list(sys.modules.values()):
        members = getattr(module, "__dict__", None)
        # No lookup by name: some modules make what they are asked for.
        if type(members) is dict and module.__name__ != __name__:
            found += [(module, name, value) for name, value in list(members.items()) if id(value) in _stands]
    return found


def _standing(own: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """What stands in the place of a dropout: in backward it does what the mode does in forward."""

    @functools.wraps(own)
    def stand_in(*args: Any, **kwargs: Any) -> Tensor:
        routes = _here.instead or (_everywhere.instead if len(_everywhere.instead) == 1 else [])
        if routes and own in routes[-1] and torch._C._current_graph_task_id() != -1:
            return routes[-1][own](own, *args, **kwargs)
        return own(*args, **kwargs)

    return stand_in


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Stands in the place of torch's scaled_dot_product_attention."""
    call = _cast(Call(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa))
    target = _target()
    if target is None:
        return call.plain()
    if query.dim() != 4:
        return _of_heads(target, call)
    _here.targets.append(None)
    try:
        return target(call)
    finally:
        _here.targets.pop()


def _cast(call: Call) -> Call:
    """A call as autocast has it: what torch casts for its kernel, all of the four that are in float32 or less."""
    device = call.q.device.type
    if not torch.is_autocast_enabled(device):
        return call
    dtype = torch.get_autocast_dtype(device)

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != torch.float64 else tensor

    mask = None if call.mask is None else cast(call.mask)
    return call._replace(q=cast(call.q), k=cast(call.k), v=cast(call.v), mask=mask)


def _of_heads(target: Target, call: Call) -> Tensor:
    """A call whose tensors are [N, l, D]: each of the N is a sample of one head."""
    if call.q.dim() != 3:
        got = f"sp > 1 and scaled_dot_product_attention of {list(call.q.shape)}"
        raise TaskError(Problem(got, "q, k and v of [samples, heads, tokens, head size]", "q.flatten(0, -4)"))
    mask = call.mask if call.mask is None or call.mask.dim() < 3 else call.mask.unsqueeze(1)
    q, k, v = (tensor.unsqueeze(1) for tensor in (call.q, call.k, call.v))
    return attention(q, k, v, mask, call.dropout, call.causal, call.scale, call.grouped).squeeze(1)


def _target() -> Target | None:
    if _here.targets:
        return _here.targets[-1]
    # A thread of autograd's, in the second forward of a checkpoint: it has no routes of its own.
    if torch._C._current_graph_task_id() != -1 and len(_everywhere.targets) == 1:
        return _everywhere.targets[0]
    return None


_owns = {_standing(own): own for own in DROPOUTS}
_stands: dict[int, Callable[..., Tensor]] = {id(own): stand for stand, own in _owns.items()} | {id(KERNEL): attention}


class _Mode(TorchFunctionMode):
    def __init__(self, watch: Watch | None, instead: Instead) -> None:
        super().__init__()
        self._watch, self._instead = watch, instead

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in DROPPED_ARGUMENTS:
            kwargs = restore_arguments(func, args, kwargs)
        # torch's own dropout names itself by its module, where now something stands in its place.
        func = _owns.get(func, func)
        if func in ROUTED:
            return attention(*args, **kwargs)
        if self._watch is not None:
            self._watch(func, args, kwargs)
        if func in self._instead:
            return self._instead[func](func, *args, **kwargs)
        return func(*args, **kwargs)
