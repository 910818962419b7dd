"""Sparse messages: the largest elements of a flat are chosen, and written as values and indices.

threshold  the least magnitude that is sent; at least the smallest normal number, so zeros are never sent
tie        an element whose magnitude is the threshold; if there are too many, the first ones are sent
Law: `kth_largest` is exact. The sample only narrows the search.

A NaN counts as larger than any number: it is sent, so every rank sees it, and it never waits in a residual.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fourfold.axes.data.rules.buckets import Bucket
from fourfold.plan.codec import INDEX_BLOCK, SparseSpec, unpadded_length

CHUNK_ELEMENTS = 2**18
SAMPLE_SIZE = 8192
HALF_BLOCK = INDEX_BLOCK // 2


def indices_above(flat: Tensor, threshold: float) -> Tensor:
    """Indices where |flat| is not below the threshold: int64, ascending. NaN is not below it."""
    if flat.device.type != "cpu":
        return (flat.abs() < threshold).logical_not_().nonzero().squeeze(1)
    chunks = []
    for start in range(0, flat.numel(), CHUNK_ELEMENTS):
        # numpy compares and searches 5 times as fast as torch on a CPU (docs/measured-notes.md, "Codecs").
        below = np.less(flat[start : start + CHUNK_ELEMENTS].abs().numpy(), threshold)
        indices = np.flatnonzero(np.logical_not(below, out=below))
        indices += start
        chunks.append(torch.from_numpy(indices))
    return chunks[0] if len(chunks) == 1 else torch.cat(chunks)


def kth_largest(flat: Tensor, count: int) -> float:
    """The `count`-th largest magnitude; NaN is the largest."""
    num_elements = flat.numel()
    if num_elements > 2 * SAMPLE_SIZE and count <= num_elements // 4:
        sample = flat[:: num_elements // SAMPLE_SIZE].abs()
        # A quarter and a few standard deviations beyond the expected rank: rarely too few candidates, never many.
        expected = count * sample.numel() / num_elements
        rank = min(sample.numel(), int(1.25 * expected + 4.0 * expected**0.5) + 1)
        guess = sample.kthvalue(sample.numel() - rank + 1).values.item()
        candidates = flat[indices_above(flat, guess)].abs()
        if candidates.numel() >= count:
            return candidates.kthvalue(candidates.numel() - count + 1).values.item()
    return flat.abs().kthvalue(num_elements - count + 1).values.item()


class Selection(NamedTuple):
    """The threshold that about as many elements reach as were asked for, and their indices, ascending."""

    threshold: float
    indices: Tensor


def select_largest(flat: Tensor, count: int, *, max_count: int) -> Selection:
    """The `count` largest elements: fewer if fewer are not zero, and up to `max_count` if there are ties."""
    least = kth_largest(flat, count)
    if not math.isfinite(least):
        return Selection(math.inf, _take_nonfinite(flat, max_count))
    threshold = max(least, torch.finfo(flat.dtype).tiny)
    indices = indices_above(flat, threshold)
    if indices.numel() > max_count:
        tied = flat[indices].abs() == threshold
        num_tied_sent = max_count - int(tied.logical_not().sum())
        indices = indices[tied.logical_not() | (tied.cumsum(0) <= num_tied_sent)]
    return Selection(threshold, indices)


def _take_nonfinite(flat: Tensor, max_count: int) -> Tensor:
    """Indices of up to `max_count` elements that are not finite. Further ones are set to 0."""
    indices = indices_above(flat, math.inf)
    flat.index_fill_(0, indices[max_count:], 0.0)
    return indices[:max_count]


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
        """Move the dense ranges and the elements at `indices` (ascending) from the residual to the message."""
        counts, values, offsets = self._sections(self.payload)
        position = 0
        for start, stop in self._layout.dense_ranges:
            self._move(residual[start:stop], values[position : position + stop - start])
            position += stop - start
        if self._layout.sparse_ranges:
            chosen = residual[indices]
            self._move(chosen, values[position : position + indices.numel()])
            residual.index_copy_(0, indices, chosen)
            counts.copy_(torch.bincount(indices >> 16, minlength=self._num_blocks))
            offsets[: indices.numel()] = (indices & (INDEX_BLOCK - 1)) - HALF_BLOCK
        return self.payload

    @staticmethod
    def _move(source: Tensor, target: Tensor) -> None:
        """Copy to the message. What its dtype cannot hold stays in the source; where it is not finite, nothing does."""
        target.copy_(source)
        if source.dtype == target.dtype:
            source.zero_()
        else:
            source.sub_(target).nan_to_num_(0.0, 0.0, 0.0)

    def add_to(self, payload: Tensor, out: Tensor) -> None:
        """Add a message to `out` [elements of the bucket]."""
        counts, values, offsets = self._sections(payload)
        position = 0
        for start, stop in self._layout.dense_ranges:
            out[start:stop].add_(values[position : position + stop - start])
            position += stop - start
        if self._layout.sparse_ranges:
            indices = torch.repeat_interleave(self._block_offsets, counts.long())
            indices += offsets[: indices.numel()]
            out.index_add_(0, indices, values[position : position + indices.numel()])

    def _sections(self, payload: Tensor) -> _Sections:
        width, num_values = self._dtype.itemsize, self._layout.num_dense + self._layout.capacity
        counts_start, values_start, indices_start = self._offsets
        num_counts = self._num_blocks if self._layout.sparse_ranges else 0
        return _Sections(
            payload[counts_start : counts_start + 4 * num_counts].view(torch.int32),
            payload[values_start : values_start + width * num_values].view(self._dtype),
            payload[indices_start : indices_start + 2 * self._layout.capacity].view(torch.int16),
        )
