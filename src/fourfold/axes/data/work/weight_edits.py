"""Weight edits: whether the user's code has changed weights in a way that the next update would overwrite.

edit     a change of a weight that Fourfold did not make
version  torch's count of writes into a parameter; it misses writes through `p.data`, NumPy or raw memory
probe    a few elements of each parameter (`_WeightSample`), whose bytes are compared from step to step on CPUs
Law: an edit that would be lost is reported before the next step, if the version counts it or the probe shows it.

With master weights, `compare_all` compares every element; that takes as long as reading them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fourfold.axes.data.rules.buckets import Bucket
from fourfold.optim.master_weights import MasterWeights
from fourfold.torch_kit.param_access import untracked_access
from fourfold.torch_kit.torch_private import version_of
from fourfold.words.errors import Problem

NUM_SAMPLED_ELEMENTS = 4  # per parameter


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


class TrainedEdits:
    """Watches the trainable parameters of a step; training continues from every edit."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], buckets: Sequence[Bucket]) -> None:
        self._parameters = [[parameters[slot.name] for slot in bucket.slots] for bucket in buckets]

    def increment_version(self, bucket: int) -> None:
        """Count a write of Fourfold's own, so that autograd refuses a backward through the old weights."""
        with untracked_access():
            torch.autograd.graph.increment_version(self._parameters[bucket])

    def refresh_samples(self) -> None:
        """After updates: what they wrote is no edit. Edits that versions have counted stay edits."""

    def accept_edits(self) -> None:
        """Continue from the current weights, whatever wrote them."""

    def problems(self, *, compare_all: bool, sampled: bool) -> list[Problem]:
        """The edits that would be lost. `compare_all` reads all weights, `sampled` only samples of them."""
        return []


class RefusedEdits(TrainedEdits):
    """The next update would overwrite edits, or not see them."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        buckets: Sequence[Bucket],
        flats: Sequence[Tensor],
        master_weights: MasterWeights,
        reason: str,
    ) -> None:
        """`flats`: the weights of the buckets; none where parameters are placeholders, of which only versions matter.

        `reason`: why edits would be lost.
        """
        super().__init__(parameters, buckets)
        self._names = [[slot.name for slot in bucket.slots] for bucket in buckets]
        self._flats, self._master_weights, self._reason = flats, master_weights, reason
        on_cpu = all(flat.device.type == "cpu" for flat in flats)  # reading them on another device would wait
        self._samples = [_WeightSample(flat, bucket) for flat, bucket in zip(flats, buckets, strict=False) if on_cpu]
        self.accept_edits()

    def increment_version(self, bucket: int) -> None:
        super().increment_version(bucket)
        self._versions[bucket] = [count + 1 for count in self._versions[bucket]]

    def refresh_samples(self) -> None:
        for sample in self._samples:
            sample.refresh()

    def accept_edits(self) -> None:
        self._versions = self._current_versions()
        self.refresh_samples()

    def problems(self, *, compare_all: bool, sampled: bool) -> list[Problem]:
        names = self._edited_params(sampled=sampled)
        if compare_all:
            names += self._master_weights.mismatched_params(self._flats)
        if not names:
            return []
        more = len(set(names)) - 1
        got = f"{names[0]}{f' and {more} more' if more else ''}, written outside of step.edit()"
        need = f"step.edit() or step.load_weights(…): {self._reason}"
        return [Problem(got, need, "with step.edit() as model: …")]

    def _current_versions(self) -> list[list[int]]:
        with untracked_access():
            return [list(map(version_of, members)) for members in self._parameters]

    def _edited_params(self, *, sampled: bool) -> list[str]:
        """The names of the parameters that were edited, as far as versions and samples show it."""
        versions = self._current_versions()
        names: dict[str, None] = {}
        if versions != self._versions:
            for members, before, now in zip(self._names, self._versions, versions, strict=True):
                names |= dict.fromkeys(name for name, a, b in zip(members, before, now, strict=True) if a != b)
        for members, sample in zip(self._names, self._samples if sampled else [], strict=False):
            names |= dict.fromkeys(members[index] for index in sample.changed_slots())
        return list(names)
