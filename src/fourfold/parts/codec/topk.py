"""topk: the largest elements of a bucket, as many in every reduction. The others wait in the residual.

Law: the elements sent are the `num_sent` largest of gradient + residual; of equal ones, the first.
Source: Stich, Cordonnier, Jaggi, "Sparsified SGD with memory" (2018), Alg. 1.
"""

import torch
from torch import Tensor

from fourfold.parts import memory
from fourfold.parts.codec.protocol import (
    CodecReduction,
    SavedRows,
    reduce_by_gather,
    reshard_residual,
    residual_by_param,
)
from fourfold.parts.codec.sparse import SparseMessage, select_largest
from fourfold.parts.dtypes import accumulation_dtype, bucket_dtype
from fourfold.plan.codec import CodecSpec, Shapes, codec_rounds, topk_spec, unpadded_length
from fourfold.plan.data.buckets import Bucket


class TopK:
    """A `Codec` and a `GatheredCodec`."""

    def __init__(self, spec: CodecSpec, bucket: Bucket, shapes: Shapes, device: torch.device) -> None:
        self.message_dtype, self.num_elements = torch.uint8, unpadded_length(bucket)
        self.rounds = codec_rounds(spec, bucket, shapes)
        self._bucket, layout, dtype = bucket, topk_spec(bucket, spec.density), bucket_dtype(bucket)
        self._sparse_ranges = layout.sparse_ranges
        self._message = SparseMessage(layout, bucket, dtype, device)
        self.residual: Tensor = memory.allocate_private(self.num_elements, accumulation_dtype(dtype), device)

    def reduce(self, flat: Tensor) -> CodecReduction:
        return reduce_by_gather(self, flat)

    @torch.no_grad()
    def encode(self, flat: Tensor) -> Tensor:
        residual = self.residual.add_(flat)
        indices = torch.empty(0, dtype=torch.int64, device=residual.device)
        for each in self._sparse_ranges:
            indices = select_largest(residual, each.num_sent, max_count=each.max_sent).indices
        return self._message.write(residual, indices)

    @torch.no_grad()
    def decode_add(self, payload: Tensor, out: Tensor) -> None:
        self._message.add_to(payload, out)

    def scale_residual(self, factor: float) -> None:
        self.residual.mul_(factor)

    def state_tensors(self) -> dict[str, dict[str, Tensor]]:
        return residual_by_param(self._bucket, self.residual)

    def reshard(self, key: str, saved: SavedRows, out: Tensor) -> None:
        reshard_residual(saved, out)
