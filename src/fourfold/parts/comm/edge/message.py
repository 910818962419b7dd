"""Messages of edges: the header that says what tensors follow.

header  int64 words: its length, then for each tensor its dtype, whether it requires a gradient, its dims
Law: `decode(encode(tensors))` says what `specs` says.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

DTYPES = (
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip
ALIGNMENT_BYTES = 64


class TensorSpec(NamedTuple):
    """A tensor of a message."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    needs_gradient: bool

    @property
    def num_elements(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.dtype.itemsize


def specs(tensors: Sequence[Tensor]) -> tuple[TensorSpec, ...]:
    """What a message of these tensors holds."""
    return tuple(TensorSpec(tuple(each.shape), each.dtype, each.requires_grad) for each in tensors)


def encode(message: Sequence[TensorSpec]) -> list[int]:
    """The header of a message."""
    words = []
    for spec in message:
        words += [DTYPES.index(spec.dtype), int(spec.needs_gradient), len(spec.shape), *spec.shape]
    return [len(words), *words]


def decode(words: Sequence[int]) -> tuple[TensorSpec, ...]:
    """What the message with this header holds; words behind the header are ignored."""
    message, place, stop = [], 1, 1 + words[0]
    while place < stop:
        dtype, needs_gradient, num_dims = words[place : place + 3]
        place += 3
        message.append(TensorSpec(tuple(words[place : place + num_dims]), DTYPES[dtype], bool(needs_gradient)))
        place += num_dims
    return tuple(message)


def aligned(num_bytes: int) -> int:
    """The next multiple of a cache line."""
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
