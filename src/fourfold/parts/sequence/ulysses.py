"""Ulysses: ranks that share out tokens exchange them for heads, attend, and exchange back (arXiv 2309.14509).

B batch · H heads · l tokens of a rank · u ranks
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fourfold.parts.comm.links import RingGroup
from fourfold.parts.sequence.masks import Mask


def to_heads(link: RingGroup, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Of each [B, H, l, K]: some tokens of all heads -> [B, H/u, u · l, K], all tokens of some heads."""
    return _Exchange.apply(link, True, *tensors)  # pyright: ignore[reportReturnType]


def to_tokens(link: RingGroup, tensor: Tensor) -> Tensor:
    """[B, H/u, u · l, K] -> [B, H, l, K]"""
    return _Exchange.apply(link, False, tensor)[0]  # pyright: ignore[reportOptionalSubscript]


def mask_to_heads(link: RingGroup, mask: Mask) -> Mask:
    """The mask of what this rank has after `to_heads`."""
    if mask.key_mask is not None:
        return Mask(key_mask=_own_heads(link, torch.cat(_of_all(link, mask.key_mask), dim=-1)))
    if mask.query_mask is None:
        return mask
    if mask.query_mask.shape[-2] == 1:
        return Mask(query_mask=_own_heads(link, mask.query_mask))
    return Mask(query_mask=_own_heads(link, torch.cat(_of_all(link, mask.query_mask), dim=-2)))


def _of_all(link: RingGroup, tensor: Tensor) -> list[Tensor]:
    return [block.view(tensor.shape) for block in link.all_gather((tensor,))]


def _own_heads(link: RingGroup, mask: Tensor) -> Tensor:
    return mask if mask.shape[1] == 1 else mask.chunk(link.size, dim=1)[link.index]


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, link: RingGroup, to_heads: bool, *tensors: Tensor):
        ctx.link, ctx.to_heads = link, to_heads
        return _exchange(link, to_heads, tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        return None, None, *_exchange(ctx.link, not ctx.to_heads, grads)


def _exchange(link: RingGroup, to_heads: bool, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """All tensors in one message to each rank. Heads are dim 1, tokens dim 2."""
    cut, joined = (1, 2) if to_heads else (2, 1)
    pieces = [tensor.chunk(link.size, dim=cut) for tensor in tensors]
    parts = torch.stack([torch.cat([piece[peer].reshape(-1) for piece in pieces]) for peer in range(link.size)])
    received, start, found = link.all_to_all(parts), 0, []
    for piece in pieces:
        shape, stop = piece[0].shape, start + piece[0].numel()
        found.append(torch.cat([row[start:stop].view(shape) for row in received], dim=joined))
        start = stop
    return tuple(found)
