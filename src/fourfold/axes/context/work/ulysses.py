"""Ulysses: ranks exchange tokens for heads, attend, and exchange back (arXiv 2309.14509).

B batch · H heads · l tokens of a rank · u ranks
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fourfold.axes.context.work.masks import Mask
from fourfold.comm.ring import RingGroup
from fourfold.torch_kit.recompute import kept


def tokens_to_heads(group: RingGroup, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Each [B, H, l, K] (some tokens, all heads) -> [B, H/u, u · l, K] (all tokens, some heads)."""
    return _AllToAll.apply(group, True, *tensors)  # pyright: ignore[reportReturnType]


def heads_to_tokens(group: RingGroup, tensor: Tensor) -> Tensor:
    """[B, H/u, u · l, K] -> [B, H, l, K]"""
    return _AllToAll.apply(group, False, tensor)[0]  # pyright: ignore[reportOptionalSubscript]


def mask_to_heads(group: RingGroup, mask: Mask) -> Mask:
    """The mask for what this rank holds after `tokens_to_heads`."""
    if mask.key_mask is not None:
        return Mask(key_mask=_local_heads(group, torch.cat(_all_gather(group, mask.key_mask), dim=-1)))
    if mask.document_starts is not None:
        return Mask(document_starts=torch.cat(_all_gather(group, mask.document_starts), dim=-1))
    if mask.query_mask is None:
        return mask
    if mask.query_mask.shape[-2] == 1:
        return Mask(query_mask=_local_heads(group, mask.query_mask))
    return Mask(query_mask=_local_heads(group, torch.cat(_all_gather(group, mask.query_mask), dim=-2)))


def _all_gather(group: RingGroup, tensor: Tensor) -> list[Tensor]:
    return [block.view(tensor.shape) for block in group.all_gather((tensor,))]


def _local_heads(group: RingGroup, mask: Tensor) -> Tensor:
    return mask if mask.shape[1] == 1 else mask.chunk(group.size, dim=1)[group.index]


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: RingGroup, to_heads: bool, *tensors: Tensor):
        ctx.group, ctx.to_heads = group, to_heads
        return kept(lambda: _all_to_all(group, to_heads, tensors))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        return None, None, *_all_to_all(ctx.group, not ctx.to_heads, grads)


def _all_to_all(group: RingGroup, to_heads: bool, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Exchange all tensors in one message per rank. Heads are dim 1, tokens dim 2."""
    split_dim, cat_dim = (1, 2) if to_heads else (2, 1)
    chunks = [tensor.chunk(group.size, dim=split_dim) for tensor in tensors]
    messages = torch.stack([torch.cat([each[peer].reshape(-1) for each in chunks]) for peer in range(group.size)])
    received, start, exchanged = group.all_to_all(messages), 0, []
    for each in chunks:
        shape, stop = each[0].shape, start + each[0].numel()
        exchanged.append(torch.cat([row[start:stop].view(shape) for row in received], dim=cat_dim))
        start = stop
    return tuple(exchanged)
