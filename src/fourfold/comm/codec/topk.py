"""topk: the largest elements of a bucket, as many in every reduction. The others wait in the residual.

Law: the elements sent are the `num_sent` largest of gradient + residual; of equal ones, the first.
Source: Stich, Cordonnier, Jaggi, "Sparsified SGD with memory" (2018), Alg. 1.
"""

import torch
from torch import Tensor

from fourfold.axes.data.rules.buckets import Bucket
from fourfold.comm.codec.protocol import CodecReduction, ResidualCodec, reduce_by_gather
from fourfold.comm.codec.sparse import SparseMessage, select_largest
from fourfold.plan.codec import CodecSpec, Shapes, topk_spec
from fourfold.torch_kit.mixed_precision import bucket_dtype


class TopK(ResidualCodec):
    """A `Codec` and a `GatheredCodec`."""

    def __init__(self, spec: CodecSpec, bucket: Bucket, shapes: Shapes, device: torch.device) -> None:
        super().__init__(spec, bucket, shapes, device)
        self.message_dtype, layout = torch.uint8, topk_spec(bucket, spec.density)
        self._sparse_ranges = layout.sparse_ranges
        self._message = SparseMessage(layout, bucket, bucket_dtype(bucket), device)

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
