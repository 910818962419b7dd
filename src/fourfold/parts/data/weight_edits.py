"""Edits: whether somebody has written weights that the next update would overwrite, or that each rank would write.

edit    a change of a weight that is none of Fourfold's own
write   what torch counts for a parameter; it does not count what goes by `p.data`, NumPy or raw memory
sample  some elements of each parameter, whose bytes are compared from step to step on a CPU
Law: an edit that would be lost is reported before the next step, if torch counted it or the sample shows it.

Where the update has master weights they can be compared with all elements; that takes as long as to read them.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fourfold.parts.comm.reduce.protocol import BucketSlice
from fourfold.parts.data.param_access import untracked_access
from fourfold.parts.optim.master_weights import MasterWeights
from fourfold.parts.torch_private import version_of
from fourfold.plan.data.buckets import Bucket

NUM_SAMPLED_ELEMENTS = 4  # elements of a parameter


class WeightPair(NamedTuple):
    """A stretch of a bucket that this rank updates: what the model computes with, and what the update changes."""

    model_weight: Tensor
    master_weight: Tensor
    slots: Sequence[tuple[str, int, int]]
    """Names, and where they lie in the stretch."""

    def mismatched_params(self) -> list[str]:
        """The names of the parameters that are not their master weights, rounded."""
        rounded = self.master_weight.to(self.model_weight.device, self.model_weight.dtype)
        if torch.equal(self.model_weight, rounded):
            return []
        differs = (self.model_weight != rounded) & ~(self.model_weight.isnan() & rounded.isnan())
        return [name for name, low, high in self.slots if differs[low:high].any()]


class _WeightSample:
    """Some elements of each parameter of a bucket."""

    def __init__(self, flat: Tensor, bucket: Bucket) -> None:
        self._bytes: Any = flat.view(torch.uint8).numpy().view(f"V{flat.element_size()}")
        places = [
            np.linspace(slot.start, slot.stop - 1, NUM_SAMPLED_ELEMENTS).astype(np.int64) for slot in bucket.slots
        ]
        self._indices = np.concatenate(places)
        self.refresh()

    def refresh(self) -> None:
        """Remember their bytes of now."""
        self._saved_bytes = self._bytes[self._indices].tobytes()

    def changed_slots(self) -> list[int]:
        """The numbers of the slots whose elements are others than those kept."""
        now = self._bytes[self._indices].tobytes()
        if now == self._saved_bytes:
            return []
        size = NUM_SAMPLED_ELEMENTS * self._bytes.itemsize
        return [n for n in range(len(now) // size) if now[n * size :][:size] != self._saved_bytes[n * size :][:size]]


class WeightEdits:
    """Watches the trainable parameters of a step."""

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], buckets: Sequence[Bucket], flats: Sequence[Tensor] = ()
    ) -> None:
        """`flats`: the weights of the buckets, where a sample of them is to be compared."""
        self._names = [[slot.name for slot in bucket.slots] for bucket in buckets]
        self._parameters = [[parameters[name] for name in names] for names in self._names]
        on_cpu = all(flat.device.type == "cpu" for flat in flats)  # elsewhere a look at them would wait
        self._samples = (
            [_WeightSample(flat, b) for flat, b in zip(flats, buckets, strict=True)] if flats and on_cpu else []
        )
        self._pairs: list[WeightPair] = []
        self.accept_edits()

    def add_master_weights(
        self, buckets: Sequence[Bucket], shards: Sequence[BucketSlice], master_weights: MasterWeights
    ) -> None:
        """`differing` compares working weights, which lie in `homes`, with their master weights."""
        for bucket, home, own in zip(buckets, shards, master_weights.by_bucket, strict=True):
            if own is None or not own.flat.numel():
                continue
            size, first = own.flat.numel(), own.start
            slots = [(name, max(0, start - first), min(size, stop - first)) for name, start, stop in bucket.slots]
            working = home.flat[first - home.start : first - home.start + size]
            self._pairs.append(WeightPair(working, own.flat, [slot for slot in slots if slot[1] < slot[2]]))

    def increment_version(self, bucket: int) -> None:
        """Fourfold writes a bucket's weights: autograd refuses activations that were saved with the old ones."""
        with untracked_access():
            torch.autograd.graph.increment_version(self._parameters[bucket])
        self._versions[bucket] = [count + 1 for count in self._versions[bucket]]

    def refresh_samples(self) -> None:
        """Updates are done: what they have made of the weights is no edit. What was counted before still is one."""
        for sample in self._samples:
            sample.refresh()

    def accept_edits(self) -> None:
        """Training goes on from the weights of now, whoever wrote them."""
        self._versions = self._current_versions()
        self.refresh_samples()

    def _current_versions(self) -> list[list[int]]:
        with untracked_access():
            return [list(map(version_of, members)) for members in self._parameters]

    def edited_params(self, *, sampled: bool = True) -> list[str]:
        """The names of the parameters that somebody else has written, as far as counts and the sample show it."""
        counts = self._current_versions()
        names: dict[str, None] = {}
        if counts != self._versions:
            for members, mine, now in zip(self._names, self._versions, counts, strict=True):
                names |= dict.fromkeys(name for name, a, b in zip(members, mine, now, strict=True) if a != b)
        for members, sample in zip(self._names, self._samples if sampled else [], strict=False):
            names |= dict.fromkeys(members[number] for number in sample.changed_slots())
        return list(names)

    @torch.no_grad()
    def mismatched_params(self) -> list[str]:
        """The names of this rank's parameters that are not their master weights, rounded. Reads all of them."""
        return [name for pair in self._pairs for name in pair.mismatched_params()]
