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

from fourfold.parts.dropped_arguments import DROPPED_ARGUMENTS, restore_arguments
from fourfold.parts.torch_private import is_in_backward
from fourfold.words.errors import Problem, TaskError

SDPA = F.scaled_dot_product_attention
DROPOUT_FUNCTIONS = (F.dropout, torch.dropout, torch.dropout_)
SDPA_FUNCTIONS = {
    SDPA,
    torch.ops.aten.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention.default,
}


class AttentionCall(NamedTuple):
    """q [B, H, l, D], k [B, G, l, D] and v [B, G, l, Dv], with the options of scaled_dot_product_attention."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    def run_sdpa(self) -> Tensor:
        """What torch makes of it: [B, H, l, Dv]. A mask may come with `causal`, which torch does not take."""
        mask, causal = self.mask, self.is_causal
        if mask is not None and causal:
            mask, causal = (
                combine_masks(mask, torch.ones(self.q.shape[2], self.k.shape[2], device=mask.device).tril() > 0),
                False,
            )
        return SDPA(self.q, self.k, self.v, mask, self.dropout_p, causal, scale=self.scale, enable_gqa=self.enable_gqa)


def combine_masks(mask: Tensor, other: Tensor) -> Tensor:
    """A mask, and a boolean one beside it."""
    return mask & other if mask.dtype == torch.bool else mask.masked_fill(~other, float("-inf"))


AttentionHandler = Callable[[AttentionCall], Tensor]


FunctionObserver = Callable[[Any, tuple[Any, ...], dict[str, Any]], None]
FunctionOverrides = Mapping[Any, Callable[..., Any]]


class _ThreadRoutes(threading.local):
    """The routes that are open in a thread, the innermost last; None: closed while a target works."""

    def __init__(self) -> None:
        self.handlers: list[AttentionHandler | None] = []
        self.overrides: list[FunctionOverrides] = []


class _ProcessRoutes:
    """The routes that are open in any thread."""

    def __init__(self) -> None:
        self.handlers: list[AttentionHandler] = []
        self.overrides: list[FunctionOverrides] = []


_thread_routes = _ThreadRoutes()
_lock = threading.Lock()
_process_routes = _ProcessRoutes()
_patched: list[tuple[Any, str, Any]] = []


@contextlib.contextmanager
def intercept_attention(
    handler: AttentionHandler, *, observer: FunctionObserver | None = None, overrides: FunctionOverrides | None = None
) -> Iterator[None]:
    """Within, each call of this thread, and of the threads of its backward, is `target`'s.

    `watch(func, args, kwargs)` hears of every other torch function that the thread calls; what is in `instead` is
    called as `instead[func](func, *args, **kwargs)`; in a checkpoint's second forward if it is of DROPOUTS.
    """
    overrides = overrides or {}
    _thread_routes.handlers.append(handler)
    _thread_routes.overrides.append(overrides)
    with _lock:
        _process_routes.handlers.append(handler)
        _process_routes.overrides.append(overrides)
        if not _patched:
            _patched.extend(_find_bindings(len(sys.modules)))
            for module, name, own in _patched:
                setattr(module, name, _wrappers_by_id[id(own)])
    try:
        with _InterceptMode(observer, overrides):
            yield
    finally:
        _thread_routes.handlers.pop()
        _thread_routes.overrides.pop()
        with _lock:
            index = _process_routes.handlers.index(handler)
            del _process_routes.handlers[index], _process_routes.overrides[index]
            if not _process_routes.handlers:
                for module, name, own in _patched:
                    setattr(module, name, own)
                _patched.clear()


@functools.lru_cache(1)
def _find_bindings(num_modules: int) -> list[tuple[Any, str, Any]]:
    """The modules that have one of torch's functions, its name there, and it; looked for again with more modules."""
    found = []
    for module in list(sys.modules.values()):
        members = getattr(module, "__dict__", None)
        # No lookup by name: some modules make what they are asked for.
        if type(members) is dict and module.__name__ != __name__:
            found += [(module, name, value) for name, value in list(members.items()) if id(value) in _wrappers_by_id]
    return found


def _make_dropout_wrapper(own: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """What stands in the place of a dropout: in backward it does what the mode does in forward."""

    @functools.wraps(own)
    def stand_in(*args: Any, **kwargs: Any) -> Tensor:
        routes = _thread_routes.overrides or (_process_routes.overrides if len(_process_routes.overrides) == 1 else [])
        if routes and own in routes[-1] and is_in_backward():
            return routes[-1][own](own, *args, **kwargs)
        return own(*args, **kwargs)

    return stand_in


def intercepted_sdpa(
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
    call = _autocast(AttentionCall(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa))
    target = _current_handler()
    if target is None:
        return call.run_sdpa()
    if query.dim() != 4:
        return _attend_3d(target, call)
    _thread_routes.handlers.append(None)
    try:
        return target(call)
    finally:
        _thread_routes.handlers.pop()


def _autocast(call: AttentionCall) -> AttentionCall:
    """A call as autocast has it: what torch casts for its kernel, all of the four that are in float32 or less."""
    device = call.q.device.type
    if not torch.is_autocast_enabled(device):
        return call
    dtype = torch.get_autocast_dtype(device)

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != torch.float64 else tensor

    mask = None if call.mask is None else cast(call.mask)
    return call._replace(q=cast(call.q), k=cast(call.k), v=cast(call.v), mask=mask)


def _attend_3d(handler: AttentionHandler, call: AttentionCall) -> Tensor:
    """A call whose tensors are [N, l, D]: each of the N is a sample of one head."""
    if call.q.dim() != 3:
        got = f"sp > 1 and scaled_dot_product_attention of {list(call.q.shape)}"
        raise TaskError(Problem(got, "q, k and v of [samples, heads, tokens, head size]", "q.flatten(0, -4)"))
    mask = call.mask if call.mask is None or call.mask.dim() < 3 else call.mask.unsqueeze(1)
    q, k, v = (tensor.unsqueeze(1) for tensor in (call.q, call.k, call.v))
    return intercepted_sdpa(q, k, v, mask, call.dropout_p, call.is_causal, call.scale, call.enable_gqa).squeeze(1)


def _current_handler() -> AttentionHandler | None:
    if _thread_routes.handlers:
        return _thread_routes.handlers[-1]
    # A thread of autograd's, in the second forward of a checkpoint: it has no routes of its own.
    if is_in_backward() and len(_process_routes.handlers) == 1:
        return _process_routes.handlers[0]
    return None


_original_functions = {_make_dropout_wrapper(own): own for own in DROPOUT_FUNCTIONS}
_wrappers_by_id: dict[int, Callable[..., Tensor]] = {id(own): stand for stand, own in _original_functions.items()} | {
    id(SDPA): intercepted_sdpa
}


class _InterceptMode(TorchFunctionMode):
    def __init__(self, observer: FunctionObserver | None, overrides: FunctionOverrides) -> None:
        super().__init__()
        self._observer, self._overrides = observer, overrides

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in DROPPED_ARGUMENTS:
            kwargs = restore_arguments(func, args, kwargs)
        # torch's own dropout names itself by its module, where now something stands in its place.
        func = _original_functions.get(func, func)
        if func in SDPA_FUNCTIONS:
            return intercepted_sdpa(*args, **kwargs)
        if self._observer is not None:
            self._observer(func, args, kwargs)
        if func in self._overrides:
            return self._overrides[func](func, *args, **kwargs)
        return func(*args, **kwargs)
