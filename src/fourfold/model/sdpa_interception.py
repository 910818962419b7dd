"""Interception of scaled_dot_product_attention (SDPA): its calls go to a handler, whatever code makes them.

mode   a TorchFunctionMode: it sees all calls of a thread, under any name of the function, but not the calls inside
       torch's composites such as nn.MultiheadAttention, because a mode is off while it handles a call
patch  replaces the function in every module that holds it: it catches these calls, and those in the second forward
       of a checkpoint, because modes are off in backward; dropout inside of composites too
Law: inside `intercept_attention`, every SDPA call of this thread goes to the handler; outside, none does.
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

from fourfold.axes.context.work.document_mask import DocumentMask, document_attention
from fourfold.torch_kit.mixed_precision import autocast_device
from fourfold.torch_kit.param_access import DROPPED_ARGUMENTS, restore_arguments
from fourfold.torch_kit.torch_private import is_in_backward
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
        """Compute the call with torch: [B, H, l, Dv]. A mask may come with `is_causal`, which torch itself refuses."""
        mask, is_causal = self.mask, self.is_causal
        if isinstance(mask, DocumentMask):
            options = {"dropout_p": self.dropout_p, "scale": self.scale, "enable_gqa": self.enable_gqa}
            return document_attention(self.q, self.k, self.v, mask.starts, **options)
        if mask is not None and is_causal:
            causal_mask = torch.ones(self.q.shape[-2], self.k.shape[-2], device=mask.device).tril() > 0
            mask, is_causal = combine_masks(mask, causal_mask), False
        return SDPA(
            self.q, self.k, self.v, mask, self.dropout_p, is_causal, scale=self.scale, enable_gqa=self.enable_gqa
        )


def combine_masks(mask: Tensor, bool_mask: Tensor) -> Tensor:
    """A boolean or additive mask that also masks what a second, boolean mask does."""
    return mask & bool_mask if mask.dtype == torch.bool else mask.masked_fill(~bool_mask, float("-inf"))


AttentionHandler = Callable[[AttentionCall], Tensor]
FunctionObserver = Callable[[Any, tuple[Any, ...], dict[str, Any]], None]
FunctionOverrides = Mapping[Any, Callable[..., Any]]


class _ThreadHandlers(threading.local):
    """The handlers and overrides of a thread, the innermost last; None while a handler runs: its calls go to torch."""

    def __init__(self) -> None:
        self.handlers: list[AttentionHandler | None] = []
        self.overrides: list[FunctionOverrides] = []
        self.is_in_composite = False


class _ProcessHandlers:
    """The handlers and overrides of all threads."""

    def __init__(self) -> None:
        self.handlers: list[AttentionHandler] = []
        self.overrides: list[FunctionOverrides] = []


_of_thread = _ThreadHandlers()
_lock = threading.Lock()
_of_process = _ProcessHandlers()
_patched: list[tuple[Any, str, Any]] = []


@contextlib.contextmanager
def intercept_attention(
    handler: AttentionHandler,
    *,
    observer: FunctionObserver | None = None,
    overrides: FunctionOverrides | None = None,
    takes_any_shape: bool = False,
) -> Iterator[None]:
    """Within, `handler` computes each SDPA call of this thread and of the threads of its backward.

    `observer(func, args, kwargs)` is called for every other torch function that the thread calls. A function in
    `overrides` is called as `overrides[func](func, *args, **kwargs)`; in a checkpoint's second forward, only the
    DROPOUT_FUNCTIONS are. Unless the handler takes tensors of any shape, it gets [B, H, l, D], and others are refused.
    """
    overrides = overrides or {}
    handler = handler if takes_any_shape else functools.partial(_attend_4d, handler)
    _of_thread.handlers.append(handler)
    _of_thread.overrides.append(overrides)
    with _lock:
        _of_process.handlers.append(handler)
        _of_process.overrides.append(overrides)
        if not _patched:
            _patched.extend(_find_bindings(len(sys.modules)))
            for module, name, original in _patched:
                setattr(module, name, _wrappers_by_id[id(original)])
    try:
        with _InterceptMode(observer, overrides):
            yield
    finally:
        _of_thread.handlers.pop()
        _of_thread.overrides.pop()
        with _lock:
            index = _of_process.handlers.index(handler)
            del _of_process.handlers[index], _of_process.overrides[index]
            if not _of_process.handlers:
                for module, name, original in _patched:
                    setattr(module, name, original)
                _patched.clear()


@functools.lru_cache(1)
def _find_bindings(num_modules: int) -> list[tuple[Any, str, Any]]:
    """(module, name, function) of every module that holds one of these functions; cached per number of modules."""
    found = []
    for module in list(sys.modules.values()):
        members = getattr(module, "__dict__", None)
        # `__dict__`, not getattr: some modules create attributes on request.
        # Nor `__name__`: what stands in for a module, as Cython's, may have none.
        if type(members) is dict and members is not globals():
            found += [(module, name, value) for name, value in list(members.items()) if id(value) in _wrappers_by_id]
    return found


def _make_dropout_wrapper(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A replacement for a dropout function: in backward it does what the mode does in forward."""

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Tensor:
        overrides = _of_thread.overrides or (_of_process.overrides if len(_of_process.overrides) == 1 else [])
        if overrides and original in overrides[-1] and (is_in_backward() or _of_thread.is_in_composite):
            return overrides[-1][original](original, *args, **kwargs)
        return original(*args, **kwargs)

    return wrapper


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
    """Replaces torch's scaled_dot_product_attention."""
    call = _autocast(AttentionCall(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa))
    handler = _current_handler()
    if handler is None:
        return call.run_sdpa()
    _of_thread.handlers.append(None)
    try:
        return handler(call)
    finally:
        _of_thread.handlers.pop()


def _autocast(call: AttentionCall) -> AttentionCall:
    """Cast a call as torch's autocast does: q, k, v and mask, unless they are float64."""
    device = autocast_device(call.q)
    if not torch.is_autocast_enabled(device):
        return call
    dtype = torch.get_autocast_dtype(device)

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != torch.float64 else tensor

    mask = None if call.mask is None else cast(call.mask)
    return call._replace(q=cast(call.q), k=cast(call.k), v=cast(call.v), mask=mask)


def _attend_4d(handler: AttentionHandler, call: AttentionCall) -> Tensor:
    """Call a handler of [B, H, l, D]. Tensors [N, l, D] are N samples of one head."""
    if call.q.dim() == 4:
        return handler(call)
    if call.q.dim() != 3:
        got = f"cp > 1 and scaled_dot_product_attention of {list(call.q.shape)}"
        raise TaskError(Problem(got, "q, k and v of shape [samples, heads, tokens, head size]", "q.flatten(0, -4)"))
    mask = call.mask if call.mask is None or call.mask.dim() < 3 else call.mask.unsqueeze(1)
    q, k, v = (tensor.unsqueeze(1) for tensor in (call.q, call.k, call.v))
    return handler(call._replace(q=q, k=k, v=v, mask=mask)).squeeze(1)


def _call_composite(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function that drops out inside, where the mode is off."""
    before, _of_thread.is_in_composite = _of_thread.is_in_composite, True
    try:
        return func(*args, **kwargs)
    finally:
        _of_thread.is_in_composite = before


def _current_handler() -> AttentionHandler | None:
    if _of_thread.handlers:
        return _of_thread.handlers[-1]
    # A thread of autograd, in the second forward of a checkpoint, has no handlers of its own.
    if is_in_backward() and len(_of_process.handlers) == 1:
        return _of_process.handlers[0]
    return None


_original_functions: dict[Any, Callable[..., Tensor]] = {
    **{_make_dropout_wrapper(original): original for original in DROPOUT_FUNCTIONS},
    intercepted_sdpa: SDPA,
}
_wrappers_by_id = {id(original): wrapper for wrapper, original in _original_functions.items()}


def original_function(func: Any) -> Any:
    """torch's function where a mode gets what replaces it, in this thread or in another; any other as it is.

    torch's functions pass themselves to modes by their names, which are the replacements' now.
    """
    return _original_functions.get(func, func)


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
        func = original_function(func)
        if func in SDPA_FUNCTIONS:
            return intercepted_sdpa(*args, **kwargs)
        if self._observer is not None:
            self._observer(func, args, kwargs)
        if func in self._overrides:
            return self._overrides[func](func, *args, **kwargs)
        if func is F.multi_head_attention_forward:
            return _call_composite(func, args, kwargs)
        return func(*args, **kwargs)
