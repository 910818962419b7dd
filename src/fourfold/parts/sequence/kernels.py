"""Kernels: attention of some queries to some keys, and its gradients as part of a larger whole.

lse    log-sum-exp of a query's scores; −inf where it attends to nothing
whole  of all keys: backward takes the output and the lse of the whole, and so gives this block's exact part of it

B batch · H heads of queries · G heads of keys and values, G | H · R queries · C keys · K, V head sizes
Law: a block's output and lse, merged with those of the other blocks, are attention; its gradients, added up, too.

Flash kernels where there is one that does what is asked, and plain products, by rows, where not. On CPUs half
precision is computed in float32, which is faster there and exact; on GPUs flash attention is in half precision only.
Source of the gradients: FlashAttention (arXiv 2205.14135) B.4.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fourfold.parts.dtypes import accumulation_dtype
from fourfold.parts.sequence import masks
from fourfold.parts.sequence.dropout import DropoutMask
from fourfold.parts.torch_private import (
    cpu_flash_attention,
    cpu_flash_attention_backward,
    cuda_flash_attention,
    cuda_flash_attention_backward,
)

INF = float("inf")
# Scores held at once by the plain kernel: enough for the products to be fast, little enough for the cache's sake.
MAX_SCORES = 2**21


@dataclass(frozen=True)
class AttentionBlock:
    """q [B, H, R, K] by k [B, G, C, K], v [B, G, C, V]. `mask` [b, h, R or 1, C] is added; `draw`: of R by C.

    `causal`: R = C, and each query sees the keys up to its own.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    is_causal: bool = False
    mask: Tensor | None = None
    dropout_mask: DropoutMask | None = None


@dataclass(frozen=True)
class BlockOutput:
    """out [B, H, R, V] of a block's own softmax, lse [B, H, R]."""

    out: Tensor
    lse: Tensor


@dataclass(frozen=True)
class SoftmaxTotals:
    """Of a block's queries: the gradient of the output, the output, and the lse of the whole; +inf where it is −inf."""

    grad_out: Tensor
    out: Tensor
    lse: Tensor

    def slice_rows(self, start: int, stop: int) -> "SoftmaxTotals":
        return SoftmaxTotals(self.grad_out[:, :, start:stop], self.out[:, :, start:stop], self.lse[:, :, start:stop])


@dataclass(frozen=True)
class BlockGrads:
    """Of a block's q, k and v."""

    q: Tensor
    k: Tensor
    v: Tensor


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """What a block is computed in."""
    return tensor.dtype if tensor.device.type == "cuda" else accumulation_dtype(tensor.dtype)


def forward(block: AttentionBlock) -> BlockOutput:
    """Attention to this block's keys alone."""
    if block.k.shape[-2] == 0:
        return _empty_output(block)
    if _flash_on_cpu(block):
        out, lse = cpu_flash_attention(
            block.q, block.k, block.v, is_causal=block.is_causal, mask=block.mask, scale=block.scale
        )
        if block.mask is not None:
            # This kernel says 0 of rows that attend to nothing.
            lse = lse.masked_fill(masks.fully_masked(block.mask, is_causal=block.is_causal), -INF)
        return BlockOutput(out, lse)
    if _flash_on_cuda(block):
        return BlockOutput(
            *cuda_flash_attention(block.q, *_repeat_kv(block), is_causal=block.is_causal, scale=block.scale)
        )
    return _plain_forward(block)


def backward(block: AttentionBlock, totals: SoftmaxTotals) -> BlockGrads:
    """This block's part of the gradients."""
    if _flash_on_cpu(block):
        return BlockGrads(
            *cpu_flash_attention_backward(
                totals.grad_out,
                (block.q, block.k, block.v),
                totals.out,
                totals.lse,
                is_causal=block.is_causal,
                mask=block.mask,
                scale=block.scale,
            )
        )
    if _flash_on_cuda(block):
        return _cuda_backward(block, totals)
    return _plain_backward(block, totals)


# ---- flash -----------------------------------------------------------------------------------------


def _flash_on_cpu(block: AttentionBlock) -> bool:
    plain = block.dropout_mask is None and block.q.shape[-1] == block.v.shape[-1]
    return plain and block.q.device.type == "cpu" and block.q.numel() > 0


def _flash_on_cuda(block: AttentionBlock) -> bool:
    plain = block.dropout_mask is None and block.mask is None and block.q.shape[-1] == block.v.shape[-1]
    half = block.q.dtype in (torch.float16, torch.bfloat16)
    return plain and half and block.q.device.type == "cuda" and block.q.shape[-1] % 8 == 0 and block.q.shape[-1] <= 256


def _repeat_kv(block: AttentionBlock) -> tuple[Tensor, Tensor]:
    """k and v once for every head of queries."""
    times = block.q.shape[1] // block.k.shape[1]
    if times == 1:
        return block.k, block.v
    return block.k.repeat_interleave(times, 1), block.v.repeat_interleave(times, 1)


def _cuda_backward(block: AttentionBlock, totals: SoftmaxTotals) -> BlockGrads:
    grad_q, grad_k, grad_v = cuda_flash_attention_backward(
        totals.grad_out,
        (block.q, *_repeat_kv(block)),
        totals.out,
        totals.lse,
        is_causal=block.is_causal,
        scale=block.scale,
    )
    groups = block.k.shape[1]
    shared = [grad.float().unflatten(1, (groups, -1)).sum(2) for grad in (grad_k, grad_v)]
    return BlockGrads(grad_q, *shared)


# ---- plain -----------------------------------------------------------------------------------------


def _empty_output(block: AttentionBlock) -> BlockOutput:
    """Of queries that attend to no key."""
    shape = (*block.q.shape[:-1], block.v.shape[-1])
    return BlockOutput(
        block.q.new_zeros(shape), block.q.new_full(shape[:-1], -INF, dtype=accumulation_dtype(block.q.dtype))
    )


def _row_ranges(block: AttentionBlock) -> list[tuple[int, int]]:
    """[start, stop) of the queries whose scores are held at once."""
    batch, heads, rows = block.q.shape[:3]
    each = max(1, MAX_SCORES // max(1, batch * heads * block.k.shape[-2]))
    return [(start, min(rows, start + each)) for start in range(0, rows, each)]


def _row_block(block: AttentionBlock, start: int, stop: int) -> AttentionBlock:
    """The queries [start, stop) of a block, in wide numbers; of a causal one only the keys that they see."""
    last = stop if block.is_causal else block.k.shape[-2]
    mask, to = block.mask, accumulation_dtype(block.q.dtype)
    if mask is not None:
        mask = mask[..., start:stop, :last] if mask.shape[-2] > 1 else mask[..., :last]
    q, k, v = block.q[:, :, start:stop].to(to), block.k[:, :, :last].to(to), block.v[:, :, :last].to(to)
    return replace(block, q=q, k=k, v=v, mask=mask)


def _fold_groups(rows: Tensor, groups: int) -> Tensor:
    """[B, H, R, ..] -> [B, G, H/G · R, ..]: the heads that share keys, one below the other."""
    return rows.reshape(rows.shape[0], groups, -1, rows.shape[-1])


def _scores(piece: AttentionBlock, start: int) -> Tensor:
    """[B, H, R, C] of a piece whose first query is `start`."""
    groups, rows, keys = piece.k.shape[1], piece.q.shape[-2], piece.k.shape[-2]
    scores = (_fold_groups(piece.q * piece.scale, groups) @ piece.k.mT).view(*piece.q.shape[:3], keys)
    if piece.mask is not None:
        scores += piece.mask
    if piece.is_causal:
        later = torch.ones(rows, keys, dtype=torch.bool, device=scores.device).triu(start + 1)
        scores.masked_fill_(later, -INF)
    return scores


def _plain_forward(block: AttentionBlock) -> BlockOutput:
    groups, dtype = block.k.shape[1], accumulation_dtype(block.q.dtype)
    out = torch.empty(*block.q.shape[:-1], block.v.shape[-1], dtype=dtype, device=block.q.device)
    lse = torch.empty(block.q.shape[:-1], dtype=dtype, device=block.q.device)
    for start, stop in _row_ranges(block):
        piece = _row_block(block, start, stop)
        weights = _scores(piece, start)
        top = weights.amax(-1, keepdim=True)
        top.masked_fill_(top == -INF, 0.0)
        total = weights.sub_(top).exp_().sum(-1, keepdim=True)
        lse[:, :, start:stop] = (top + total.log()).squeeze(-1)
        weights.div_(total.masked_fill_(total == 0.0, 1.0))
        if block.dropout_mask is not None:
            weights.mul_(block.dropout_mask.keep_mask(slice(start, stop), slice(weights.shape[-1]))).mul_(
                block.dropout_mask.keep_scale
            )
        out[:, :, start:stop] = (_fold_groups(weights, groups) @ piece.v).view(*piece.q.shape[:3], -1)
    return BlockOutput(out, lse)


def _plain_backward(block: AttentionBlock, totals: SoftmaxTotals) -> BlockGrads:
    groups, dtype = block.k.shape[1], accumulation_dtype(block.q.dtype)
    grads = BlockGrads(*(torch.zeros(t.shape, dtype=dtype, device=t.device) for t in (block.q, block.k, block.v)))
    for start, stop in _row_ranges(block):
        piece, those = _row_block(block, start, stop), totals.slice_rows(start, stop)
        grad_out, keys = those.grad_out.to(dtype), slice(piece.k.shape[-2])
        weights = _scores(piece, start).sub_(those.lse[..., None]).exp_()
        grad = (_fold_groups(grad_out, groups) @ piece.v.mT).view_as(weights)
        kept = weights
        if block.dropout_mask is not None:
            keep = block.dropout_mask.keep_mask(slice(start, stop), keys)
            kept = (weights * keep).mul_(block.dropout_mask.keep_scale)
            grad.mul_(keep).mul_(block.dropout_mask.keep_scale)
        grads.v[:, :, keys] += _fold_groups(kept, groups).mT @ _fold_groups(grad_out, groups)
        grad.sub_((grad_out * those.out.to(dtype)).sum(-1, keepdim=True)).mul_(weights).mul_(block.scale)
        grads.q[:, :, start:stop] = (_fold_groups(grad, groups) @ piece.k).view_as(piece.q)
        grads.k[:, :, keys] += _fold_groups(grad, groups).mT @ _fold_groups(piece.q, groups)
    return grads
