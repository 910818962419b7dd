"""Layout: where things lie in the memory that the ranks of one host share.

region   one rank's part of the mapping: its flags, calls, scalars and gradient buffers, as far as they are asked for
flag     an int64 that only its owner writes, in a cache line of its own
buffer   room for a bucket's gradients; buckets with the same buffer index share one
staging  buffers through which split weights come from other hosts
Law: pure arithmetic, the same on every rank; tensors are views of the mapping.
"""

import mmap
from collections.abc import Sequence

import torch

from fourfold.axes.data.rules.unshard_order import NUM_STAGING_BUFFERS
from fourfold.comm.reduce.collective_fingerprint import BOARD_BYTES

FLAG_STRIDE = 8  # int64s: a cache line of its own for each flag
(
    GRADS_READY,
    REDUCED,
    SCALED,
    BACKWARD_DONE,
    WEIGHTS_READY,
    STEP_ENDED,
    CALL_BEGUN,
    STAGED,
    COPIED,
    SCALARS_READY,
) = range(10)
NUM_SCALAR_KINDS = 5  # room for those of `words.program`
NUM_FLAGS = SCALARS_READY + NUM_SCALAR_KINDS
ALIGNMENT_BYTES = 4096


class SharedMemoryLayout:
    """A region per rank: flags, calls, scalars, gradient buffers; behind all regions weights or staging buffers.

    has_call_board  whether ranks compare their calls here
    weight_dtypes   dtypes of the buckets' weights if they exist once per host, else empty
    staging_dtypes  dtypes of the buckets' weights if they rest split between hosts, else empty
    """

    def __init__(
        self,
        sizes: Sequence[int] = (),
        dtypes: Sequence[torch.dtype] = (),
        *,
        num_scalars: int = 0,
        has_call_board: bool = False,
        buffer_indices: Sequence[int] | None = None,
        weight_dtypes: Sequence[torch.dtype] = (),
        staging_dtypes: Sequence[torch.dtype] = (),
    ) -> None:
        self.sizes, self.dtypes, self.num_scalars = tuple(sizes), tuple(dtypes), num_scalars
        self.weight_dtypes = tuple(weight_dtypes)
        self.buffer_indices = tuple(buffer_indices if buffer_indices is not None else range(len(sizes)))
        self.calls_offset = 8 * FLAG_STRIDE * NUM_FLAGS
        flags = _align(self.calls_offset + (BOARD_BYTES if has_call_board else 0))
        # Two copies of the scalars, used alternately: no rank is ever two all-reduces ahead of another.
        scalars = _align(8 * num_scalars * NUM_SCALAR_KINDS * 2)
        self.scalars_offset, offset = flags, flags + scalars
        lengths = _aligned_bytes(self.sizes, self.dtypes)
        starts = {}
        for index in dict.fromkeys(self.buffer_indices):
            starts[index] = offset
            offset += max(length for length, each in zip(lengths, self.buffer_indices, strict=True) if each == index)
        self.buffer_offsets = [starts[index] for index in self.buffer_indices]
        self.region_bytes = offset
        lengths = _aligned_bytes(self.sizes, self.weight_dtypes) if weight_dtypes else []
        self.weights_bytes = sum(lengths)
        self.weight_offsets = [sum(lengths[:bucket]) for bucket in range(len(lengths))]
        self.staging_bytes = max(_aligned_bytes(self.sizes, staging_dtypes)) if staging_dtypes else 0

    def total_bytes(self, size: int) -> int:
        """Bytes of the mapping for `size` ranks."""
        return size * self.region_bytes + self.weights_bytes + NUM_STAGING_BUFFERS * self.staging_bytes


def _aligned_bytes(sizes: Sequence[int], dtypes: Sequence[torch.dtype]) -> list[int]:
    return [_align(size * dtype.itemsize) for size, dtype in zip(sizes, dtypes, strict=True)]


def _align(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def view_grad_buffers(mapping: mmap.mmap, layout: SharedMemoryLayout, region: int) -> list[torch.Tensor]:
    """A rank's gradient buffer of each bucket."""
    start = region * layout.region_bytes
    return [
        torch.frombuffer(mapping, dtype=dtype, count=size, offset=start + offset)
        for size, dtype, offset in zip(layout.sizes, layout.dtypes, layout.buffer_offsets, strict=True)
    ]


def view_weights(mapping: mmap.mmap, layout: SharedMemoryLayout, start: int) -> list[torch.Tensor]:
    """The weights of each bucket, which begin at byte `start`."""
    return [
        torch.frombuffer(mapping, dtype=dtype, count=size, offset=start + offset)
        for size, dtype, offset in zip(layout.sizes, layout.weight_dtypes, layout.weight_offsets, strict=True)
    ]


def view_staging_buffers(mapping: mmap.mmap, layout: SharedMemoryLayout, start: int) -> list[torch.Tensor]:
    """The bytes of each staging buffer; the first begins at byte `start`."""
    length = layout.staging_bytes
    return [
        torch.frombuffer(mapping, dtype=torch.uint8, count=length, offset=start + number * length)
        for number in range(NUM_STAGING_BUFFERS)
    ]


def view_scalars(mapping: mmap.mmap, layout: SharedMemoryLayout, region: int) -> torch.Tensor:
    """float64 [kind, parity, scalar]"""
    count = NUM_SCALAR_KINDS * 2 * layout.num_scalars
    offset = region * layout.region_bytes + layout.scalars_offset
    flat = torch.frombuffer(mapping, dtype=torch.float64, count=count, offset=offset)
    return flat.view(NUM_SCALAR_KINDS, 2, layout.num_scalars)
