"""Masters: the update's own copy of the weights, in its own dtype and on its own device.

working weights  what the model computes with; they lie in the buckets' flats
master weights   what the update changes; of a bucket those that this rank updates, rounded into the working weights
Law: after every update, and every edit, a working weight is its master weight rounded; never the other way round.

Source: Micikevicius et al., "Mixed Precision Training" (2018), §3.1; ZeRO: Rajbhandari et al. (2020), §3.1.
"""

import functools
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fourfold.parts import memory
from fourfold.parts.comm.reduce.protocol import Transport
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
    """What the update keeps of its own: `precision` is the plan's; `is_split`: only what this rank updates.

    `host`: where the update runs and keeps weights of its own whatever the precision; None: where the weights are.
    """

    precision: str = "keep"
    is_sharded: bool = False
    offload_device: torch.device | None = None


def offload_device(offload: str, device: torch.device) -> torch.device | None:
    """Where states are to rest that leave the ranks' `device`; None where they are in host memory already."""
    return torch.device("cpu") if offload == "states" and device.type != "cpu" else None


class MasterWeights:
    """The master weights of this rank, by bucket; None for a bucket whose working weights are updated themselves."""

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        buckets: Sequence[Bucket],
        transport: Transport,
        policy: MasterWeightPolicy,
    ) -> None:
        """`parameters` are as the user made them: in their own dtypes, and not in the buckets yet."""
        self.is_sharded, self.by_bucket = policy.is_sharded, list[MasterShard | None]()
        for bucket in buckets:
            widens = has_master_weights(bucket, policy.precision)
            if not widens and policy.offload_device is None:
                self.by_bucket.append(None)
                continue
            first, last = transport.grad_shard(bucket.index)[:2] if policy.is_sharded else (0, bucket.size)
            members = [parameters[slot.name] for slot in bucket.slots]
            least = torch.float32 if widens else members[0].dtype
            dtype = functools.reduce(torch.promote_types, (p.dtype for p in members), least)
            device = members[0].device
            if policy.offload_device is not None and device.type == "cuda":
                flat = memory.allocate_pinned(last - first, dtype)
            else:
                flat = memory.allocate_private(last - first, dtype, policy.offload_device or device)
            self.by_bucket.append(MasterShard(first, flat))
        self._shard_ranges = {
            slot.name: (own, max(slot.start, own.start), min(slot.stop, own.start + own.flat.numel()), slot.start)
            for bucket, own in zip(buckets, self.by_bucket, strict=True)
            if own is not None
            for slot in bucket.slots
        }

    @property
    def param_names(self) -> Collection[str]:
        """The parameters that have master weights."""
        return self._shard_ranges.keys()

    @torch.no_grad()
    def load_parameter(self, name: str, value: Tensor) -> None:
        """Take this rank's share of a parameter's new value."""
        own, low, high, first = self._shard_ranges[name]
        if low < high:
            own.view_range(low, high).copy_(value.reshape(-1)[low - first : high - first])

    def local_shard(self, name: str) -> Tensor:
        """This rank's share of a parameter's master weights, as it lies; may be empty."""
        own, low, high, _ = self._shard_ranges[name]
        return own.view_range(low, max(low, high))

    @torch.no_grad()
    def pad_to_full(self, name: str, shard: Tensor, parameter: Tensor) -> Tensor:
        """A copy of a share at its place among zeros [elements]: summed over the ranks they are the parameter.

        It lies on the parameter's device, where ranks can sum it.
        """
        _, low, high, first = self._shard_ranges[name]
        whole = torch.zeros(parameter.numel(), dtype=shard.dtype, device=parameter.device)
        if low < high:
            whole[low - first : high - first] = shard
        return whole
