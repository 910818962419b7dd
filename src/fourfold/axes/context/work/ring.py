"""Ring attention: each rank keeps its queries; keys and values of all ranks pass by, block after block.

block     with a ring, the keys and values of one rank, one after the other; with "gather", all of them at once
forward   merges the attention to each block (online softmax)
weight    a block's part of the sum of exponentials, σ(lse of the block − lse so far)
backward  takes output and log-sum-exp over all keys, which give each block's exact part of the gradients
Law: K, V and the key mask travel in one flat message, in forward and again in backward; dK and dV travel behind them
and end at their owner. That is 6 (N−1) · B · H · L/N elements for a layer of hidden size H on N ranks, and no rank
holds the scores of a full row. The sum of exponentials itself is never formed, so no score overflows, however large.

B batch · H query heads · G key and value heads · l tokens of a rank · L = l · ring size · c tokens of a block ·
K, V head sizes

Sources: Ring Attention (arXiv 2310.01889); the order "zigzag" as in ring-flash-attention; "gather" as in Llama 3
(arXiv 2407.21783, 3.3.2).
"""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fourfold.axes.context.rules.document_tiles import DocumentSpan, document_tiles
from fourfold.axes.context.rules.layout import Tile, TokenRange, TokenRanges, local_ranges, sub_ranges, tiles
from fourfold.axes.context.work import kernels, masks
from fourfold.axes.context.work.document_mask import document_spans
from fourfold.axes.context.work.dropout import AttentionDropout, DropoutMask, sample_indices
from fourfold.axes.context.work.kernels import AttentionBlock, BlockOutput, SoftmaxTotals, compute_dtype
from fourfold.comm.channel import Channel, reduce_scatter
from fourfold.torch_kit.mixed_precision import accumulation_dtype
from fourfold.torch_kit.recompute import kept

# ---- ring call -------------------------------------------------------------------------------------------------------

ALL_SAMPLES = slice(None)


class SampleTile(NamedTuple):
    """A tile of the scores of some samples of a batch."""

    samples: slice
    tile: Tile


@dataclass(frozen=True)
class RingCall:
    """One call of attention around a ring. `ranges_by_index`: the ranges of the sequence that each ring index keeps.

    gathers_kv  all-gather keys and values at once, instead of passing them round
    first_head  the first of the heads of q that this rank computes
    document_starts  of packed documents, int64 [B or 1, l]: a query attends to the keys from its start to itself
    """

    group: Channel
    ranges_by_index: tuple[TokenRanges, ...]
    gathers_kv: bool
    is_causal: bool
    scale: float
    dropout: AttentionDropout | None = None
    first_head: int = 0
    document_starts: Tensor | None = None

    @property
    def local_ranges(self) -> TokenRanges:
        return self.ranges_by_index[self.group.index]

    @cached_property
    def _document_spans(self) -> Sequence[Sequence[DocumentSpan]]:
        assert self.document_starts is not None
        return document_spans(self.document_starts, self.local_ranges)

    def tiles(self, keys: TokenRanges) -> Iterator["SampleTile"]:
        """What this rank's queries compute of a block with the keys of these ranges."""
        if self.document_starts is None:
            for tile in tiles(self.local_ranges, keys, causal=self.is_causal):
                yield SampleTile(ALL_SAMPLES, tile)
            return
        for sample, spans in enumerate(self._document_spans):
            samples = ALL_SAMPLES if len(self._document_spans) == 1 else slice(sample, sample + 1)
            for tile in document_tiles(self.local_ranges, keys, spans):
                yield SampleTile(samples, tile)

    def token_positions(self, ranges: TokenRanges, device: torch.device) -> Tensor:
        """The positions in the full sequence of the tokens of some ranges: int64."""
        return torch.cat([torch.arange(start, stop, device=device) for start, stop in ranges])

    def dropout_mask(self, q: Tensor) -> DropoutMask | None:
        """The dropout mask of this rank's queries [B, H, l, K], with no keys yet. None without dropout."""
        if self.dropout is None or self.dropout.p == 0.0:
            return None
        first_head = self.dropout.first_head + self.first_head
        heads = torch.arange(first_head, first_head + q.shape[1], device=q.device)
        positions = self.token_positions(self.local_ranges, q.device)
        samples = sample_indices(self.dropout, q.shape[0], q.device)
        return DropoutMask(self.dropout, samples, heads, positions, positions[:0])


# ---- online softmax ------------------------------------------------------------------------------------------------


class OnlineSoftmax:
    """Attention of a rank's queries to the keys seen so far: out [B, H, l, V] and lse [B, H, l]."""

    def __init__(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> None:
        self._shape, self._dtype, self._device = shape, accumulation_dtype(dtype), device
        self._output: BlockOutput | None = None

    def merge(self, block: BlockOutput, samples: slice, queries: TokenRange) -> None:
        """Merge the output of a block of the queries [start, stop) of some samples."""
        start, stop = queries
        block = BlockOutput(block.out.to(self._dtype), block.lse.to(self._dtype))
        if self._output is None and block.lse.shape == self._shape[:-1]:
            self._output = block
            return
        out, lse = self.out[samples, :, start:stop], self.lse[samples, :, start:stop]
        total = torch.logaddexp(lse, block.lse)
        # A query that attends to nothing in this block has weight 0 here, even if it has attended to nothing so far.
        weight = (block.lse - total).exp_().masked_fill_(block.lse == -inf, 0.0)
        out.lerp_(block.out, weight[..., None])
        lse.copy_(total)

    @property
    def out(self) -> Tensor:
        return self._get_output().out

    @property
    def lse(self) -> Tensor:
        return self._get_output().lse

    def _get_output(self) -> BlockOutput:
        if self._output is None:
            out = torch.zeros(self._shape, dtype=self._dtype, device=self._device)
            self._output = BlockOutput(out, torch.full(self._shape[:-1], -inf, dtype=self._dtype, device=self._device))
        return self._output


# ---- kv blocks -----------------------------------------------------------------------------------------------------


class KVBlock(NamedTuple):
    """Keys k [B, G, c, K] and values v [B, G, c, V] of some token ranges, and the mask of these keys."""

    k: Tensor
    v: Tensor
    mask: Tensor | None
    token_ranges: TokenRanges


def iterate_kv_blocks(k: Tensor, v: Tensor, key_mask: Tensor | None, call: RingCall) -> Iterator[tuple[int, KVBlock]]:
    """The blocks that this rank attends to, each with the ring index of its owner."""
    parts = [k, v] if key_mask is None else [k, v, key_mask]
    if call.gathers_kv:
        blocks = [
            unpack_kv(flat, parts, ranges)
            for flat, ranges in zip(call.group.all_gather(parts), call.ranges_by_index, strict=True)
        ]
        yield call.group.index, _concat_kv(blocks)
        return
    for owner, flat in call.group.iterate_blocks(parts):
        yield owner, unpack_kv(flat, parts, call.ranges_by_index[owner])


def unpack_kv(flat: Tensor, parts: Sequence[Tensor], ranges: TokenRanges) -> KVBlock:
    """Views of a flat message in the shapes of `parts`."""
    pieces = flat.split([part.numel() for part in parts])
    k, v, *mask = (piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True))
    return KVBlock(k, v, mask[0] if mask else None, ranges)


def _concat_kv(blocks: Sequence[KVBlock]) -> KVBlock:
    """All keys and values in the order of the full sequence."""
    order = ranges_in_order([block.token_ranges for block in blocks])
    k, v = (
        torch.cat([tensors[index][:, :, start:stop] for index, (start, stop) in order], dim=2)
        for tensors in ([block.k for block in blocks], [block.v for block in blocks])
    )
    key_masks = [block.mask for block in blocks if block.mask is not None]
    mask = None
    if key_masks:
        mask = torch.cat([key_masks[index][..., start:stop] for index, (start, stop) in order], dim=-1)
    return KVBlock(k, v, mask, tuple(sorted(each for block in blocks for each in block.token_ranges)))


def ranges_in_order(ranges_by_index: Sequence[TokenRanges]) -> list[tuple[int, TokenRange]]:
    """(ring index, [start, stop) among its local tokens) of every range, in the order of the full sequence."""
    pairs = ((index, each) for index, ranges in enumerate(ranges_by_index) for each in local_ranges(ranges))
    return [(index, local) for _, index, local in sorted((whole, index, local) for index, (whole, local) in pairs)]


# ---- ring attention ------------------------------------------------------------------------------------------------


def ring_attention(q: Tensor, k: Tensor, v: Tensor, mask: masks.Mask, call: RingCall) -> Tensor:
    """q [B, H, l, K], k [B, G, l, K], v [B, G, l, V] -> [B, H, l, V]"""
    return _RingAttention.apply(q, k, v, mask.key_mask, mask.query_mask, call)  # pyright: ignore[reportReturnType]


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_mask: Tensor | None,
        query_mask: Tensor | None,
        call: RingCall,
    ):
        out, lse = kept(lambda: _attend(q, k, v, key_mask, query_mask, call))
        ctx.save_for_backward(q, k, v, key_mask, query_mask, out, lse)
        ctx.call = call
        return out.to(q.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, key_mask, query_mask, out, lse = ctx.saved_tensors
        queries = _LocalQueries(q, query_mask, ctx.call)
        totals = SoftmaxTotals(grad_out.to(queries.q.dtype).contiguous(), out, lse.masked_fill(lse == -inf, inf))
        grads = _GradAccumulator(queries, totals)
        if not any(ctx.needs_input_grad[1:3]):
            for _, kv_block in iterate_kv_blocks(k, v, key_mask, ctx.call):
                grads.backward_block(kv_block)
            return grads.q.to(q.dtype), None, None, None, None, None
        collect = _scattered_kv_grads if ctx.call.gathers_kv else _ring_kv_grads
        grad_k, grad_v = collect(grads, k, v, key_mask)
        return grads.q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype), None, None, None


def _attend(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, query_mask: Tensor | None, call: RingCall
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp over all keys."""
    queries = _LocalQueries(q, query_mask, call)
    merged = OnlineSoftmax(torch.Size((*q.shape[:-1], v.shape[-1])), queries.q.dtype, q.device)
    for _, kv_block in iterate_kv_blocks(k, v, key_mask, call):
        for part in call.tiles(kv_block.token_ranges):
            merged.merge(kernels.forward(queries.make_block(kv_block, part)), part.samples, part.tile.queries)
    return merged.out.to(compute_dtype(q)), merged.lse


class _LocalQueries:
    """This rank's queries in the dtype of the computation, and the attention blocks made of them."""

    def __init__(self, q: Tensor, query_mask: Tensor | None, call: RingCall) -> None:
        self.q, self.call = q.to(compute_dtype(q)), call
        self._query_mask, self._dropout_mask = query_mask, call.dropout_mask(q)

    def make_block(self, kv_block: KVBlock, part: SampleTile) -> AttentionBlock:
        samples, tile = part
        (first, last), (start, stop) = tile.queries, tile.keys
        return AttentionBlock(
            self.q[samples, :, first:last],
            kv_block.k[samples, :, start:stop].to(self.q.dtype),
            kv_block.v[samples, :, start:stop].to(self.q.dtype),
            self.call.scale,
            tile.causal,
            self._tile_mask(kv_block, tile),
            self._tile_dropout_mask(kv_block, part),
        )

    def _tile_mask(self, kv_block: KVBlock, tile: Tile) -> Tensor | None:
        if self._query_mask is not None:
            columns = sub_ranges(kv_block.token_ranges, *tile.keys)
            mask = masks.tile_mask(self._query_mask, tile.queries, columns)
            return masks.to_additive(mask, accumulation_dtype(self.q.dtype))
        if kv_block.mask is not None:
            return kv_block.mask[..., tile.keys[0] : tile.keys[1]].to(accumulation_dtype(self.q.dtype))
        return None

    def _tile_dropout_mask(self, kv_block: KVBlock, part: SampleTile) -> DropoutMask | None:
        dropout_mask, (samples, tile) = self._dropout_mask, part
        if dropout_mask is None:
            return None
        keys = self.call.token_positions(kv_block.token_ranges, self.q.device)[slice(*tile.keys)]
        queries = dropout_mask.queries[slice(*tile.queries)]
        return dataclasses.replace(dropout_mask, samples=dropout_mask.samples[samples], queries=queries, keys=keys)


class _KVGrads(NamedTuple):
    """dK and dV of the keys [start, stop) of a block, for some samples, from this rank's queries."""

    samples: slice
    keys: TokenRange
    grad_k: Tensor
    grad_v: Tensor


class _GradAccumulator:
    """dQ of this rank, summed over KV blocks. dK and dV are returned block by block."""

    def __init__(self, queries: _LocalQueries, totals: SoftmaxTotals) -> None:
        self.queries, self._totals = queries, totals
        self.q = torch.zeros(queries.q.shape, dtype=accumulation_dtype(queries.q.dtype), device=queries.q.device)

    def backward_block(self, kv_block: KVBlock) -> list[_KVGrads]:
        """Add this block's part of dQ; return its part of dK and dV, by tile."""
        found, call = [], self.queries.call
        for part in call.tiles(kv_block.token_ranges):
            samples, tile = part
            totals = self._totals.slice_samples(samples).slice_rows(*tile.queries)
            grads = kernels.backward(self.queries.make_block(kv_block, part), totals)
            self.q[samples, :, slice(*tile.queries)] += grads.q
            found.append(_KVGrads(samples, tile.keys, grads.k, grads.v))
        return found


# ---- gradients of keys and values ------------------------------------------------------------------


def _ring_kv_grads(grads: _GradAccumulator, k: Tensor, v: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """dK and dV of this rank's keys: partial sums go round the ring, each rank adds its part, the owner last."""
    call, dtype = grads.queries.call, accumulation_dtype(k.dtype)
    accumulator = call.group.make_accumulator(k.numel() + v.numel(), dtype, k.device)
    local_grads: list[_KVGrads] = []
    for owner, kv_block in iterate_kv_blocks(k, v, key_mask, call):
        block_grads = grads.backward_block(kv_block)
        if owner == call.group.index:
            local_grads = block_grads
        else:
            _add_grads(block_grads, unpack_kv(accumulator.receive(), (k, v), kv_block.token_ranges))
            accumulator.send()
    total = unpack_kv(accumulator.result(), (k, v), call.local_ranges)
    _add_grads(local_grads, total)
    return total.k, total.v


def _add_grads(grads: Sequence[_KVGrads], total: KVBlock) -> None:
    for samples, keys, grad_k, grad_v in grads:
        total.k[samples, :, slice(*keys)] += grad_k
        total.v[samples, :, slice(*keys)] += grad_v


def _scattered_kv_grads(
    grads: _GradAccumulator, k: Tensor, v: Tensor, key_mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """dK and dV of this rank's keys, by a reduce-scatter of those of all keys."""
    call, dtype = grads.queries.call, accumulation_dtype(k.dtype)
    _, kv_block = next(iterate_kv_blocks(k, v, key_mask, call))
    grad_k, grad_v = (torch.zeros(t.shape, dtype=dtype, device=t.device) for t in (kv_block.k, kv_block.v))
    full = KVBlock(grad_k, grad_v, None, kv_block.token_ranges)
    _add_grads(grads.backward_block(kv_block), full)
    parts = torch.empty(len(call.ranges_by_index), k.numel() + v.numel(), dtype=dtype, device=k.device)
    views = [unpack_kv(part, (k, v), ranges) for part, ranges in zip(parts, call.ranges_by_index, strict=True)]
    num_before = 0
    for index, (start, stop) in ranges_in_order(call.ranges_by_index):
        positions = slice(num_before, num_before + stop - start)
        views[index].k[:, :, start:stop] = full.k[:, :, positions]
        views[index].v[:, :, start:stop] = full.v[:, :, positions]
        num_before += stop - start
    total = unpack_kv(reduce_scatter(call.group, parts), (k, v), call.local_ranges)
    return total.k, total.v
