"""Attention in one process, in plain torch: what the ranks of a context group must compute."""

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fourfold.axes.context.rules.layout import RINGS, TokenRanges, token_positions
from fourfold.axes.context.work.attention import context_attention
from fourfold.axes.context.work.context_group import ContextGroup
from fourfold.axes.context.work.dropout import AttentionDropout, DropoutMask

TOLERANCE = 1e-12
BATCH, LOCAL_LENGTH, HEAD_SIZE = 2, 4, 5
INF = float("inf")


class HeadCounts(NamedTuple):
    """The number of query heads and of key heads per Ulysses rank, and the head size of V."""

    num_q: int
    num_kv: int
    value_size: int


HEADS = {
    "all": HeadCounts(2, 2, HEAD_SIZE),
    "grouped": HeadCounts(4, 2, HEAD_SIZE),
    "one": HeadCounts(3, 1, HEAD_SIZE),
    "narrow V": HeadCounts(2, 1, 3),
}
KEY_MASKS = ("padding", "bias of keys")
ROW_MASKS = ("documents", "bias", "columns", "lowest")
MASKS = (None, *KEY_MASKS, *ROW_MASKS)


class AttentionCase(NamedTuple):
    """One attention call over `size` ranks."""

    size: int
    ring: str = "zigzag"
    ulysses: int = 1
    causal: bool = False
    mask: str | None = None
    heads: str = "all"
    dropout: float = 0.0
    scale: float | None = None
    dtype: torch.dtype = torch.float64

    @property
    def length(self) -> int:
        return LOCAL_LENGTH * self.size

    @property
    def dropout_args(self) -> AttentionDropout | None:
        return AttentionDropout(self.dropout, seed=3, step=7, call=2, samples=[11, 5]) if self.dropout else None


class FullTensors(NamedTuple):
    """The tensors of full sequences; `mask` [b, h, 1 or L, L]."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor
    mask: Tensor | None


class AttentionResult(NamedTuple):
    """The output and the gradients of attention."""

    out: Tensor
    grad_q: Tensor
    grad_k: Tensor
    grad_v: Tensor


def cases(size: int) -> Iterator[AttentionCase]:
    """Every layout of an axis of this size with every kind of mask; heads and dropout take turns."""
    layouts = itertools.product(RINGS, (u for u in range(1, size + 1) if size % u == 0))
    heads, dropouts = itertools.cycle(HEADS), itertools.cycle((0.0, 0.0, 0.3))
    for (ring, ulysses), mask, causal in itertools.product(layouts, MASKS, (False, True)):
        yield AttentionCase(size, ring, ulysses, causal, mask, next(heads), next(dropouts))


def make_tensors(case: AttentionCase, factor: float = 1.0) -> FullTensors:
    """Random tensors; scores grow with the square of `factor`."""
    generator = torch.Generator().manual_seed(0)
    queries, keys, value_size = HEADS[case.heads]
    shapes = [(queries, HEAD_SIZE), (keys, HEAD_SIZE), (keys, value_size), (queries, value_size)]
    q, k, v, grad_out = (
        torch.randn(BATCH, heads * case.ulysses, case.length, size, generator=generator, dtype=torch.float64)
        for heads, size in shapes
    )
    mask = _mask(case, q.shape[1], generator)
    q, k, v, grad_out = (tensor.to(case.dtype) for tensor in (q * factor, k * factor, v, grad_out))
    return FullTensors(q, k, v, grad_out, mask)


def _mask(case: AttentionCase, heads: int, generator: torch.Generator) -> Tensor | None:
    length, dtype = case.length, case.dtype
    numbers = torch.randn(BATCH, heads, length, length, generator=generator, dtype=torch.float64).to(dtype)
    tokens = torch.arange(length)
    if case.mask == "padding":  # one sample is nothing but padding
        return tokens < torch.tensor([0, max(1, length - 3)]).view(BATCH, 1, 1, 1)
    if case.mask == "bias of keys":
        return numbers[:, :, :1].masked_fill(tokens % 3 == 1, -INF)
    if case.mask == "documents":
        document = torch.stack([tokens * 3 // length, tokens * 2 // length])
        seen = document[:, None, :, None] == document[:, None, None, :]
        return seen & (tokens != 2)[:, None]  # one query attends to nothing
    if case.mask == "bias":
        return numbers[:1]
    if case.mask == "columns":
        return numbers[:, :1, :1] > -0.5
    if case.mask == "lowest":
        unseen = (numbers[:1, :1] > 0).masked_fill_(torch.eye(length, dtype=torch.bool), False)
        return torch.zeros(1, 1, length, length, dtype=dtype).masked_fill_(unseen, torch.finfo(dtype).min)
    return None


def oracle(case: AttentionCase, tensors: FullTensors) -> AttentionResult:
    """Attention in one process, from all scores, in float64."""
    q, k, v = (tensor.double().clone().requires_grad_() for tensor in tensors[:3])
    heads = q.shape[1]
    scale = HEAD_SIZE**-0.5 if case.scale is None else case.scale
    scores = q @ _repeat_heads(k, heads).mT * scale
    if tensors.mask is not None and tensors.mask.dtype == torch.bool:
        scores = scores.masked_fill(~tensors.mask, -INF)
    elif tensors.mask is not None:
        lowest = torch.finfo(tensors.mask.dtype).min
        scores = (scores + tensors.mask).masked_fill(tensors.mask == lowest, -INF)
    if case.causal:
        scores = scores.masked_fill(torch.ones(case.length, case.length, dtype=torch.bool).triu(1), -INF)
    is_masked = (scores == -INF).all(-1, keepdim=True)
    weights = scores.masked_fill(is_masked, 0.0).softmax(-1).masked_fill(is_masked, 0.0)
    if case.dropout_args is not None:
        all_indices, tokens = slice(None), torch.arange(case.length)
        draw = DropoutMask(
            case.dropout_args, torch.tensor(case.dropout_args.samples), torch.arange(heads), tokens, tokens
        )
        weights = weights * draw.keep_mask(all_indices, all_indices) / (1 - case.dropout)
    out = weights @ _repeat_heads(v, heads)
    out.backward(tensors.grad_out.double())
    return AttentionResult(out.detach(), *(tensor.grad for tensor in (q, k, v)))  # type: ignore[arg-type]


def _repeat_heads(tensor: Tensor, heads: int) -> Tensor:
    return tensor.repeat_interleave(heads // tensor.shape[1], 1)


def shard_inputs(tensors: FullTensors, case: AttentionCase, ranges: TokenRanges) -> dict[str, Any]:
    """This rank's shard of the tensors, as arguments of `context_attention`."""
    mine = torch.tensor(token_positions(ranges))
    q, k, v = (tensor[:, :, mine].clone().requires_grad_() for tensor in tensors[:3])
    mask = tensors.mask
    if mask is not None and case.mask in KEY_MASKS:
        mask = mask[..., mine]
    elif mask is not None and mask.shape[-2] > 1:
        mask = mask[:, :, mine]
    settings = {
        "is_causal": case.causal,
        "scale": case.scale,
        "dropout": case.dropout_args,
        "enable_gqa": q.shape[1] != k.shape[1],
    }
    return {"q": q, "k": k, "v": v, "mask": mask, **settings}


def run_on_axis(case: AttentionCase, tensors: FullTensors, axis: ContextGroup) -> AttentionResult:
    """What this rank of a context group computes."""
    mine = torch.tensor(token_positions(axis.local_token_ranges(case.length)))
    given = shard_inputs(tensors, case, axis.local_token_ranges(case.length))
    out = context_attention(group=axis, **given)
    out.backward(tensors.grad_out[:, :, mine])
    return AttentionResult(out.detach(), *(given[name].grad for name in "qkv"))


def deviation(found: AttentionResult, expected: AttentionResult, ranges: TokenRanges) -> float:
    """The largest |a − b| / max(1, |b|) over the output and the three gradients of a rank's tokens."""
    mine = torch.tensor(token_positions(ranges))
    pairs = zip(found, (tensor[:, :, mine] for tensor in expected), strict=True)
    worst = [((a.double() - b).abs() / b.abs().clamp(min=1.0)).nan_to_num(INF).max().item() for a, b in pairs]
    return max(worst)
