"""dct: Dynamic Communication Thresholding, data-parallel: a hard threshold per parameter, found anew now and then.

life  steps for which a threshold is used; finding it costs more than using it
band  how many elements may pass: outside of [low, high] the threshold is found anew in the same step
Law: a parameter never sends more than `high` elements, and at a refresh without ties n − ⌊n·η⌋, zeros never.

Source: Gupta et al. (2021), Alg. 1. The band is ours: remainders grow after the first refresh, which saw none, so a
threshold that is kept for its whole life lets more and more through; and messages here have a fixed length.
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
from fourfold.parts.codec.sparse import SparseMessage, indices_above, select_largest
from fourfold.plan.codec import CodecSpec, Shapes, SparseRange, codec_rounds, sparse_spec, unpadded_length
from fourfold.plan.data.buckets import Bucket


class Dct:
    """See `Codec` and `Gathering`."""

    def __init__(self, spec: CodecSpec, bucket: Bucket, shapes: Shapes, device: torch.device) -> None:
        self.message_dtype, self.num_elements = torch.uint8, unpadded_length(bucket)
        self.rounds, self._refresh_steps = codec_rounds(spec, bucket, shapes), spec.refresh_steps
        self._bucket, layout = bucket, sparse_spec(spec, bucket)
        self._sparse_ranges = layout.sparse_ranges
        self._message = SparseMessage(layout, bucket, bucket_dtype(bucket), device)
        self.residual: Tensor = memory.allocate_private(self.num_elements, accumulation_dtype(bucket), device)
        self.thresholds = torch.zeros(len(layout.sparse_ranges), dtype=torch.float64)
        self.ages = torch.zeros(len(layout.sparse_ranges), dtype=torch.int64)
        self.num_early_refreshes = 0
        """Refreshes before their time, since the start."""

    def reduce(self, flat: Tensor) -> CodecReduction:
        return reduce_by_gather(self, flat)

    @torch.no_grad()
    def encode(self, flat: Tensor) -> Tensor:
        rest = self.residual.add_(flat)
        found = [self._select(number, rest[each.start : each.stop]) for number, each in enumerate(self._sparse_ranges)]
        places = [there.add_(each.start) for there, each in zip(found, self._sparse_ranges, strict=True)]
        none = torch.empty(0, dtype=torch.int64, device=rest.device)
        return self._message.write(rest, torch.cat(places) if places else none)

    def _select(self, range_index: int, flat: Tensor) -> Tensor:
        """Places in a parameter's stretch that are to be sent."""
        each, threshold, age = (
            self._sparse_ranges[range_index],
            float(self.thresholds[range_index]),
            int(self.ages[range_index]),
        )
        self.ages[range_index] += 1
        if age % self._refresh_steps:
            places = indices_above(flat, threshold)
            if self._in_band(each, places.numel(), threshold, flat.dtype):
                return places
            self.num_early_refreshes += 1
        choice = select_largest(flat, each.num_sent, max_count=each.max_sent)
        self.thresholds[range_index] = choice.threshold
        return choice.indices

    @staticmethod
    def _in_band(each: SparseRange, count: int, threshold: float, dtype: torch.dtype) -> bool:
        # At the least threshold there is, few pass because most are zero, and looking again would not help.
        return count <= each.max_sent and (count >= each.min_sent or threshold <= torch.finfo(dtype).tiny)

    @torch.no_grad()
    def decode_add(self, payload: Tensor, out: Tensor) -> None:
        self._message.add_to(payload, out)

    def scale_residual(self, factor: float) -> None:
        self.residual.mul_(factor)
        self.thresholds.mul_(abs(factor))

    def state_tensors(self) -> dict[str, dict[str, Tensor]]:
        found = residual_by_param(self._bucket, self.residual)
        names = {slot.start: slot.name for slot in self._bucket.slots}
        for number, each in enumerate(self._sparse_ranges):
            one = slice(number, number + 1)
            found[names[each.start]] |= {"threshold": self.thresholds[one], "age": self.ages[one]}
        return found
