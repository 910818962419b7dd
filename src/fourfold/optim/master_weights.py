"""Master weights: the update's own copy of the weights, in its own dtype and on its own device.

model weights   what the model computes with; they are in the buckets' flats
master weights  what the update changes, then casts into the model weights: the part of a bucket that this rank updates
Law: after every update and edit, model weight == master weight cast to the model's dtype.

Source: Micikevicius et al., "Mixed Precision Training" (2018), §3.1; ZeRO: Rajbhandari et al. (2020), §3.1.
"""

import functools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fourfold.axes.data.rules.buckets import Bucket
from fourfold.comm.rank_layout import ParamPart, RankLayout, param_views
from fourfold.plan.precision import has_master_weights
from fourfold.torch_kit import memory

EDIT_LOSS_REASON = "the update changes the master weights, and would overwrite these"
FORWARD_LOSS_REASON = "the optimizer updates its master weights, and a write into the model's copies of them is lost"


class MasterShard(NamedTuple):
    """Master weights of a bucket, from element `start` on."""

    start: int
    flat: Tensor

    def view_range(self, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of the bucket."""
        return self.flat[start - self.start : stop - self.start]


def offload_device(offload: str, device: torch.device) -> torch.device | None:
    """The device that optimizer states are offloaded to; None if they stay on `device`, or are on the host anyway."""
    return torch.device("cpu") if offload == "states" and device.type != "cpu" else None


class MasterWeights:
    """The master weights of this rank by bucket; None for a bucket whose model weights are updated themselves."""

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        buckets: Sequence[Bucket],
        layout: RankLayout,
        precision: str,
        offloaded_to: torch.device | None,
    ) -> None:
        """`parameters` are as the user made them: in their own dtypes, not in the buckets yet.

        layout        of the elements that this rank updates
        precision     the plan's
        offloaded_to  device of offloaded master weights and of the update; None: no offload
        """
        self._parameters, self._buckets, self.layout = parameters, buckets, layout
        self.by_bucket = [
            _allocate([parameters[slot.name] for slot in bucket.slots], bucket, bucket_range, precision, offloaded_to)
            for bucket, bucket_range in zip(buckets, layout.bucket_ranges, strict=True)
        ]
        self._parts: dict[str, Tensor] = {}
        for bucket, shard in zip(buckets, self.by_bucket, strict=True):
            if shard is not None:
                self._parts |= param_views(bucket, *shard)
        self.edit_loss_reason = EDIT_LOSS_REASON if self._parts else ""
        self.forward_loss_reason = FORWARD_LOSS_REASON if self._parts else ""

    @property
    def param_names(self) -> Collection[str]:
        """The parameters that have master weights."""
        return self._parts.keys()

    @torch.no_grad()
    def load(self, values: Mapping[str, Tensor]) -> None:
        """Copy this rank's part of each new weight, given whole, by name, that has master weights."""
        for name in values.keys() & self._parts.keys():
            self._parts[name].copy_(values[name].reshape(-1)[slice(*self.layout.ranges[name])])

    def local_shard(self, name: str) -> Tensor:
        """This rank's part of a parameter's master weights, flat, no copy; may be empty."""
        return self._parts[name]

    def held_parts(self, name: str) -> Sequence[ParamPart]:
        """The same as a part of the parameter; none if it has no master weights."""
        return [ParamPart(self.layout.ranges[name][0], self._parts[name])] if name in self._parts else []

    def replace_in(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The same whole weights, by name; of those that have master weights copies of these. Collective if split."""
        for name, weight in weights:
            if name in self._parts:
                weight = self.layout.gather(name, self._parts[name]).to(self._parameters[name].device)
            yield name, weight

    @torch.no_grad()
    def mismatched_params(self, flats: Sequence[Tensor]) -> list[str]:
        """The parameters whose weights, in their buckets' flats, differ from their rounded master weights."""
        names: list[str] = []
        for bucket, flat, master in zip(self._buckets, flats, self.by_bucket, strict=False):
            if master is None:
                continue
            weight = flat[master.start : master.start + master.flat.numel()]
            rounded = master.flat.to(weight.device, weight.dtype)
            if not torch.equal(weight, rounded):
                differs = (weight != rounded) & ~(weight.isnan() & rounded.isnan())
                names += [name for name, part in param_views(bucket, master.start, differs).items() if part.any()]
        return names


def _allocate(
    members: Sequence[Tensor],
    bucket: Bucket,
    bucket_range: tuple[int, int],
    precision: str,
    offloaded_to: torch.device | None,
) -> MasterShard | None:
    """Memory for the master weights of a range of a bucket, if there are to be any. `members`: the parameters."""
    start, stop = bucket_range
    widens = has_master_weights(bucket, precision)
    if not widens and offloaded_to is None:
        return None
    least = torch.float32 if widens else members[0].dtype
    dtype = functools.reduce(torch.promote_types, (p.dtype for p in members), least)
    device = members[0].device
    if offloaded_to is not None and device.type == "cuda":
        return MasterShard(start, memory.allocate_pinned(stop - start, dtype))
    return MasterShard(start, memory.allocate_private(stop - start, dtype, offloaded_to or device))
