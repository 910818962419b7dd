"""Attention over the context axis: `scaled_dot_product_attention` where each rank holds some tokens of every sequence.

B batch · H query heads · G key and value heads · l tokens of a rank · L = l · cp_size · K, V head sizes · u ranks
Law: output and gradients are those of one process that holds all tokens, whatever the upstream gradient.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from fourfold.axes.context.rules.layout import heads_problem
from fourfold.axes.context.work import masks, ring, rsa
from fourfold.axes.context.work.context_group import ContextGroup
from fourfold.axes.context.work.document_mask import DocumentMask, document_attention
from fourfold.axes.context.work.dropout import AttentionDropout
from fourfold.axes.context.work.masks import Mask
from fourfold.axes.context.work.ring import RingCall
from fourfold.comm.channel import Channel
from fourfold.torch_kit.recompute import kept
from fourfold.words.errors import Problem, TrainingError

# ---- ulysses --------------------------------------------------------------------------------------------------------


def tokens_to_heads(group: Channel, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Each [B, H, l, K] (some tokens, all heads) -> [B, H/u, u · l, K] (all tokens, some heads)."""
    return _AllToAll.apply(group, True, *tensors)  # pyright: ignore[reportReturnType]


def heads_to_tokens(group: Channel, tensor: Tensor) -> Tensor:
    """[B, H/u, u · l, K] -> [B, H, l, K]"""
    return _AllToAll.apply(group, False, tensor)[0]  # pyright: ignore[reportOptionalSubscript]


def mask_to_heads(group: Channel, mask: Mask) -> Mask:
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


def _all_gather(group: Channel, tensor: Tensor) -> list[Tensor]:
    return [block.view(tensor.shape) for block in group.all_gather((tensor,))]


def _local_heads(group: Channel, mask: Tensor) -> Tensor:
    return mask if mask.shape[1] == 1 else mask.chunk(group.size, dim=1)[group.index]


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Channel, to_heads: bool, *tensors: Tensor):
        ctx.group, ctx.to_heads = group, to_heads
        return kept(lambda: _all_to_all(group, to_heads, tensors))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        return None, None, *_all_to_all(ctx.group, not ctx.to_heads, grads)


def _all_to_all(group: Channel, to_heads: bool, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Exchange all tensors in one message per rank. Heads are dim 1, tokens dim 2."""
    split_dim, cat_dim = (1, 2) if to_heads else (2, 1)
    chunks = [tensor.chunk(group.size, dim=split_dim) for tensor in tensors]
    messages = torch.stack([torch.cat([each[peer].reshape(-1) for each in chunks]) for peer in range(group.size)])
    rows = [row.split([each[0].numel() for each in chunks]) for row in group.all_to_all(messages)]
    return tuple(
        torch.cat([row[index].view(each[0].shape) for row in rows], dim=cat_dim) for index, each in enumerate(chunks)
    )


# ---- attention over the context axis --------------------------------------------------------------------------------


def context_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: ContextGroup,
    *,
    mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    dropout: AttentionDropout | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention from this rank's queries to the keys of the full sequence: [B, H, l, V].

    q [B, H, l, K], k [B, G, l, K] and v [B, G, l, V] are this rank's tokens, in the order of
    `group.local_token_ranges`. G equals H, or divides it with `enable_gqa`. Without heads, tensors may be [B, l, K].
    `mask` is boolean (True: attend) or additive, as in torch. It covers this rank's keys, [.., 1, l], or this rank's
    queries by all keys in the order of the full sequence, [.., l or 1, L]. It may be combined with `is_causal`.
    A DocumentMask of this rank's tokens is causal.
    Queries that attend to nothing give 0. `scale` defaults to 1/√K.

    Collective among the ranks of the group, in forward and in backward. Raises TrainingError for inputs that do not
    fit together, PlanError for a length that does not divide, PeerError if a rank has died.
    """
    if q.ndim == 3 and k.ndim == 3 and v.ndim == 3:
        mask = mask.unsqueeze(1) if mask is not None and mask.ndim == 3 else mask
        q, k, v = (tensor.unsqueeze(1) for tensor in (q, k, v))
        return context_attention(q, k, v, group, mask=mask, is_causal=is_causal, scale=scale, dropout=dropout).squeeze(
            1
        )
    _check_inputs(q, k, v, group, enable_gqa=enable_gqa)
    is_causal = is_causal or isinstance(mask, DocumentMask)
    if q.shape[0] == 0:
        return _local_attention(q, k, v, None, is_causal=False, scale=scale)
    if group.size == 1 and _torch_supports(mask, is_causal, dropout):
        return _local_attention(q, k, v, mask, is_causal=is_causal, scale=scale)
    parsed_mask = masks.parse_mask(mask, q, k, group.size)
    length = q.shape[-2] * group.size
    first_head = q.shape[1] // group.ulysses * group.ulysses_group.index
    if group.ulysses > 1:
        q, k, v = tokens_to_heads(group.ulysses_group, q, k, v)
        parsed_mask = mask_to_heads(group.ulysses_group, parsed_mask)
    ring_mask = _whole_mask(parsed_mask)
    if group.ring_group.size == 1 and _torch_supports(ring_mask, is_causal, dropout):
        out = _local_attention(q, k, v, ring_mask, is_causal=is_causal, scale=scale)
    else:
        call = RingCall(
            group.ring_group,
            group.spec.ring_ranges(length),
            gathers_kv=group.ring == "gather",
            is_causal=is_causal,
            scale=1.0 / math.sqrt(q.shape[-1]) if scale is None else scale,
            dropout=dropout,
            first_head=first_head,
            document_starts=parsed_mask.document_starts,
        )
        out = (rsa if group.ring == "rsa" else ring).ring_attention(q, k, v, parsed_mask, call)
    return heads_to_tokens(group.ulysses_group, out) if group.ulysses > 1 else out


def _torch_supports(mask: Tensor | None, is_causal: bool, dropout: AttentionDropout | None) -> bool:
    """Whether torch's own attention can compute this. Its dropout depends on the mesh, so dropout excludes it."""
    is_plain = not is_causal or mask is None or isinstance(mask, DocumentMask)
    return is_plain and (dropout is None or dropout.p == 0.0)


def _whole_mask(mask: masks.Mask) -> Tensor | None:
    """The mask of a rank that holds all tokens, as torch's attention takes it."""
    if mask.document_starts is not None:
        return DocumentMask(mask.document_starts)
    return mask.query_mask if mask.query_mask is not None else mask.key_mask


def _local_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, is_causal: bool, scale: float | None
) -> Tensor:
    enable_gqa = q.shape[1] != k.shape[1]
    if isinstance(mask, DocumentMask):
        return document_attention(q, k, v, mask.starts, scale=scale, enable_gqa=enable_gqa)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
    )


def _check_inputs(q: Tensor, k: Tensor, v: Tensor, group: ContextGroup, *, enable_gqa: bool) -> None:
    """Raise TrainingError with all problems at once."""
    shapes = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    if {q.ndim, k.ndim, v.ndim} != {4} or q.shape[-1] != k.shape[-1] or k.shape[:-1] != v.shape[:-1]:
        need = "q [batch, heads, tokens, head size], k with the head size of q, v with the shape of k but for head size"
        raise TrainingError(Problem(shapes, need), where=masks.WHERE)
    problems = []
    if group.size > 1 and (q.shape[-2] != k.shape[-2] or q.shape[0] != k.shape[0]):
        problems.append(Problem(shapes, "self-attention: queries and keys of the same tokens", "cp = 1"))
    if not enable_gqa and q.shape[1] != k.shape[1]:
        problems.append(Problem(shapes, "as many key heads as query heads", "enable_gqa=True"))
    elif k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        problems.append(Problem(shapes, "a number of query heads that the number of key heads divides"))
    if len({tensor.dtype for tensor in (q, k, v)}) > 1 or not q.is_floating_point():
        problems.append(Problem(f"q {q.dtype}, k {k.dtype}, v {v.dtype}", "one floating-point dtype for all three"))
    heads = heads_problem(q.shape[1], k.shape[1], group.ulysses)
    problems += [] if heads is None else [heads]
    if problems:
        raise TrainingError(problems, where=masks.WHERE)
