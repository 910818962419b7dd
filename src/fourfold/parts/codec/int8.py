"""int8: blocks of 256 elements, a scale for each and a byte for every element; what rounding loses is remembered.

scale  the largest magnitude of a block / 127, at least the smallest normal number
Law: |remainder| ≤ scale / 2. A block that is not finite is sent so (NaN) and not remembered.

Nearest rounding, not stochastic: with error feedback it is unbiased over steps, needs no random numbers, and errs less.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from fourfold.parts import memory
from fourfold.parts.codec.protocol import CodecReduction, accumulation_dtype, reduce_by_gather, residual_by_param
from fourfold.plan.codec import SCALE_BLOCK, CodecSpec, Shapes, blockwise_layout, codec_rounds, unpadded_length
from fourfold.plan.data.buckets import Bucket

MAX_CODE = 127
# Elements worked on at a time on a CPU: few enough to stay in a cache from one operation to the next, and enough
# that calling the operations costs little (docs/measured.md, "Codecs").
CHUNK_ELEMENTS = 2**18


class Int8:
    """See `Codec` and `Gathering`."""

    def __init__(self, spec: CodecSpec, bucket: Bucket, shapes: Shapes, device: torch.device) -> None:
        self.message_dtype, self.num_elements = torch.uint8, unpadded_length(bucket)
        self.rounds = codec_rounds(spec, bucket, shapes)
        self._bucket, self._residual_dtype = bucket, accumulation_dtype(bucket)
        self._layout = blockwise_layout(bucket)
        self._chunk = CHUNK_ELEMENTS if device.type == "cpu" else self.num_elements
        self._payload = torch.zeros(self._layout.num_bytes, dtype=torch.uint8, device=device)
        self.residual: Tensor = memory.allocate_private(self.num_elements, self._residual_dtype, device)

    def reduce(self, flat: Tensor) -> CodecReduction:
        return reduce_by_gather(self, flat)

    @torch.no_grad()
    def encode(self, flat: Tensor) -> Tensor:
        scales, values = self._sections(self._payload)
        smallest = torch.finfo(self._residual_dtype).tiny
        for elements, blocks in self._chunks():
            rest = self.residual[elements].add_(flat[elements]).view(blocks.stop - blocks.start, -1)
            # Never below the smallest normal number, whose inverse is finite: what is less than half of it waits.
            scale = rest.abs().amax(1).div_(MAX_CODE).clamp_(min=smallest)
            value = values[elements].view(rest.shape)
            value.copy_((rest * scale.reciprocal().unsqueeze(1)).round_())
            rest.addcmul_(value, scale.unsqueeze(1), value=-1)
            scales[blocks] = scale
            if not torch.isfinite(scale).all():
                rest.masked_fill_(~torch.isfinite(scale).unsqueeze(1), 0.0)
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
        scales = payload[first : first + num_scales * self._residual_dtype.itemsize].view(self._residual_dtype)
        return scales, payload[second : second + self.num_elements].view(torch.int8)

    def _chunks(self) -> Iterator[tuple[slice, slice]]:
        """Elements and their blocks, whole blocks first, then the last one if it is shorter."""
        full = self.num_elements // SCALE_BLOCK * SCALE_BLOCK
        step = -(-self._chunk // SCALE_BLOCK) * SCALE_BLOCK
        for start in range(0, full, step):
            stop = min(full, start + step)
            yield slice(start, stop), slice(start // SCALE_BLOCK, stop // SCALE_BLOCK)
        if full < self.num_elements:
            yield slice(full, self.num_elements), slice(full // SCALE_BLOCK, full // SCALE_BLOCK + 1)

    def scale_residual(self, factor: float) -> None:
        self.residual.mul_(factor)

    def state_tensors(self) -> dict[str, dict[str, Tensor]]:
        return residual_by_param(self._bucket, self.residual)
