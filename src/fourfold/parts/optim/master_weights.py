"""Master weights: the update's own copy of the weights, in its own dtype and on its own device.

model weights   what the model computes with; they are in the buckets' flats
master weights  what the update changes, then casts into the model weights: the part of a bucket that this rank updates
Law: after every update and edit, model weight == master weight cast to the model's dtype.

Source: Micikevicius et al., "Mixed Precision Training" (2018), §3.1; ZeRO: Rajbhandari et al. (2020), §3.1.
"""

import functools
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fourfold.parts import memory
from fourfold.parts.comm.reduce.protocol import GradReducer
from fourfold.plan.data.buckets import Bucket
from fourfold.plan.precision import has_master_weights


class MasterShard(NamedTuple):
    """Master weights of a bucket, from element `start` on."""

    start: int
    flat: Tensor

    def view_range(self, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of the bucket."""
        return self.flat[start - self.start : stop - self.start]


class MasterWeightPolicy(NamedTuple):
    """Which master weights there are."""

    precision: str = "keep"
    """The plan's."""
    is_sharded: bool = False
    """Whether a rank keeps only the master weights that it updates."""
    offload_device: torch.device | None = None
    """Device of offloaded master weights and of the update; None = no offload."""


def offload_device(offload: str, device: torch.device) -> torch.device | None:
    """The device that optimizer states are offloaded to; None if they stay on `device`, or are on the host anyway."""
    return torch.device("cpu") if offload == "states" and device.type != "cpu" else None


class MasterWeights:
    """The master weights of this rank by bucket; None for a bucket whose model weights are updated themselves."""

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        buckets: Sequence[Bucket],
        grads: GradReducer,
        policy: MasterWeightPolicy,
    ) -> None:
        """`parameters` are as the user made them: in their own dtypes, not in the buckets yet."""
        self.is_sharded, self.by_bucket = policy.is_sharded, list[MasterShard | None]()
        for bucket in buckets:
            widens = has_master_weights(bucket, policy.precision)
            if not widens and policy.offload_device is None:
                self.by_bucket.append(None)
                continue
            start, stop = grads.grad_shard(bucket.index)[:2] if policy.is_sharded else (0, bucket.size)
            members = [parameters[slot.name] for slot in bucket.slots]
            least = torch.float32 if widens else members[0].dtype
            dtype = functools.reduce(torch.promote_types, (p.dtype for p in members), least)
            device = members[0].device
            if policy.offload_device is not None and device.type == "cuda":
                flat = memory.allocate_pinned(stop - start, dtype)
            else:
                flat = memory.allocate_private(stop - start, dtype, policy.offload_device or device)
            self.by_bucket.append(MasterShard(start, flat))
        self._shard_ranges = {
            slot.name: (
                shard,
                max(slot.start, shard.start),
                min(slot.stop, shard.start + shard.flat.numel()),
                slot.start,
            )
            for bucket, shard in zip(buckets, self.by_bucket, strict=True)
            if shard is not None
            for slot in bucket.slots
        }

    @property
    def param_names(self) -> Collection[str]:
        """The parameters that have master weights."""
        return self._shard_ranges.keys()

    @torch.no_grad()
    def load_parameter(self, name: str, value: Tensor) -> None:
        """Copy this rank's shard of a parameter's new value."""
        shard, low, high, slot_start = self._shard_ranges[name]
        if low < high:
            shard.view_range(low, high).copy_(value.reshape(-1)[low - slot_start : high - slot_start])

    def local_shard(self, name: str) -> Tensor:
        """This rank's shard of a parameter's master weights, no copy; may be empty."""
        shard, low, high, _ = self._shard_ranges[name]
        return shard.view_range(low, max(low, high))

    @torch.no_grad()
    def pad_to_full(self, name: str, shard: Tensor, parameter: Tensor) -> Tensor:
        """A copy of a shard, padded with zeros to the full parameter [elements]: its sum over ranks is the parameter.

        It is on the parameter's device, where ranks can sum it.
        """
        _, low, high, slot_start = self._shard_ranges[name]
        full = torch.zeros(parameter.numel(), dtype=shard.dtype, device=parameter.device)
        if low < high:
            full[low - slot_start : high - slot_start] = shard
        return full
