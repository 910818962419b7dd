"""Entries: choosing the largest elements of a flat, and writing them into sparse messages.

threshold  the magnitude from which an element is sent; never below the smallest normal number, so zeros never are
tie        an element whose magnitude is the threshold; of too many the first are taken
Law: `kth_largest` is exact; a sample only tells where to look.

A NaN counts as larger than anything: it is sent, and so seen, and never waits in a remainder.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fourfold.plan.codec import INDEX_BLOCK, SparseSpec, unpadded_length
from fourfold.plan.data.buckets import Bucket

CHUNK_ELEMENTS = 2**18
SAMPLE_SIZE = 8192
HALF_BLOCK = INDEX_BLOCK // 2


def indices_above(flat: Tensor, threshold: float) -> Tensor:
    """Where |flat| is not below the threshold: int64, ascending."""
    if flat.device.type != "cpu":
        return (flat.abs() < threshold).logical_not_().nonzero().squeeze(1)
    found = []
    for start in range(0, flat.numel(), CHUNK_ELEMENTS):
        # numpy compares and searches 5 times as fast as torch on a CPU (docs/measured.md, "Codecs").
        below = np.less(flat[start : start + CHUNK_ELEMENTS].abs().numpy(), threshold)
        places = np.flatnonzero(np.logical_not(below, out=below))
        places += start
        found.append(torch.from_numpy(places))
    return found[0] if len(found) == 1 else torch.cat(found)


def kth_largest(flat: Tensor, count: int) -> float:
    """The `count`-th largest magnitude, NaN the largest."""
    num_elements = flat.numel()
    if num_elements > 2 * SAMPLE_SIZE and count <= num_elements // 4:
        sample = flat[:: num_elements // SAMPLE_SIZE].abs()
        # A quarter more than the expected rank, and a few standard deviations: rarely too few, never many.
        expected = count * sample.numel() / num_elements
        rank = min(sample.numel(), int(1.25 * expected + 4.0 * expected**0.5) + 1)
        guess = sample.kthvalue(sample.numel() - rank + 1).values.item()
        candidates = flat[indices_above(flat, guess)].abs()
        if candidates.numel() >= count:
            return candidates.kthvalue(candidates.numel() - count + 1).values.item()
    return flat.abs().kthvalue(num_elements - count + 1).values.item()


class Selection(NamedTuple):
    """The threshold that lets about as many elements through as were asked for, and where those are, ascending."""

    threshold: float
    indices: Tensor


def select_largest(flat: Tensor, count: int, *, max_count: int) -> Selection:
    """The `count` largest elements: fewer where fewer are not zero, and up to `most` where there are ties."""
    found = kth_largest(flat, count)
    if not math.isfinite(found):
        return Selection(math.inf, _take_nonfinite(flat, max_count))
    threshold = max(found, torch.finfo(flat.dtype).tiny)
    places = indices_above(flat, threshold)
    if places.numel() > max_count:
        tied = flat[places].abs() == threshold
        spare = max_count - int(tied.logical_not().sum())
        places = places[tied.logical_not() | (tied.cumsum(0) <= spare)]
    return Selection(threshold, places)


def _take_nonfinite(flat: Tensor, max_count: int) -> Tensor:
    """Places of up to `most` elements that are not finite; what else is not finite is forgotten."""
    places = indices_above(flat, math.inf)
    flat.index_fill_(0, places[max_count:], 0.0)
    return places[:max_count]


class _Sections(NamedTuple):
    """The sections of a sparse message: views."""

    counts: Tensor
    values: Tensor
    indices: Tensor


class SparseMessage:
    """The sparse message of a bucket: written by one rank, read by all."""

    def __init__(self, layout: SparseSpec, bucket: Bucket, dtype: torch.dtype, device: torch.device) -> None:
        self._layout, self._dtype = layout, dtype
        self._offsets, num_bytes = layout.message_layout(bucket)
        self.payload = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._num_blocks = -(-unpadded_length(bucket) // INDEX_BLOCK)
        self._block_offsets = torch.arange(self._num_blocks, device=device) * INDEX_BLOCK + HALF_BLOCK

    def write(self, residual: Tensor, indices: Tensor) -> Tensor:
        """Move the whole stretches and the elements at `places` (ascending) from the remainder to the message."""
        counts, values, offsets = self._sections(self.payload)
        at = 0
        for start, stop in self._layout.dense_ranges:
            self._move(residual[start:stop], values[at : at + stop - start])
            at += stop - start
        if self._layout.sparse_ranges:
            taken = residual[indices]
            self._move(taken, values[at : at + indices.numel()])
            residual.index_copy_(0, indices, taken)
            counts.copy_(torch.bincount(indices >> 16, minlength=self._num_blocks))
            offsets[: indices.numel()] = (indices & (INDEX_BLOCK - 1)) - HALF_BLOCK
        return self.payload

    @staticmethod
    def _move(source: Tensor, target: Tensor) -> None:
        """Copy to the message; what its dtype cannot hold stays, except of what is not finite."""
        target.copy_(source)
        if source.dtype == target.dtype:
            source.zero_()
        else:
            source.sub_(target).nan_to_num_(0.0, 0.0, 0.0)

    def add_to(self, payload: Tensor, out: Tensor) -> None:
        """Add a message to `out` [length]."""
        counts, values, offsets = self._sections(payload)
        at = 0
        for start, stop in self._layout.dense_ranges:
            out[start:stop].add_(values[at : at + stop - start])
            at += stop - start
        if self._layout.sparse_ranges:
            places = torch.repeat_interleave(self._block_offsets, counts.long())
            places += offsets[: places.numel()]
            out.index_add_(0, places, values[at : at + places.numel()])

    def _sections(self, payload: Tensor) -> _Sections:
        width, num_values = self._dtype.itemsize, self._layout.num_dense + self._layout.capacity
        counts, values, places = self._offsets
        num_counts = self._num_blocks if self._layout.sparse_ranges else 0
        return _Sections(
            payload[counts : counts + 4 * num_counts].view(torch.int32),
            payload[values : values + width * num_values].view(self._dtype),
            payload[places : places + 2 * self._layout.capacity].view(torch.int16),
        )
