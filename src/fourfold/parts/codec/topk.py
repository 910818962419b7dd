"""topk: the largest elements of a bucket, as many in every step; the others wait in the remainder.

Law: the elements sent are the `kept` largest of gradient + remainder, ties taken from the front.
Source: Stich, Cordonnier, Jaggi, "Sparsified SGD with memory" (2018), Alg. 1.
"""

import torch
from torch import Tensor

from fourfold.parts import memory
from fourfold.parts.codec.protocol import (
    CodecReduction,
    accumulation_dtype,
    bucket_dtype,
    reduce_by_gather,
    residual_by_param,
)
from fourfold.parts.codec.sparse import SparseMessage, select_largest
from fourfold.plan.codec import CodecSpec, Shapes, codec_rounds, sparse_spec, unpadded_length
from fourfold.plan.data.buckets import Bucket


class TopK:
    """See `Codec` and `Gathering`."""

    def __init__(self, spec: CodecSpec, bucket: Bucket, shapes: Shapes, device: torch.device) -> None:
        self.message_dtype, self.num_elements = torch.uint8, unpadded_length(bucket)
        self.rounds = codec_rounds(spec, bucket, shapes)
        self._bucket, layout = bucket, sparse_spec(spec, bucket)
        self._sparse_ranges = layout.sparse_ranges
        self._message = SparseMessage(layout, bucket, bucket_dtype(bucket), device)
        self.residual: Tensor = memory.allocate_private(self.num_elements, accumulation_dtype(bucket), device)

    def reduce(self, flat: Tensor) -> CodecReduction:
        return reduce_by_gather(self, flat)

    @torch.no_grad()
    def encode(self, flat: Tensor) -> Tensor:
        rest = self.residual.add_(flat)
        places = torch.empty(0, dtype=torch.int64, device=rest.device)
        for each in self._sparse_ranges:
            places = select_largest(rest, each.num_sent, max_count=each.max_sent).indices
        return self._message.write(rest, places)

    @torch.no_grad()
    def decode_add(self, payload: Tensor, out: Tensor) -> None:
        self._message.add_to(payload, out)

    def scale_residual(self, factor: float) -> None:
        self.residual.mul_(factor)

    def state_tensors(self) -> dict[str, dict[str, Tensor]]:
        return residual_by_param(self._bucket, self.residual)
