"""bf16, fp16: each element in two bytes. Rounding commutes with nothing, but the sum is taken in the same dtype.

Nothing is remembered: the sum itself is rounded on its way, on ranks that could not know of it.
Law: a value beyond 65,504 becomes infinite in fp16, on every rank alike; it is not clamped behind the user's back.
"""

import torch
from torch import Tensor

from fourfold.parts import memory
from fourfold.parts.codec.protocol import CodecReduction, Message, bucket_dtype
from fourfold.plan.codec import CodecSpec, Combine, Shapes, codec_rounds, unpadded_length
from fourfold.plan.data.buckets import Bucket

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Cast:
    """See `Codec`. A gradient that has two bytes already is sent as it is."""

    def __init__(self, spec: CodecSpec, bucket: Bucket, shapes: Shapes, device: torch.device) -> None:
        self.rounds, self.residual = codec_rounds(spec, bucket, shapes), None
        own = bucket_dtype(bucket)
        dtype = DTYPES[spec.kind] if own.itemsize > 2 else own
        self.message_dtype, self.num_elements = dtype, unpadded_length(bucket)
        self._payload = memory.allocate_private(self.num_elements, dtype, device)

    @torch.no_grad()
    def reduce(self, flat: Tensor) -> CodecReduction:
        (total,) = yield Message(self._payload.copy_(flat), Combine.SUM)
        flat.copy_(total)

    def scale_residual(self, factor: float) -> None:
        pass

    def state_tensors(self) -> dict[str, dict[str, Tensor]]:
        return {}
