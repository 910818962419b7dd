"""KV blocks: the keys and values that a rank attends to at one time.

block  with a ring, the keys and values of one rank, one after the other; with "gather", all of them at once
B batch · G key and value heads · l tokens of a rank · c tokens of a block · K, V head sizes
Law: keys, values and key mask travel in one flat message.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fourfold.parts.sequence.ring_call import RingCall
from fourfold.plan.sequence import TokenRange, TokenRanges


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
    views, start = [], 0
    for part in parts:
        views.append(flat[start : start + part.numel()].view(part.shape))
        start += part.numel()
    return KVBlock(views[0], views[1], views[2] if len(views) > 2 else None, ranges)


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
    found = []
    for index, ranges in enumerate(ranges_by_index):
        num_before = 0
        for start, stop in ranges:
            found.append((start, (index, (num_before, num_before + stop - start))))
            num_before += stop - start
    return [local_range for _, local_range in sorted(found)]
