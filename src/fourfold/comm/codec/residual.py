"""Residual codec: what all codecs with error feedback share.

residual  what a rank has not sent yet; error feedback adds it to the next gradient
Law: only the sum of the ranks' residuals means something to other ranks, so it stays the same on any number of ranks.
"""

import torch
from torch import Tensor

from fourfold.axes.data.rules.buckets import Bucket
from fourfold.comm.codec.protocol import SavedRows
from fourfold.plan.codec import CodecSpec, Shapes, codec_rounds, unpadded_length
from fourfold.torch_kit import memory
from fourfold.torch_kit.mixed_precision import accumulation_dtype, bucket_dtype

RESIDUAL_KEY = "remainder"
"""The key of the residual in a codec's state, and in checkpoints."""


class ResidualCodec:
    """The base of `Codec`s that remember a residual: four of them would repeat it.

    A codec that remembers more extends the last three methods.
    """

    def __init__(self, spec: CodecSpec, bucket: Bucket, shapes: Shapes, device: torch.device) -> None:
        self.rounds, self.num_elements = codec_rounds(spec, bucket, shapes), unpadded_length(bucket)
        self._bucket, dtype = bucket, accumulation_dtype(bucket_dtype(bucket))
        self.residual: Tensor = memory.allocate_private(self.num_elements, dtype, device)

    def scale_residual(self, factor: float) -> None:
        self.residual.mul_(factor)

    def state_tensors(self) -> dict[str, dict[str, Tensor]]:
        return {slot.name: {RESIDUAL_KEY: self.residual[slot.start : slot.stop]} for slot in self._bucket.slots}

    def reshard(self, key: str, saved: SavedRows, out: Tensor) -> None:
        """Each rank continues from its own residual. On another number of ranks each takes an equal part of the sum."""
        assert key == RESIDUAL_KEY
        if (row := saved.local_row(out.numel())) is not None:
            out.copy_(row)
            return
        total = torch.zeros(out.numel(), dtype=saved.rows[0].dtype if saved.rows else out.dtype)
        for each in saved.rows:
            total += each.read(0, out.numel())
        out.copy_(total / saved.size)
