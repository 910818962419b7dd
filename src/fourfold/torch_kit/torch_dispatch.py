"""torch's private names for code that runs in place of operations, below autograd, and around compilations.

Law: as in `torch_kit/torch_private.py`: each name is behind a small one with a public name, and has a test.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_ATEN = torch.ops.aten
_WEIGHT_PRODUCTS = ("mm", "addmm", "linear", "convolution", "_grouped_mm")
_FUSED_ATTENTION = ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
PRODUCTS_AND_ATTENTION = frozenset(
    getattr(_ATEN, name).default
    for name in (*_WEIGHT_PRODUCTS, *(f"_scaled_dot_product_{each}" for each in _FUSED_ATTENTION))
    if hasattr(_ATEN, name)
)
"""Products of activations with weights, and attention that never holds its scores, as operations below autograd."""
UNCOUNTED_VIEWS = frozenset(
    [_ATEN._unsafe_view.default, _ATEN.unsafe_split.Tensor, _ATEN.unsafe_split_with_sizes.default]
)
"""Operations whose results are the memory of their argument, and have versions of their own: linear layers without a
bias and `nn.GRU` use them."""


class EagerDispatchMode(TorchDispatchMode):
    """A dispatch mode whose first call does not import torch._dynamo (1.25 s) to keep it out of compiled code."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def make_wrapper_subclass(cls: type[Any], like: Tensor, *, device: torch.device) -> Any:
    """A tensor of a class with `__torch_dispatch__`, of a tensor's shape, strides and dtype, and without memory."""
    return Tensor._make_wrapper_subclass(
        cls, like.shape, strides=like.stride(), storage_offset=like.storage_offset(), dtype=like.dtype, device=device
    )


def change_wrapper_shape(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Run an operation such as `t_` on a wrapper itself: its shape and strides change, and nothing else."""
    with torch._C._DisableTorchDispatch():
        function(*args, **kwargs)


def attach_hooks_again(tensor: Tensor) -> None:
    """Make autograd call the hooks of a tensor that `torch.utils.swap_tensors` has swapped."""
    tensor._backward_hooks = tensor._backward_hooks
    tensor._post_accumulate_grad_hooks = tensor._post_accumulate_grad_hooks  # type: ignore[attr-defined]


def schema_arguments(function: Any) -> Sequence[Any]:
    """The arguments of an operation, as its schema has them: `name`, and `alias_info.is_write` if it writes them."""
    return function._schema.arguments


def schema_returns(function: Any) -> Sequence[Any]:
    """What an operation returns, as its schema has it: `alias_info` if it is an argument or a view of one."""
    return function._schema.returns


def alias_names(part: Any) -> frozenset[str]:
    """The names of the memory of an argument or a result in a schema; empty: it shares none with others."""
    return frozenset(part.alias_info.before_set) if part.alias_info else frozenset()


SET_DATA: Any = Tensor.data.__set__  # type: ignore[attr-defined]
"""What a `__torch_function__` gets for `tensor.data = other`."""


def kept_alias(result: Tensor) -> Tensor:
    """Inside of a dispatch mode: the same memory without a graph, and with the same version, to be returned later."""
    # Below autograd, `detach` would give the alias a version of its own.
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return result.detach()


@contextlib.contextmanager
def compilations_noted(begin: Callable[[], None], end: Callable[[], None]) -> Iterator[None]:
    """Within: torch.compile calls `begin` and `end` around each compilation. Nothing where it was never called."""
    dynamo: Any = sys.modules.get("torch._dynamo.callback")
    if dynamo is None:
        yield
        return
    handler = dynamo.callback_handler
    callbacks = handler.register_start_callback(lambda _: begin()), handler.register_end_callback(lambda _: end())
    try:
        yield
    finally:
        handler.remove_start_callback(callbacks[0])
        handler.remove_end_callback(callbacks[1])
