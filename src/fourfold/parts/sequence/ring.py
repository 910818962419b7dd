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

from fourfold.parts.comm.links import RingGroup, reduce_scatter
from fourfold.parts.sequence import kernels, masks
from fourfold.parts.sequence.dropout import AttentionDropout, DropoutMask, sample_indices
from fourfold.parts.sequence.kernels import AttentionBlock, SoftmaxTotals, accumulation_dtype, compute_dtype
from fourfold.parts.sequence.merge import OnlineSoftmax
from fourfold.plan.sequence import Span, Spans, Tile, tiles

INF = float("inf")


@dataclass(frozen=True)
class Call:
    """One call of attention around a link. `places`: the spans of the whole sequence that each place keeps."""

    link: RingGroup
    places: tuple[Spans, ...]
    gathers: bool
    causal: bool
    scale: float
    dropout: AttentionDropout | None = None
    first_head: int = 0

    @property
    def mine(self) -> Spans:
        return self.places[self.link.index]

    def positions(self, spans: Spans, device: torch.device) -> Tensor:
        """int64: the places in the whole sequence of the tokens of some spans."""
        return torch.cat([torch.arange(start, stop, device=device) for start, stop in spans])

    def draw(self, like: Tensor) -> DropoutMask | None:
        """The draw for queries [B, H, l, K] of this place and no keys yet."""
        if self.dropout is None or self.dropout.p == 0.0:
            return None
        heads = torch.arange(self.first_head, self.first_head + like.shape[1], device=like.device)
        queries = self.positions(self.mine, like.device)
        return DropoutMask(
            self.dropout, sample_indices(self.dropout, like.shape[0], like.device), heads, queries, queries[:0]
        )


class Side(NamedTuple):
    """Keys k [B, G, c, K] and values v [B, G, c, V] of some spans, and the mask of these keys."""

    k: Tensor
    v: Tensor
    mask: Tensor | None
    spans: Spans


def attend(q: Tensor, k: Tensor, v: Tensor, mask: masks.Mask, call: Call) -> Tensor:
    """q [B, H, l, K], k [B, G, l, K], v [B, G, l, V] -> [B, H, l, V]"""
    return _Attend.apply(q, k, v, mask.key_mask, mask.query_mask, call)  # pyright: ignore[reportReturnType]


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, keys: Tensor | None, rows: Tensor | None, call: Call):
        work = _Work(q, rows, call)
        merged = OnlineSoftmax(torch.Size((*q.shape[:-1], v.shape[-1])), work.q.dtype, q.device)
        for _, side in _sides(k, v, keys, call):
            for tile in tiles(call.mine, side.spans, causal=call.causal):
                merged.merge(kernels.forward(work.block(side, tile)), tile.queries)
        out = merged.out.to(compute_dtype(q))
        ctx.save_for_backward(q, k, v, keys, rows, out, merged.lse)
        ctx.call = call
        return out.to(q.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, keys, rows, out, lse = ctx.saved_tensors
        work = _Work(q, rows, ctx.call)
        whole = SoftmaxTotals(grad_out.to(work.q.dtype).contiguous(), out, lse.masked_fill(lse == -INF, INF))
        gradients = _Gradients(work, whole)
        if not any(ctx.needs_input_grad[1:3]):
            for _, side in _sides(k, v, keys, ctx.call):
                gradients.of(side)
            return gradients.q.to(q.dtype), None, None, None, None, None
        collect = _gather_back if ctx.call.gathers else _carry_back
        grad_k, grad_v = collect(gradients, k, v, keys)
        return gradients.q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype), None, None, None


class _Work:
    """This rank's queries in the numbers they are computed in, and the blocks made of them."""

    def __init__(self, q: Tensor, rows: Tensor | None, call: Call) -> None:
        self.q, self.call = q.to(compute_dtype(q)), call
        self._rows, self._draw = rows, call.draw(q)

    def block(self, side: Side, tile: Tile) -> AttentionBlock:
        (first, last), (start, stop) = tile.queries, tile.keys
        return AttentionBlock(
            self.q[:, :, first:last],
            side.k[:, :, start:stop].to(self.q.dtype),
            side.v[:, :, start:stop].to(self.q.dtype),
            self.call.scale,
            tile.causal,
            self._mask(side, tile),
            self._drawn(side, tile),
        )

    def _mask(self, side: Side, tile: Tile) -> Tensor | None:
        if self._rows is not None:
            mask = masks.tile_mask(self._rows, tile.queries, masks.key_ranges(side.spans, tile.keys))
            return masks.to_additive(mask, accumulation_dtype(self.q.dtype))
        if side.mask is not None:
            return side.mask[..., tile.keys[0] : tile.keys[1]].to(accumulation_dtype(self.q.dtype))
        return None

    def _drawn(self, side: Side, tile: Tile) -> DropoutMask | None:
        draw = self._draw
        if draw is None:
            return None
        keys = self.call.positions(side.spans, self.q.device)[slice(*tile.keys)]
        return DropoutMask(draw.dropout, draw.samples, draw.heads, draw.queries[slice(*tile.queries)], keys)


class _Gradients:
    """dQ of this rank, added up over sides; dK and dV of one side after the other."""

    def __init__(self, work: _Work, whole: SoftmaxTotals) -> None:
        self.work, self._whole = work, whole
        self.q = torch.zeros(work.q.shape, dtype=accumulation_dtype(work.q.dtype), device=work.q.device)

    def of(self, side: Side) -> list[tuple[Span, Tensor, Tensor]]:
        """(keys, their dK, their dV) by tile, as this rank's queries give them."""
        found = []
        for tile in tiles(self.work.call.mine, side.spans, causal=self.work.call.causal):
            grads = kernels.backward(self.work.block(side, tile), self._whole.slice_rows(*tile.queries))
            self.q[:, :, slice(*tile.queries)] += grads.q
            found.append((tile.keys, grads.k, grads.v))
        return found


# ---- keys and values, and the way back of their gradients ---------------------------------------------


def _sides(k: Tensor, v: Tensor, keys: Tensor | None, call: Call) -> Iterator[tuple[int, Side]]:
    """What this rank sees, one after the other, and whose it is."""
    parts = [k, v] if keys is None else [k, v, keys]
    if call.gathers:
        sides = [
            _split(block, parts, spans) for block, spans in zip(call.link.all_gather(parts), call.places, strict=True)
        ]
        yield call.link.index, _joined(sides)
        return
    for owner, block in call.link.iterate_blocks(parts):
        yield owner, _split(block, parts, call.places[owner])


def _split(block: Tensor, parts: Sequence[Tensor], spans: Spans) -> Side:
    views, start = [], 0
    for part in parts:
        views.append(block[start : start + part.numel()].view(part.shape))
        start += part.numel()
    return Side(views[0], views[1], views[2] if len(views) > 2 else None, spans)


def _joined(sides: Sequence[Side]) -> Side:
    """All keys and values in the order of the whole sequence."""
    order = _in_order([side.spans for side in sides])
    k, v = (
        torch.cat([tensors[place][:, :, start:stop] for place, (start, stop) in order], dim=2)
        for tensors in ([side.k for side in sides], [side.v for side in sides])
    )
    known = [side.mask for side in sides if side.mask is not None]
    mask = torch.cat([known[place][..., start:stop] for place, (start, stop) in order], dim=-1) if known else None
    return Side(k, v, mask, tuple(sorted(span for side in sides for span in side.spans)))


def _in_order(places: Sequence[Spans]) -> list[tuple[int, Span]]:
    """(place, [start, stop) among its tokens) of every span of every place, in the order of the whole sequence."""
    found = []
    for place, spans in enumerate(places):
        passed = 0
        for start, stop in spans:
            found.append((start, (place, (passed, passed + stop - start))))
            passed += stop - start
    return [where for _, where in sorted(found)]


def _carry_back(gradients: _Gradients, k: Tensor, v: Tensor, keys: Tensor | None) -> tuple[Tensor, Tensor]:
    """dK and dV of this rank's keys: sums that go round, each rank adding its part; its own come last."""
    call, dtype = gradients.work.call, accumulation_dtype(k.dtype)
    carry = call.link.make_accumulator(k.numel() + v.numel(), dtype, k.device)
    own: list[tuple[Span, Tensor, Tensor]] = []
    for owner, side in _sides(k, v, keys, call):
        found = gradients.of(side)
        if owner == call.link.index:
            own = found
        else:
            _add(found, _split(carry.receive(), (k, v), side.spans))
            carry.send()
    total = _split(carry.result(), (k, v), call.mine)
    _add(own, total)
    return total.k, total.v


def _add(found: Sequence[tuple[Span, Tensor, Tensor]], total: Side) -> None:
    for keys, grad_k, grad_v in found:
        total.k[:, :, slice(*keys)] += grad_k
        total.v[:, :, slice(*keys)] += grad_v


def _gather_back(gradients: _Gradients, k: Tensor, v: Tensor, keys: Tensor | None) -> tuple[Tensor, Tensor]:
    """dK and dV of this rank's keys: those of all keys, summed by their owners."""
    call, dtype = gradients.work.call, accumulation_dtype(k.dtype)
    _, side = next(_sides(k, v, keys, call))
    grad_k, grad_v = (torch.zeros(t.shape, dtype=dtype, device=t.device) for t in (side.k, side.v))
    whole = Side(grad_k, grad_v, None, side.spans)
    _add(gradients.of(side), whole)
    parts = torch.empty(len(call.places), k.numel() + v.numel(), dtype=dtype, device=k.device)
    views = [_split(part, (k, v), spans) for part, spans in zip(parts, call.places, strict=True)]
    passed = 0
    for place, (start, stop) in _in_order(call.places):
        those = slice(passed, passed + stop - start)
        views[place].k[:, :, start:stop] = whole.k[:, :, those]
        views[place].v[:, :, start:stop] = whole.v[:, :, those]
        passed += stop - start
    total = _split(reduce_scatter(call.link, parts), (k, v), call.mine)
    return total.k, total.v
