"""Rank order: the ranks' parts combined one after the other, so that every rank that does it gets the same bits.

Law: half precision is added in float32 and rounded once. `out` may be one of two parts, else it shares no memory with
them.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Combine = Callable[[Sequence[Tensor], Tensor], None]
HALF = (torch.bfloat16, torch.float16)


def add_parts(parts: Sequence[Tensor], out: Tensor) -> None:
    """Into `out`: the sum of two parts or more."""
    if len(parts) > 2 and out.dtype in HALF:
        total = parts[0].to(torch.float32)
        for part in parts[1:]:
            total.add_(part)
        out.copy_(total)
        return
    torch.add(parts[0], parts[1], out=out)  # of two halves: computed in float32, by torch
    for part in parts[2:]:
        out.add_(part)


def max_parts(parts: Sequence[Tensor], out: Tensor) -> None:
    """Into `out`: the elementwise maximum of two parts or more, NaN where one has NaN."""
    torch.maximum(parts[0], parts[1], out=out)
    for part in parts[2:]:
        torch.maximum(out, part, out=out)
