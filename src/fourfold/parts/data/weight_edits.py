"""Weight edits: whether the user's code has changed weights in a way that the next update would overwrite.

edit     a change of a weight that Fourfold did not make
version  torch's count of writes into a parameter; it misses writes through `p.data`, NumPy or raw memory
probe    a few elements of each parameter (`_WeightSample`), whose bytes are compared from step to step on CPUs
Law: an edit that would be lost is reported before the next step, if the version counts it or the probe shows it.

With master weights, `mismatched_params` compares every element; that takes as long as reading them.
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

NUM_SAMPLED_ELEMENTS = 4  # per parameter


class WeightPair(NamedTuple):
    """A part of a bucket that this rank updates: model weights and their master weights."""

    model_weight: Tensor
    master_weight: Tensor
    slots: Sequence[tuple[str, int, int]]
    """Name, start and stop of each parameter in this part."""

    def mismatched_params(self) -> list[str]:
        """The names of the parameters that differ from their rounded master weights."""
        rounded = self.master_weight.to(self.model_weight.device, self.model_weight.dtype)
        if torch.equal(self.model_weight, rounded):
            return []
        differs = (self.model_weight != rounded) & ~(self.model_weight.isnan() & rounded.isnan())
        return [name for name, low, high in self.slots if differs[low:high].any()]


class _WeightSample:
    """Some elements of each parameter of a bucket."""

    def __init__(self, flat: Tensor, bucket: Bucket) -> None:
        self._bytes: Any = flat.view(torch.uint8).numpy().view(f"V{flat.element_size()}")
        indices = [
            np.linspace(slot.start, slot.stop - 1, NUM_SAMPLED_ELEMENTS).astype(np.int64) for slot in bucket.slots
        ]
        self._indices = np.concatenate(indices)
        self.refresh()

    def refresh(self) -> None:
        """Remember the current bytes."""
        self._saved_bytes = self._bytes[self._indices].tobytes()

    def changed_slots(self) -> list[int]:
        """The indices of the slots whose sampled bytes have changed."""
        now = self._bytes[self._indices].tobytes()
        if now == self._saved_bytes:
            return []
        size = NUM_SAMPLED_ELEMENTS * self._bytes.itemsize
        return [n for n in range(len(now) // size) if now[n * size :][:size] != self._saved_bytes[n * size :][:size]]


class WeightEdits:
    """Watches the trainable parameters of a step."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        buckets: Sequence[Bucket],
        flats: Sequence[Tensor] = (),
        *,
        is_sharded: bool = False,
    ) -> None:
        """`flats`: the weights of the buckets, if samples of them are to be compared.

        `is_sharded`: between steps the parameters are placeholders, and only their versions are compared.
        """
        self._is_sharded, flats = is_sharded, () if is_sharded else flats
        self._names = [[slot.name for slot in bucket.slots] for bucket in buckets]
        self._parameters = [[parameters[name] for name in names] for names in self._names]
        on_cpu = all(flat.device.type == "cpu" for flat in flats)  # reading them on another device would wait
        self._samples = (
            [_WeightSample(flat, b) for flat, b in zip(flats, buckets, strict=True)] if flats and on_cpu else []
        )
        self._pairs: list[WeightPair] = []
        self.accept_edits()

    def add_master_weights(
        self, buckets: Sequence[Bucket], shards: Sequence[BucketSlice], master_weights: MasterWeights
    ) -> None:
        """From now on `mismatched_params` compares model weights, which are in `shards`, with their master weights."""
        for bucket, shard, master in zip(buckets, shards, master_weights.by_bucket, strict=True):
            if self._is_sharded:
                return
            if master is None or not master.flat.numel():
                continue
            size, offset = master.flat.numel(), master.start
            slots = [(name, max(0, start - offset), min(size, stop - offset)) for name, start, stop in bucket.slots]
            model_weight = shard.flat[offset - shard.start : offset - shard.start + size]
            self._pairs.append(WeightPair(model_weight, master.flat, [slot for slot in slots if slot[1] < slot[2]]))

    def increment_version(self, bucket: int) -> None:
        """Count a write of Fourfold's own, so that autograd refuses a backward through the old weights."""
        with untracked_access():
            torch.autograd.graph.increment_version(self._parameters[bucket])
        self._versions[bucket] = [count + 1 for count in self._versions[bucket]]

    def refresh_samples(self) -> None:
        """After updates: what they wrote is no edit. Edits that versions have counted stay edits."""
        for sample in self._samples:
            sample.refresh()

    def accept_edits(self) -> None:
        """Continue from the current weights, whatever wrote them."""
        self._versions = self._current_versions()
        self.refresh_samples()

    def _current_versions(self) -> list[list[int]]:
        with untracked_access():
            return [list(map(version_of, members)) for members in self._parameters]

    def edited_params(self, *, sampled: bool = True) -> list[str]:
        """The names of the parameters that were edited, as far as versions and samples show it."""
        versions = self._current_versions()
        names: dict[str, None] = {}
        if versions != self._versions:
            for members, before, now in zip(self._names, self._versions, versions, strict=True):
                names |= dict.fromkeys(name for name, a, b in zip(members, before, now, strict=True) if a != b)
        for members, sample in zip(self._names, self._samples if sampled else [], strict=False):
            names |= dict.fromkeys(members[index] for index in sample.changed_slots())
        return list(names)

    @torch.no_grad()
    def mismatched_params(self) -> list[str]:
        """The names of this rank's parameters that differ from their rounded master weights. Reads all elements."""
        return [name for pair in self._pairs for name in pair.mismatched_params()]
