"""Kernels: attention of some queries to some keys, and its gradients as part of a larger whole.

lse     log-sum-exp of a query's scores; −inf if it attends to nothing
totals  output and lse over all keys: with them, backward gives a block's exact part of the gradients
B batch · H query heads · G key and value heads, G | H · R queries · C keys · K, V head sizes
Law: the outputs and lse of all blocks, merged, are attention; the gradients of all blocks, summed, are its gradients.

A flash kernel runs if one supports the call, else plain matrix products, some rows at a time. On CPUs, half precision
is computed in float32, which is faster there and exact; on GPUs, flash attention exists in half precision only.
Source of the gradients: FlashAttention (arXiv 2205.14135) B.4.
"""

from dataclasses import dataclass, replace
from math import inf

import torch
from torch import Tensor

from fourfold.axes.context.work import masks
from fourfold.axes.context.work.dropout import DropoutMask
from fourfold.torch_kit.mixed_precision import accumulation_dtype
from fourfold.torch_kit.torch_private import (
    cpu_flash_attention,
    cpu_flash_attention_backward,
    cuda_flash_attention,
    cuda_flash_attention_backward,
)

# Scores that the plain kernel holds at once: enough for fast products, few enough for the cache.
MAX_SCORES = 2**21


@dataclass(frozen=True)
class AttentionBlock:
    """q [B, H, R, K], k [B, G, C, K], v [B, G, C, V]; `mask` [b, h, R or 1, C] is additive, `dropout_mask` is R by C.

    is_causal  R = C, and each query attends to the keys up to its own
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
    """out [B, H, R, V] of a softmax over this block's keys alone, and its lse [B, H, R]."""

    out: Tensor
    lse: Tensor


@dataclass(frozen=True)
class SoftmaxTotals:
    """For a block's queries, over all keys: gradient of the output, output, and lse (+inf in place of −inf)."""

    grad_out: Tensor
    out: Tensor
    lse: Tensor

    def slice_samples(self, samples: slice) -> "SoftmaxTotals":
        return SoftmaxTotals(self.grad_out[samples], self.out[samples], self.lse[samples])

    def slice_rows(self, start: int, stop: int) -> "SoftmaxTotals":
        return SoftmaxTotals(self.grad_out[:, :, start:stop], self.out[:, :, start:stop], self.lse[:, :, start:stop])


@dataclass(frozen=True)
class BlockGrads:
    """The gradients of a block's q, k and v."""

    q: Tensor
    k: Tensor
    v: Tensor


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype in which a block is computed."""
    return tensor.dtype if tensor.device.type == "cuda" else accumulation_dtype(tensor.dtype)


def forward(block: AttentionBlock) -> BlockOutput:
    """Attention to this block's keys alone."""
    if block.k.shape[-2] == 0:
        lse = block.q.new_full(block.q.shape[:-1], -inf, dtype=accumulation_dtype(block.q.dtype))
        return BlockOutput(block.q.new_zeros((*block.q.shape[:-1], block.v.shape[-1])), lse)
    if _flash_on_cpu(block):
        out, lse = cpu_flash_attention(
            block.q, block.k, block.v, is_causal=block.is_causal, mask=block.mask, scale=block.scale
        )
        if block.mask is not None:
            # For rows that attend to nothing this kernel returns 0.
            lse = lse.masked_fill(masks.fully_masked(block.mask, is_causal=block.is_causal), -inf)
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
    # Also on the meta device: fake ranks hold what ranks hold whose kernels keep no scores.
    return plain and block.q.device.type in ("cpu", "meta") and block.q.numel() > 0


def _flash_on_cuda(block: AttentionBlock) -> bool:
    plain = block.dropout_mask is None and block.mask is None and block.q.shape[-1] == block.v.shape[-1]
    half = block.q.dtype in (torch.float16, torch.bfloat16)
    return plain and half and block.q.device.type == "cuda" and block.q.shape[-1] % 8 == 0 and block.q.shape[-1] <= 256


def _repeat_kv(block: AttentionBlock) -> tuple[Tensor, Tensor]:
    """k and v, repeated for every query head."""
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


def _row_ranges(block: AttentionBlock) -> list[tuple[int, int]]:
    """[start, stop) of the queries whose scores are held at the same time."""
    batch, heads, rows = block.q.shape[:3]
    step = max(1, MAX_SCORES // max(1, batch * heads * block.k.shape[-2]))
    return [(start, min(rows, start + step)) for start in range(0, rows, step)]


def _row_block(block: AttentionBlock, start: int, stop: int) -> AttentionBlock:
    """The queries [start, stop) of a block in its accumulation dtype; if causal, with the keys they attend to."""
    num_keys = stop if block.is_causal else block.k.shape[-2]
    mask, dtype = block.mask, accumulation_dtype(block.q.dtype)
    if mask is not None:
        mask = mask[..., start:stop, :num_keys] if mask.shape[-2] > 1 else mask[..., :num_keys]
    q, k, v = block.q[:, :, start:stop], block.k[:, :, :num_keys], block.v[:, :, :num_keys]
    return replace(block, q=q.to(dtype), k=k.to(dtype), v=v.to(dtype), mask=mask)


def _fold_groups(rows: Tensor, groups: int) -> Tensor:
    """[B, H, R, ..] -> [B, G, H/G · R, ..]: the query heads that share keys, stacked."""
    return rows.reshape(rows.shape[0], groups, -1, rows.shape[-1])


def _scores(rows_block: AttentionBlock, start: int) -> Tensor:
    """Scores [B, H, R, C] of a block of rows; `start` is the index of its first query."""
    groups, rows, keys = rows_block.k.shape[1], rows_block.q.shape[-2], rows_block.k.shape[-2]
    scores = (_fold_groups(rows_block.q * rows_block.scale, groups) @ rows_block.k.mT).view(
        *rows_block.q.shape[:3], keys
    )
    if rows_block.mask is not None:
        scores += rows_block.mask
    if rows_block.is_causal:
        is_later = torch.ones(rows, keys, dtype=torch.bool, device=scores.device).triu(start + 1)
        scores.masked_fill_(is_later, -inf)
    return scores


def _plain_forward(block: AttentionBlock) -> BlockOutput:
    groups, dtype = block.k.shape[1], accumulation_dtype(block.q.dtype)
    out = torch.empty(*block.q.shape[:-1], block.v.shape[-1], dtype=dtype, device=block.q.device)
    lse = torch.empty(block.q.shape[:-1], dtype=dtype, device=block.q.device)
    for start, stop in _row_ranges(block):
        rows_block = _row_block(block, start, stop)
        weights = _scores(rows_block, start)
        top = weights.amax(-1, keepdim=True)
        top.masked_fill_(top == -inf, 0.0)
        total = weights.sub_(top).exp_().sum(-1, keepdim=True)
        lse[:, :, start:stop] = (top + total.log()).squeeze(-1)
        weights.div_(total.masked_fill_(total == 0.0, 1.0))
        if block.dropout_mask is not None:
            weights.mul_(block.dropout_mask.keep_mask(slice(start, stop), slice(weights.shape[-1]))).mul_(
                block.dropout_mask.keep_scale
            )
        out[:, :, start:stop] = (_fold_groups(weights, groups) @ rows_block.v).view(*rows_block.q.shape[:3], -1)
    return BlockOutput(out, lse)


def _plain_backward(block: AttentionBlock, totals: SoftmaxTotals) -> BlockGrads:
    groups, dtype = block.k.shape[1], accumulation_dtype(block.q.dtype)
    grads = BlockGrads(*(torch.zeros(t.shape, dtype=dtype, device=t.device) for t in (block.q, block.k, block.v)))
    for start, stop in _row_ranges(block):
        rows_block, row_totals = _row_block(block, start, stop), totals.slice_rows(start, stop)
        grad_out, keys = row_totals.grad_out.to(dtype), slice(rows_block.k.shape[-2])
        weights = _scores(rows_block, start).sub_(row_totals.lse[..., None]).exp_()
        grad = (_fold_groups(grad_out, groups) @ rows_block.v.mT).view_as(weights)
        kept = weights
        if block.dropout_mask is not None:
            keep = block.dropout_mask.keep_mask(slice(start, stop), keys)
            kept = (weights * keep).mul_(block.dropout_mask.keep_scale)
            grad.mul_(keep).mul_(block.dropout_mask.keep_scale)
        grads.v[:, :, keys] += _fold_groups(kept, groups).mT @ _fold_groups(grad_out, groups)
        grad.sub_((grad_out * row_totals.out.to(dtype)).sum(-1, keepdim=True)).mul_(weights).mul_(block.scale)
        grads.q[:, :, start:stop] = (_fold_groups(grad, groups) @ rows_block.k).view_as(rows_block.q)
        grads.k[:, :, keys] += _fold_groups(grad, groups).mT @ _fold_groups(rows_block.q, groups)
    return grads
