"""Slotting: where things lie in the memory that the ranks of one host share.

region   one rank's part of the mapping: its flags, its calls, its scalars, its slots
flag     an int64 that only its owner writes, in a cache line of its own
slot     room for a bucket's gradients; buckets with the same turn share one
Law: pure arithmetic, the same on every rank; tensors are views of the mapping.
"""

import mmap
from collections.abc import Sequence

import torch

from fourfold.parts.comm.calls import BOARD_BYTES
from fourfold.plan.gathers import NUM_STAGES

FLAG_STRIDE = 8  # int64s: a cache line of its own for each flag
LAUNCHED, SUMMED, SCALED, PERMITTED, UPDATED, CLOSED, DEAD, CALLED, STAGED, TAKEN, MEASURED = range(11)
NUM_MEASURES = 4
NUM_FLAGS = MEASURED + NUM_MEASURES
ALIGNMENT_BYTES = 4096


class Slotting:
    """Where things lie. Pure arithmetic, the same on every rank.

    A region a rank: flags, calls, scalars, then slots, of which buckets with the same turn share one. Behind the
    regions, where weights are to exist once per host: their flats, `weights` their dtypes. Where they rest split
    between hosts: the stages through which they come, `stages` their dtypes.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        dtypes: Sequence[torch.dtype],
        *,
        num_scalars: int,
        turns: Sequence[int] | None = None,
        weights: Sequence[torch.dtype] = (),
        stages: Sequence[torch.dtype] = (),
    ) -> None:
        self.sizes, self.dtypes, self.num_scalars = tuple(sizes), tuple(dtypes), num_scalars
        self.weight_dtypes = tuple(weights)
        self.turns = tuple(turns if turns is not None else range(len(sizes)))
        self.calls_offset = 8 * FLAG_STRIDE * NUM_FLAGS
        flags = _aligned(self.calls_offset + BOARD_BYTES)
        # Two copies of the scalars, by turns: a rank is never two measures ahead of another.
        scalars = _aligned(8 * num_scalars * NUM_MEASURES * 2)
        self.scalars_offset, offset = flags, flags + scalars
        lengths = _lengths(self.sizes, self.dtypes)
        starts = {}
        for turn in dict.fromkeys(self.turns):
            starts[turn] = offset
            offset += max(length for length, each in zip(lengths, self.turns, strict=True) if each == turn)
        self.offsets = [starts[turn] for turn in self.turns]
        self.region_bytes = offset
        lengths = _lengths(self.sizes, self.weight_dtypes) if weights else []
        self.weights_bytes = sum(lengths)
        self.weight_offsets = [sum(lengths[:bucket]) for bucket in range(len(lengths))]
        self.stage_bytes = max(_lengths(self.sizes, stages)) if stages else 0

    def total_bytes(self, size: int) -> int:
        """Of the mapping of `size` ranks."""
        return size * self.region_bytes + self.weights_bytes + NUM_STAGES * self.stage_bytes


def _lengths(sizes: Sequence[int], dtypes: Sequence[torch.dtype]) -> list[int]:
    return [_aligned(size * dtype.itemsize) for size, dtype in zip(sizes, dtypes, strict=True)]


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def slots_of(mapping: mmap.mmap, slotting: Slotting, region: int) -> list[torch.Tensor]:
    """A rank's slot of each bucket."""
    start = region * slotting.region_bytes
    return [
        torch.frombuffer(mapping, dtype=dtype, count=size, offset=start + offset)
        for size, dtype, offset in zip(slotting.sizes, slotting.dtypes, slotting.offsets, strict=True)
    ]


def weights_of(mapping: mmap.mmap, slotting: Slotting, start: int) -> list[torch.Tensor]:
    """The weights of each bucket, once per host, from byte `start` on."""
    return [
        torch.frombuffer(mapping, dtype=dtype, count=size, offset=start + offset)
        for size, dtype, offset in zip(slotting.sizes, slotting.weight_dtypes, slotting.weight_offsets, strict=True)
    ]


def stages_of(mapping: mmap.mmap, slotting: Slotting, start: int) -> list[torch.Tensor]:
    """The bytes of each stage, from byte `start` on."""
    length = slotting.stage_bytes
    return [
        torch.frombuffer(mapping, dtype=torch.uint8, count=length, offset=start + number * length)
        for number in range(NUM_STAGES)
    ]


def scalars_of(mapping: mmap.mmap, slotting: Slotting, region: int) -> torch.Tensor:
    """float64 [kind, turn, scalar]"""
    count = NUM_MEASURES * 2 * slotting.num_scalars
    offset = region * slotting.region_bytes + slotting.scalars_offset
    flat = torch.frombuffer(mapping, dtype=torch.float64, count=count, offset=offset)
    return flat.view(NUM_MEASURES, 2, slotting.num_scalars)
