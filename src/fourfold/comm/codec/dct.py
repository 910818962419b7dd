"""dct: Dynamic Communication Thresholding. A hard threshold per parameter, renewed every `refresh_steps` reductions.

refresh  finding the threshold, which costs more than using it
band     [min_sent, max_sent] elements; outside of it the threshold is refreshed in the same reduction
Law: a parameter never sends more than `max_sent` elements. A refresh without ties sends n − ⌊n·η⌋, but no zeros.

Source: Gupta et al. (2021), Alg. 1. The band is ours. The first refresh sees no residual, and residuals grow after it,
so a threshold that is kept for all its reductions lets more and more through. Our messages have a fixed length.
"""

import torch
from torch import Tensor

from fourfold.axes.data.rules.buckets import Bucket
from fourfold.comm.codec.protocol import RESIDUAL_KEY, CodecReduction, ResidualCodec, SavedRows, reduce_by_gather
from fourfold.comm.codec.sparse import SparseMessage, indices_above, select_largest
from fourfold.plan.codec import CodecSpec, Shapes, SparseRange, dct_spec
from fourfold.torch_kit.mixed_precision import bucket_dtype

THRESHOLD_KEY, AGE_KEY = "threshold", "age"


class Dct(ResidualCodec):
    """A `Codec` and a `GatheredCodec`."""

    def __init__(self, spec: CodecSpec, bucket: Bucket, shapes: Shapes, device: torch.device) -> None:
        super().__init__(spec, bucket, shapes, device)
        self.message_dtype, self._refresh_steps = torch.uint8, spec.refresh_steps
        layout = dct_spec(bucket, spec.density)
        self._sparse_ranges = layout.sparse_ranges
        self._message = SparseMessage(layout, bucket, bucket_dtype(bucket), device)
        self.thresholds = torch.zeros(len(self._sparse_ranges), dtype=torch.float64)
        self.ages = torch.zeros(len(self._sparse_ranges), dtype=torch.int64)
        """By range: the reductions of its bucket so far. A refresh is due where `refresh_steps` divides it."""
        self.num_early_refreshes = 0
        """Refreshes before they were due, since the start."""

    def reduce(self, flat: Tensor) -> CodecReduction:
        return reduce_by_gather(self, flat)

    @torch.no_grad()
    def encode(self, flat: Tensor) -> Tensor:
        residual = self.residual.add_(flat)
        indices = [
            self._select(index, residual[each.start : each.stop]).add_(each.start)
            for index, each in enumerate(self._sparse_ranges)
        ]
        none = torch.empty(0, dtype=torch.int64, device=residual.device)
        return self._message.write(residual, torch.cat(indices) if indices else none)

    def _select(self, range_index: int, flat: Tensor) -> Tensor:
        """Indices into `flat`, the elements of one range, of those that are sent."""
        sparse_range = self._sparse_ranges[range_index]
        threshold, age = float(self.thresholds[range_index]), int(self.ages[range_index])
        self.ages[range_index] += 1
        if age % self._refresh_steps:
            indices = indices_above(flat, threshold)
            if self._is_in_band(sparse_range, indices.numel(), threshold, flat.dtype):
                return indices
            self.num_early_refreshes += 1
        selection = select_largest(flat, sparse_range.num_sent, max_count=sparse_range.max_sent)
        self.thresholds[range_index] = selection.threshold
        return selection.indices

    @staticmethod
    def _is_in_band(sparse_range: SparseRange, count: int, threshold: float, dtype: torch.dtype) -> bool:
        # At the least possible threshold few pass because most are zero: a refresh would find the same.
        is_least = threshold <= torch.finfo(dtype).tiny
        return count <= sparse_range.max_sent and (count >= sparse_range.min_sent or is_least)

    @torch.no_grad()
    def decode_add(self, payload: Tensor, out: Tensor) -> None:
        self._message.add_to(payload, out)

    def scale_residual(self, factor: float) -> None:
        super().scale_residual(factor)
        self.thresholds.mul_(abs(factor))

    def state_tensors(self) -> dict[str, dict[str, Tensor]]:
        state = super().state_tensors()
        names = {slot.start: slot.name for slot in self._bucket.slots}
        for index, each in enumerate(self._sparse_ranges):
            one = slice(index, index + 1)
            state[names[each.start]] |= {THRESHOLD_KEY: self.thresholds[one], AGE_KEY: self.ages[one]}
        return state

    def reshard(self, key: str, saved: SavedRows, out: Tensor) -> None:
        if key == RESIDUAL_KEY:
            super().reshard(key, saved, out)
        elif (row := saved.local_row(out.numel())) is not None:
            out.copy_(row)
        elif key == AGE_KEY:
            out.zero_()  # a refresh is due at age 0, so the old threshold is never used
