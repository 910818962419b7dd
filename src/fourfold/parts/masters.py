"""Masters: the update's own copy of the weights, in its own dtype and on its own device.

working weights  what the model computes with; they lie in the buckets' flats
master weights   what the update changes; of a bucket those that this rank updates, rounded into the working weights
Law: after every update, and every edit, a working weight is its master weight rounded; never the other way round.

Source: Micikevicius et al., "Mixed Precision Training" (2018), §3.1; ZeRO: Rajbhandari et al. (2020), §3.1.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fourfold.parts import memory
from fourfold.parts.comm import Transport
from fourfold.plan.data import Bucket


class Own(NamedTuple):
    """Master weights of a bucket, from element `start` on."""

    start: int
    flat: Tensor

    def part(self, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of the bucket."""
        return self.flat[start - self.start : stop - self.start]


class Want(NamedTuple):
    """What the update's own weights of a bucket are to be."""

    dtype: torch.dtype
    device: torch.device


class Masters:
    """The master weights of this rank, by bucket; None for a bucket whose working weights are updated themselves."""

    def __init__(
        self, buckets: Sequence[Bucket], transport: Transport, wants: Sequence[Want | None], *, split: bool
    ) -> None:
        self._buckets = buckets
        self.by_bucket: list[Own | None] = []
        for bucket, want in zip(buckets, wants, strict=True):
            first, last = transport.own(bucket.index)[:2] if split else (0, bucket.size)
            flat = None if want is None else memory.private(last - first, want.dtype, want.device)
            self.by_bucket.append(None if flat is None else Own(first, flat))
        self._places = {
            slot.name: (own, max(slot.start, own.start), min(slot.stop, own.start + own.flat.numel()), slot.start)
            for bucket, own in zip(buckets, self.by_bucket, strict=True)
            if own is not None
            for slot in bucket.slots
        }

    def __contains__(self, name: str) -> bool:
        """Whether the parameter has master weights."""
        return name in self._places

    @torch.no_grad()
    def put(self, name: str, value: Tensor) -> None:
        """Take this rank's share of a parameter's new value."""
        own, low, high, first = self._places[name]
        if low < high:
            own.part(low, high).copy_(value.reshape(-1)[low - first : high - first])

    def stretch(self, name: str) -> Tensor:
        """This rank's share of a parameter's master weights, as it lies; may be empty."""
        own, low, high, _ = self._places[name]
        return own.part(low, max(low, high))

    def stretches(self) -> Mapping[str, Tensor]:
        """By parameter: `stretch`."""
        return {name: self.stretch(name) for name in self._places}
