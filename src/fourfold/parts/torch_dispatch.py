"""torch's private names for code that runs in place of operations, below autograd.

Law: as in `parts/torch_private.py`: each name is behind a small one with a public name, and has a test.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


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


def schema_arguments(function: Any) -> Sequence[Any]:
    """The arguments of an operation, as its schema has them: `name`, and `alias_info.is_write` if it writes them."""
    return function._schema.arguments


SET_DATA: Any = Tensor.data.__set__  # type: ignore[attr-defined]
"""What a `__torch_function__` gets for `tensor.data = other`."""
