"""Ring attention: each rank keeps its queries, and sees the keys and values of all, place after place.

side    what a rank sees at once: the keys and values of one place of the ring or, with "gather", of all
whole   the output and the log-sum-exp over all keys, of which backward makes every block's part of the gradients

B batch · H heads of queries · G heads of keys and values · l tokens of a place · L = l · places · K, V head sizes
Law: K and V travel in one message, in forward and again in backward; dK and dV travel behind them and end at their
owner: 6 (N−1) · B · H · L/N elements for a layer of hidden size H, and no rank holds scores of a full row.

Sources: Ring Attention (arXiv 2310.01889); the order "zigzag" as in ring-flash-attention; "gather" as in Llama 3
(arXiv 2407.21783, 3.3.2).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fourfold.parts.comm.ring.protocol import RingGroup, reduce_scatter
from fourfold.parts.dtypes import accumulation_dtype
from fourfold.parts.sequence import kernels, masks
from fourfold.parts.sequence.dropout import AttentionDropout, DropoutMask, sample_indices
from fourfold.parts.sequence.kernels import AttentionBlock, SoftmaxTotals, compute_dtype
from fourfold.parts.sequence.online_softmax import OnlineSoftmax
from fourfold.plan.sequence import Tile, TokenRange, TokenRanges, tiles

INF = float("inf")


@dataclass(frozen=True)
class RingCall:
    """One call of attention around a link. `places`: the spans of the whole sequence that each place keeps."""

    group: RingGroup
    ranges_by_index: tuple[TokenRanges, ...]
    gathers_kv: bool
    is_causal: bool
    scale: float
    dropout: AttentionDropout | None = None
    first_head: int = 0

    @property
    def local_ranges(self) -> TokenRanges:
        return self.ranges_by_index[self.group.index]

    def token_positions(self, ranges: TokenRanges, device: torch.device) -> Tensor:
        """int64: the places in the whole sequence of the tokens of some spans."""
        return torch.cat([torch.arange(start, stop, device=device) for start, stop in ranges])

    def dropout_mask(self, like: Tensor) -> DropoutMask | None:
        """The draw for queries [B, H, l, K] of this place and no keys yet."""
        if self.dropout is None or self.dropout.p == 0.0:
            return None
        heads = torch.arange(self.first_head, self.first_head + like.shape[1], device=like.device)
        queries = self.token_positions(self.local_ranges, like.device)
        return DropoutMask(
            self.dropout, sample_indices(self.dropout, like.shape[0], like.device), heads, queries, queries[:0]
        )


class KVBlock(NamedTuple):
    """Keys k [B, G, c, K] and values v [B, G, c, V] of some spans, and the mask of these keys."""

    k: Tensor
    v: Tensor
    mask: Tensor | None
    token_ranges: TokenRanges


def ring_attention(q: Tensor, k: Tensor, v: Tensor, mask: masks.Mask, call: RingCall) -> Tensor:
    """q [B, H, l, K], k [B, G, l, K], v [B, G, l, V] -> [B, H, l, V]"""
    return _RingAttention.apply(q, k, v, mask.key_mask, mask.query_mask, call)  # pyright: ignore[reportReturnType]


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, keys: Tensor | None, rows: Tensor | None, call: RingCall):
        work = _LocalQueries(q, rows, call)
        merged = OnlineSoftmax(torch.Size((*q.shape[:-1], v.shape[-1])), work.q.dtype, q.device)
        for _, side in _kv_blocks(k, v, keys, call):
            for tile in tiles(call.local_ranges, side.token_ranges, causal=call.is_causal):
                merged.merge(kernels.forward(work.make_block(side, tile)), tile.queries)
        out = merged.out.to(compute_dtype(q))
        ctx.save_for_backward(q, k, v, keys, rows, out, merged.lse)
        ctx.call = call
        return out.to(q.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, keys, rows, out, lse = ctx.saved_tensors
        work = _LocalQueries(q, rows, ctx.call)
        whole = SoftmaxTotals(grad_out.to(work.q.dtype).contiguous(), out, lse.masked_fill(lse == -INF, INF))
        gradients = _GradAccumulator(work, whole)
        if not any(ctx.needs_input_grad[1:3]):
            for _, side in _kv_blocks(k, v, keys, ctx.call):
                gradients.backward_block(side)
            return gradients.q.to(q.dtype), None, None, None, None, None
        collect = _scattered_kv_grads if ctx.call.gathers_kv else _ring_kv_grads
        grad_k, grad_v = collect(gradients, k, v, keys)
        return gradients.q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype), None, None, None


class _LocalQueries:
    """This rank's queries in the numbers they are computed in, and the blocks made of them."""

    def __init__(self, q: Tensor, rows: Tensor | None, call: RingCall) -> None:
        self.q, self.call = q.to(compute_dtype(q)), call
        self._query_mask, self._dropout_mask = rows, call.dropout_mask(q)

    def make_block(self, side: KVBlock, tile: Tile) -> AttentionBlock:
        (first, last), (start, stop) = tile.queries, tile.keys
        return AttentionBlock(
            self.q[:, :, first:last],
            side.k[:, :, start:stop].to(self.q.dtype),
            side.v[:, :, start:stop].to(self.q.dtype),
            self.call.scale,
            tile.causal,
            self._tile_mask(side, tile),
            self._tile_dropout_mask(side, tile),
        )

    def _tile_mask(self, side: KVBlock, tile: Tile) -> Tensor | None:
        if self._query_mask is not None:
            mask = masks.tile_mask(self._query_mask, tile.queries, masks.key_ranges(side.token_ranges, tile.keys))
            return masks.to_additive(mask, accumulation_dtype(self.q.dtype))
        if side.mask is not None:
            return side.mask[..., tile.keys[0] : tile.keys[1]].to(accumulation_dtype(self.q.dtype))
        return None

    def _tile_dropout_mask(self, side: KVBlock, tile: Tile) -> DropoutMask | None:
        draw = self._dropout_mask
        if draw is None:
            return None
        keys = self.call.token_positions(side.token_ranges, self.q.device)[slice(*tile.keys)]
        return DropoutMask(draw.dropout, draw.samples, draw.heads, draw.queries[slice(*tile.queries)], keys)


class _GradAccumulator:
    """dQ of this rank, added up over sides; dK and dV of one side after the other."""

    def __init__(self, queries: _LocalQueries, totals: SoftmaxTotals) -> None:
        self.queries, self._totals = queries, totals
        self.q = torch.zeros(queries.q.shape, dtype=accumulation_dtype(queries.q.dtype), device=queries.q.device)

    def backward_block(self, side: KVBlock) -> list[tuple[TokenRange, Tensor, Tensor]]:
        """(keys, their dK, their dV) by tile, as this rank's queries give them."""
        found = []
        for tile in tiles(self.queries.call.local_ranges, side.token_ranges, causal=self.queries.call.is_causal):
            grads = kernels.backward(self.queries.make_block(side, tile), self._totals.slice_rows(*tile.queries))
            self.q[:, :, slice(*tile.queries)] += grads.q
            found.append((tile.keys, grads.k, grads.v))
        return found


# ---- keys and values, and the way back of their gradients ---------------------------------------------


def _kv_blocks(k: Tensor, v: Tensor, keys: Tensor | None, call: RingCall) -> Iterator[tuple[int, KVBlock]]:
    """What this rank sees, one after the other, and whose it is."""
    parts = [k, v] if keys is None else [k, v, keys]
    if call.gathers_kv:
        sides = [
            _unpack_kv(block, parts, spans)
            for block, spans in zip(call.group.all_gather(parts), call.ranges_by_index, strict=True)
        ]
        yield call.group.index, _concat_kv(sides)
        return
    for owner, block in call.group.iterate_blocks(parts):
        yield owner, _unpack_kv(block, parts, call.ranges_by_index[owner])


def _unpack_kv(block: Tensor, parts: Sequence[Tensor], ranges: TokenRanges) -> KVBlock:
    views, start = [], 0
    for part in parts:
        views.append(block[start : start + part.numel()].view(part.shape))
        start += part.numel()
    return KVBlock(views[0], views[1], views[2] if len(views) > 2 else None, ranges)


def _concat_kv(sides: Sequence[KVBlock]) -> KVBlock:
    """All keys and values in the order of the whole sequence."""
    order = _ranges_in_order([side.token_ranges for side in sides])
    k, v = (
        torch.cat([tensors[place][:, :, start:stop] for place, (start, stop) in order], dim=2)
        for tensors in ([side.k for side in sides], [side.v for side in sides])
    )
    known = [side.mask for side in sides if side.mask is not None]
    mask = torch.cat([known[place][..., start:stop] for place, (start, stop) in order], dim=-1) if known else None
    return KVBlock(k, v, mask, tuple(sorted(span for side in sides for span in side.token_ranges)))


def _ranges_in_order(places: Sequence[TokenRanges]) -> list[tuple[int, TokenRange]]:
    """(place, [start, stop) among its tokens) of every span of every place, in the order of the whole sequence."""
    found = []
    for place, spans in enumerate(places):
        passed = 0
        for start, stop in spans:
            found.append((start, (place, (passed, passed + stop - start))))
            passed += stop - start
    return [where for _, where in sorted(found)]


def _ring_kv_grads(gradients: _GradAccumulator, k: Tensor, v: Tensor, keys: Tensor | None) -> tuple[Tensor, Tensor]:
    """dK and dV of this rank's keys: sums that go round, each rank adding its part; its own come last."""
    call, dtype = gradients.queries.call, accumulation_dtype(k.dtype)
    carry = call.group.make_accumulator(k.numel() + v.numel(), dtype, k.device)
    own: list[tuple[TokenRange, Tensor, Tensor]] = []
    for owner, side in _kv_blocks(k, v, keys, call):
        found = gradients.backward_block(side)
        if owner == call.group.index:
            own = found
        else:
            _add_grads(found, _unpack_kv(carry.receive(), (k, v), side.token_ranges))
            carry.send()
    total = _unpack_kv(carry.result(), (k, v), call.local_ranges)
    _add_grads(own, total)
    return total.k, total.v


def _add_grads(found: Sequence[tuple[TokenRange, Tensor, Tensor]], total: KVBlock) -> None:
    for keys, grad_k, grad_v in found:
        total.k[:, :, slice(*keys)] += grad_k
        total.v[:, :, slice(*keys)] += grad_v


def _scattered_kv_grads(
    gradients: _GradAccumulator, k: Tensor, v: Tensor, keys: Tensor | None
) -> tuple[Tensor, Tensor]:
    """dK and dV of this rank's keys: those of all keys, summed by their owners."""
    call, dtype = gradients.queries.call, accumulation_dtype(k.dtype)
    _, side = next(_kv_blocks(k, v, keys, call))
    grad_k, grad_v = (torch.zeros(t.shape, dtype=dtype, device=t.device) for t in (side.k, side.v))
    whole = KVBlock(grad_k, grad_v, None, side.token_ranges)
    _add_grads(gradients.backward_block(side), whole)
    parts = torch.empty(len(call.ranges_by_index), k.numel() + v.numel(), dtype=dtype, device=k.device)
    views = [_unpack_kv(part, (k, v), spans) for part, spans in zip(parts, call.ranges_by_index, strict=True)]
    passed = 0
    for place, (start, stop) in _ranges_in_order(call.ranges_by_index):
        those = slice(passed, passed + stop - start)
        views[place].k[:, :, start:stop] = whole.k[:, :, those]
        views[place].v[:, :, start:stop] = whole.v[:, :, those]
        passed += stop - start
    total = _unpack_kv(reduce_scatter(call.group, parts), (k, v), call.local_ranges)
    return total.k, total.v
