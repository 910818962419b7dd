"""Unsharded buckets: the buckets that are whole on this rank now, and the placeholders of all others.

unsharded    a bucket that is in a buffer: its parameters are views of it
placeholder  a NaN in the parameter's shape: an access that was missed gives NaN, not a plausible number
Law: a buffer that is in use by a tensor of autograd or of the user is never written; resharding only lets go of it.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from fourfold.parts.data.param_access import outside_transforms
from fourfold.parts.dtypes import bucket_dtype
from fourfold.parts.torch_private import has_memory
from fourfold.plan.data.buckets import Bucket


class UnshardedBuckets:
    """The buffers of unsharded buckets, the bucket used longest ago first."""

    def __init__(self, parameters: Sequence[Sequence[nn.Parameter]], buckets: Sequence[Bucket]) -> None:
        """`parameters` are by bucket and slot; they are left alone until a bucket is stored or resharded."""
        self._parameters, self._buckets = parameters, buckets
        self.device = parameters[0][0].device
        # Not the parameters' dtypes: with a precision those are the user's until the parameters are sharded.
        dtypes = [bucket_dtype(bucket) for bucket in buckets]
        self._placeholders = [torch.full((), float("nan"), dtype=dtype, device=self.device) for dtype in dtypes]
        self._buffers: OrderedDict[int, Tensor] = OrderedDict()
        self._bucket_of_address: dict[int, int] = {}  # of its buffer

    def __contains__(self, bucket: int) -> bool:
        return bucket in self._buffers

    def __iter__(self) -> Iterator[int]:
        return iter(list(self._buffers))

    def __len__(self) -> int:
        return len(self._buffers)

    def __getitem__(self, bucket: int) -> Tensor:
        return self._buffers[bucket]

    def mark_used(self, bucket: int) -> None:
        """The bucket is the last one used."""
        self._buffers.move_to_end(bucket)

    def bucket_of(self, tensor: Tensor) -> int | None:
        """The bucket in whose buffer a tensor lies."""
        return self._bucket_of_address.get(tensor.untyped_storage().data_ptr()) if has_memory(tensor) else None

    def store(self, bucket: int, buffer: Tensor) -> None:
        """A bucket is whole in this buffer: make its parameters views of it."""
        self.reshard(bucket)
        self._buffers[bucket] = buffer
        self._bucket_of_address[buffer.data_ptr()] = bucket
        self.use_views(bucket, buffer)

    def reshard(self, bucket: int) -> None:
        """Replace the bucket's parameters by placeholders. Autograd or the user may keep tensors in its buffer."""
        buffer = self._buffers.pop(bucket, None)
        if buffer is not None:
            del self._bucket_of_address[buffer.data_ptr()]
            self.use_placeholders(bucket)

    def use_views(self, bucket: int, flat: Tensor) -> None:
        """Make the bucket's parameters views of a flat."""
        with outside_transforms(self.device.type):
            for slot, parameter in zip(self._buckets[bucket].slots, self._parameters[bucket], strict=True):
                parameter.data = flat[slot.start : slot.stop].view(parameter.shape)

    def use_placeholders(self, bucket: int) -> None:
        """Make the bucket's parameters placeholders."""
        with outside_transforms(self.device.type):
            for parameter in self._parameters[bucket]:
                parameter.data = self._placeholders[bucket].expand(parameter.shape)
