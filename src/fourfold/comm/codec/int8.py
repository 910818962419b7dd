"""int8: one byte per element and one scale per block of 256. What rounding loses goes into the residual.

scale  the largest magnitude of a block / 127, at least the smallest normal number
Law: |residual| ≤ scale / 2. A block that is not finite is sent as NaN, and its residual is 0.

Rounding is to nearest, not stochastic: with error feedback it is unbiased over steps, needs no random numbers, and its
error is smaller.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from fourfold.axes.data.rules.buckets import Bucket
from fourfold.comm.codec.protocol import CodecReduction, ResidualCodec, reduce_by_gather
from fourfold.plan.codec import SCALE_BLOCK, CodecSpec, Shapes, blockwise_layout

MAX_CODE = 127
# Elements per operation on a CPU: few enough to stay in the cache from one operation to the next, and enough that the
# calls themselves cost little (docs/measured-notes.md, "Codecs").
CHUNK_ELEMENTS = 2**18


class Int8(ResidualCodec):
    """A `Codec` and a `GatheredCodec`."""

    def __init__(self, spec: CodecSpec, bucket: Bucket, shapes: Shapes, device: torch.device) -> None:
        super().__init__(spec, bucket, shapes, device)
        self.message_dtype, self._layout = torch.uint8, blockwise_layout(bucket)
        self._chunk = CHUNK_ELEMENTS if device.type == "cpu" else self.num_elements
        self._payload = torch.zeros(self._layout.num_bytes, dtype=torch.uint8, device=device)

    def reduce(self, flat: Tensor) -> CodecReduction:
        return reduce_by_gather(self, flat)

    @torch.no_grad()
    def encode(self, flat: Tensor) -> Tensor:
        scales, values = self._sections(self._payload)
        smallest = torch.finfo(self.residual.dtype).tiny
        for elements, blocks in self._chunks():
            residual = self.residual[elements].add_(flat[elements]).view(blocks.stop - blocks.start, -1)
            # At least the smallest normal number, whose inverse is finite. Less than half of it waits in the residual.
            scale = residual.abs().amax(1).div_(MAX_CODE).clamp_(min=smallest)
            value = values[elements].view(residual.shape)
            value.copy_((residual * scale.reciprocal().unsqueeze(1)).round_())
            residual.addcmul_(value, scale.unsqueeze(1), value=-1)
            scales[blocks] = scale
            if not torch.isfinite(scale).all():
                residual.masked_fill_(~torch.isfinite(scale).unsqueeze(1), 0.0)
        return self._payload

    @torch.no_grad()
    def decode_add(self, payload: Tensor, out: Tensor) -> None:
        scales, values = self._sections(payload)
        for elements, blocks in self._chunks():
            value, scale = values[elements].view(blocks.stop - blocks.start, -1), scales[blocks].unsqueeze(1)
            total = out[elements].view(value.shape)
            if total.dtype == scale.dtype:
                total.addcmul_(value, scale)
            else:
                total.add_(value * scale)

    def _sections(self, payload: Tensor) -> tuple[Tensor, Tensor]:
        """The scales and the values of a message: views."""
        first, second = self._layout.starts
        num_scales = -(-self.num_elements // SCALE_BLOCK)
        dtype = self.residual.dtype
        scales = payload[first : first + num_scales * dtype.itemsize].view(dtype)
        return scales, payload[second : second + self.num_elements].view(torch.int8)

    def _chunks(self) -> Iterator[tuple[slice, slice]]:
        """Slices of elements and of their blocks: full blocks first, then the last one if it is shorter."""
        full = self.num_elements // SCALE_BLOCK * SCALE_BLOCK
        step = -(-self._chunk // SCALE_BLOCK) * SCALE_BLOCK
        for start in range(0, full, step):
            stop = min(full, start + step)
            yield slice(start, stop), slice(start // SCALE_BLOCK, stop // SCALE_BLOCK)
        if full < self.num_elements:
            yield slice(full, self.num_elements), slice(full // SCALE_BLOCK, full // SCALE_BLOCK + 1)
