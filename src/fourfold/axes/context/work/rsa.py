"""Ring self-attention (RSA) as in its paper (arXiv 2105.13120, 3.2): the readable reference.

K goes round the ring once and fills the scores of this rank's queries by all keys. An ordinary softmax follows. V goes
round once and is weighted by it. The scores [l, L] stay on the rank: the quadratic memory is divided by the number of
ranks, not removed.
The paper sums dK and dV of full length over all ranks. Here they travel as partial sums and end at their owner: that
takes 6 (N−1) · B · H · L/N elements instead of 8, and no buffer of full length.

B batch · H query heads · G key and value heads · r = H/G · l rows of queries per key head · l tokens of a rank ·
L full sequence · K, V head sizes
"""

import dataclasses
from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fourfold.axes.context.work import masks
from fourfold.axes.context.work.ring import RingCall
from fourfold.comm.channel import Channel
from fourfold.torch_kit.mixed_precision import accumulation_dtype
from fourfold.torch_kit.recompute import kept


def ring_attention(q: Tensor, k: Tensor, v: Tensor, mask: masks.Mask, call: RingCall) -> Tensor:
    """q [B, H, l, K], k [B, G, l, K], v [B, G, l, V] -> [B, H, l, V]; each ring index keeps one token range."""
    dtype, groups = accumulation_dtype(q.dtype), k.shape[1]
    folded = (q * call.scale).to(dtype).reshape(q.shape[0], groups, -1, q.shape[-1])
    scores: Tensor = _Scores.apply(folded, k.to(dtype), call.group)  # pyright: ignore[reportAssignmentType]
    scores = _apply_mask(scores.view(*q.shape[:3], -1), mask, call)
    # A query that attends to nothing gives 0, as in torch, and a gradient of 0.
    is_masked = (scores == -inf).all(-1, keepdim=True)
    weights = scores.masked_fill(is_masked, 0.0).softmax(-1).masked_fill(is_masked, 0.0)
    dropout_mask = call.dropout_mask(q)
    if dropout_mask is not None:
        keys = torch.arange(scores.shape[-1], device=q.device)
        keep = dataclasses.replace(dropout_mask, keys=keys).keep_mask(slice(None), slice(None))
        weights = weights * keep * dropout_mask.keep_scale
    folded = weights.view(q.shape[0], groups, -1, weights.shape[-1])
    out: Tensor = _WeightedValues.apply(folded, v.to(dtype), call.group)  # pyright: ignore[reportAssignmentType]
    return out.view(*q.shape[:3], -1).to(q.dtype)


def _apply_mask(scores: Tensor, mask: masks.Mask, call: RingCall) -> Tensor:
    if mask.query_mask is not None:
        scores = scores + masks.to_additive(mask.query_mask, scores.dtype)
    if mask.key_mask is not None:
        blocks = call.group.all_gather((mask.key_mask,))
        scores = scores + torch.cat([block.view(mask.key_mask.shape) for block in blocks], dim=-1)
    if call.document_starts is not None:
        keys = torch.arange(scores.shape[-1], device=scores.device)
        scores = scores.masked_fill(keys < call.document_starts[:, None, :, None], -inf)
    if call.is_causal:
        keys = torch.arange(scores.shape[-1], device=scores.device)
        scores = scores.masked_fill(keys > call.token_positions(call.local_ranges, scores.device)[:, None], -inf)
    return scores


class _Scores(torch.autograd.Function):
    """[B, G, r, K], [B, G, l, K] -> [B, G, r, L]"""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, group: Channel) -> Tensor:
        ctx.save_for_backward(q, k)
        ctx.group = group
        local = k.shape[-2]
        scores = q.new_empty(*q.shape[:-1], local * group.size)
        for owner, block in group.iterate_blocks((k,)):
            scores[..., owner * local : (owner + 1) * local] = q @ block.view(k.shape).mT
        return scores

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_scores: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k = ctx.saved_tensors
        local = k.shape[-2]
        grad_k = _reduce_to_owner(grad_scores, q, ctx.group)
        grad_q = torch.zeros_like(q)
        for owner, block in ctx.group.iterate_blocks((k,)):
            grad_q += grad_scores[..., owner * local : (owner + 1) * local] @ block.view(k.shape)
        return grad_q, grad_k, None


class _WeightedValues(torch.autograd.Function):
    """[B, G, r, L], [B, G, l, V] -> [B, G, r, V]"""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, v: Tensor, group: Channel) -> Tensor:
        ctx.save_for_backward(weights, v)
        ctx.group = group
        (out,) = kept(lambda: (_add_weighted(weights, v, group),))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        weights, v = ctx.saved_tensors
        local = v.shape[-2]
        grad_v = _reduce_to_owner(weights, grad_out, ctx.group)
        grad_weights = torch.empty_like(weights)
        for owner, block in ctx.group.iterate_blocks((v,)):
            grad_weights[..., owner * local : (owner + 1) * local] = grad_out @ block.view(v.shape).mT
        return grad_weights, grad_v, None


def _add_weighted(weights: Tensor, v: Tensor, group: Channel) -> Tensor:
    local = v.shape[-2]
    out = weights.new_zeros(*weights.shape[:-1], v.shape[-1])
    for owner, block in group.iterate_blocks((v,)):
        out += weights[..., owner * local : (owner + 1) * local] @ block.view(v.shape)
    return out


def _reduce_to_owner(rows: Tensor, right: Tensor, group: Channel) -> Tensor:
    """rows [B, G, r, L], right [B, G, r, X] -> [B, G, l, X]: rowsᵀ · right, this rank's columns, summed over ranks."""
    local = rows.shape[-1] // group.size
    shape = (*rows.shape[:2], local, right.shape[-1])
    accumulator = group.make_accumulator(torch.Size(shape).numel(), rows.dtype, rows.device)
    for hop in range(1, group.size):
        owner = (group.index - hop) % group.size
        accumulator.receive().view(shape).add_(rows[..., owner * local : (owner + 1) * local].mT @ right)
        accumulator.send()
    local_part = rows[..., group.index * local : (group.index + 1) * local].mT @ right
    return local_part.add_(accumulator.result().view(shape))
