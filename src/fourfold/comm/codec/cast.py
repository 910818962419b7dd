"""bf16 and fp16: every element is sent in two bytes, and the sum is taken in the same dtype.

There is no residual: the transport rounds the partial sums too, and no rank knows what that loses.
Law: a value beyond 65,504 becomes infinite in fp16, the same on every rank. It is not clamped, so the user sees it.
"""

import torch
from torch import Tensor

from fourfold.axes.data.rules.buckets import Bucket
from fourfold.comm.codec.protocol import CodecReduction, Message, SavedRows
from fourfold.plan.codec import CodecSpec, Combine, Shapes, codec_rounds, unpadded_length
from fourfold.torch_kit import memory
from fourfold.torch_kit.mixed_precision import bucket_dtype

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Cast:
    """A `Codec`. A gradient that has two bytes already is sent as it is."""

    def __init__(self, spec: CodecSpec, bucket: Bucket, shapes: Shapes, device: torch.device) -> None:
        self.rounds, self.residual = codec_rounds(spec, bucket, shapes), None
        own_dtype = bucket_dtype(bucket)
        self.message_dtype = DTYPES[spec.kind] if own_dtype.itemsize > 2 else own_dtype
        self.num_elements = unpadded_length(bucket)
        self._payload = memory.allocate_private(self.num_elements, self.message_dtype, device)

    @torch.no_grad()
    def reduce(self, flat: Tensor) -> CodecReduction:
        (total,) = yield Message(self._payload.copy_(flat), Combine.SUM)
        flat.copy_(total)

    def scale_residual(self, factor: float) -> None:
        pass

    def state_tensors(self) -> dict[str, dict[str, Tensor]]:
        return {}

    def reshard(self, key: str, saved: SavedRows, out: Tensor) -> None:
        raise AssertionError("a cast has no state")
