"""Ring self-attention as its paper has it (arXiv 2105.13120, 3.2): the reference, to be read.

K goes round once to fill the scores of this rank's queries by all keys, an ordinary softmax follows, and V goes round
once to use it. The scores [l, L] stay on the rank: the quadratic memory is divided by the ranks, not removed.
Where the paper sums dK and dV of full length over all ranks, here they travel as partial sums and end at their owner:
6 (N−1) · B · H · L/N elements instead of 8, and no buffer of full length.

B batch · H heads of queries · G heads of keys and values · l tokens of a place · L whole sequence · K, V head sizes
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fourfold.parts.comm.ring.protocol import RingGroup
from fourfold.parts.dtypes import accumulation_dtype
from fourfold.parts.sequence import masks
from fourfold.parts.sequence.ring import RingCall

INF = float("inf")


def ring_attention(q: Tensor, k: Tensor, v: Tensor, mask: masks.Mask, call: RingCall) -> Tensor:
    """q [B, H, l, K], k [B, G, l, K], v [B, G, l, V] -> [B, H, l, V]; the places of `call` keep one span each."""
    dtype, groups = accumulation_dtype(q.dtype), k.shape[1]
    folded = (q * call.scale).to(dtype).reshape(q.shape[0], groups, -1, q.shape[-1])
    scores = _scores(folded, k.to(dtype), call.group).view(*q.shape[:3], -1)
    scores = _apply_mask(scores, mask, call)
    # What attends to nothing gives 0, as in torch, and a gradient of 0.
    dead = (scores == -INF).all(-1, keepdim=True)
    weights = scores.masked_fill(dead, 0.0).softmax(-1).masked_fill(dead, 0.0)
    draw = call.dropout_mask(q)
    if draw is not None:
        keys = torch.arange(scores.shape[-1], device=q.device)
        kept = type(draw)(draw.dropout, draw.samples, draw.heads, draw.queries, keys).keep_mask(
            slice(None), slice(None)
        )
        weights = weights * kept * draw.keep_scale
    folded = weights.view(q.shape[0], groups, -1, weights.shape[-1])
    return _weighted_values(folded, v.to(dtype), call.group).view(*q.shape[:3], -1).to(q.dtype)


def _apply_mask(scores: Tensor, mask: masks.Mask, call: RingCall) -> Tensor:
    if mask.query_mask is not None:
        scores = scores + masks.to_additive(mask.query_mask, scores.dtype)
    if mask.key_mask is not None:
        blocks = call.group.all_gather((mask.key_mask,))
        scores = scores + torch.cat([block.view(mask.key_mask.shape) for block in blocks], dim=-1)
    if call.is_causal:
        keys = torch.arange(scores.shape[-1], device=scores.device)
        scores = scores.masked_fill(keys > call.token_positions(call.local_ranges, scores.device)[:, None], -INF)
    return scores


def _scores(q: Tensor, k: Tensor, group: RingGroup) -> Tensor:
    """[B, G, r, K], [B, G, l, K] -> [B, G, r, L]"""
    return _Scores.apply(q, k, group)  # pyright: ignore[reportReturnType]


def _weighted_values(weights: Tensor, v: Tensor, group: RingGroup) -> Tensor:
    """[B, G, r, L], [B, G, l, V] -> [B, G, r, V]"""
    return _WeightedValues.apply(weights, v, group)  # pyright: ignore[reportReturnType]


class _Scores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, link: RingGroup) -> Tensor:
        ctx.save_for_backward(q, k)
        ctx.link = link
        local = k.shape[-2]
        scores = q.new_empty(*q.shape[:-1], local * link.size)
        for owner, block in link.iterate_blocks((k,)):
            scores[..., owner * local : (owner + 1) * local] = q @ block.view(k.shape).mT
        return scores

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_scores: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k = ctx.saved_tensors
        local = k.shape[-2]
        grad_k = _reduce_to_owner(grad_scores, q, ctx.link)
        grad_q = torch.zeros_like(q)
        for owner, block in ctx.link.iterate_blocks((k,)):
            grad_q += grad_scores[..., owner * local : (owner + 1) * local] @ block.view(k.shape)
        return grad_q, grad_k, None


class _WeightedValues(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: Tensor, v: Tensor, link: RingGroup) -> Tensor:
        ctx.save_for_backward(weights, v)
        ctx.link = link
        local = v.shape[-2]
        out = weights.new_zeros(*weights.shape[:-1], v.shape[-1])
        for owner, block in link.iterate_blocks((v,)):
            out += weights[..., owner * local : (owner + 1) * local] @ block.view(v.shape)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        weights, v = ctx.saved_tensors
        local = v.shape[-2]
        grad_v = _reduce_to_owner(weights, grad_out, ctx.link)
        grad_weights = torch.empty_like(weights)
        for owner, block in ctx.link.iterate_blocks((v,)):
            grad_weights[..., owner * local : (owner + 1) * local] = grad_out @ block.view(v.shape).mT
        return grad_weights, grad_v, None


def _reduce_to_owner(rows: Tensor, right: Tensor, group: RingGroup) -> Tensor:
    """rows [B, G, r, L], right [B, G, r, X] -> [B, G, l, X]: rowsᵀ · right of this rank's columns, over all ranks."""
    local = rows.shape[-1] // group.size
    shape = (*rows.shape[:2], local, right.shape[-1])
    carry = group.make_accumulator(torch.Size(shape).numel(), rows.dtype, rows.device)
    for hop in range(1, group.size):
        owner = (group.index - hop) % group.size
        carry.receive().view(shape).add_(rows[..., owner * local : (owner + 1) * local].mT @ right)
        carry.send()
    mine = rows[..., group.index * local : (group.index + 1) * local].mT @ right
    return mine.add_(carry.result().view(shape))
