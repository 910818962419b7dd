"""topk: the largest elements of a bucket, as many in every step; the others wait in the remainder.

Law: the elements sent are the `kept` largest of gradient + remainder, ties taken from the front.
Source: Stich, Cordonnier, Jaggi, "Sparsified SGD with memory" (2018), Alg. 1.
"""

import torch
from torch import Tensor

from fourfold.parts import memory
from fourfold.parts.codec.entries import SparseMessage, select_largest
from fourfold.parts.codec.talk import (
    CodecReduction,
    accumulation_dtype,
    bucket_dtype,
    reduce_by_gather,
    residual_by_param,
)
from fourfold.plan.codec import Coding, Shapes, length, rounds, sparse
from fourfold.plan.data import Bucket


class TopK:
    """See `Codec` and `Gathering`."""

    def __init__(self, coding: Coding, bucket: Bucket, shapes: Shapes, device: torch.device) -> None:
        self.message_dtype, self.length = torch.uint8, length(bucket)
        self.rounds = rounds(coding, bucket, shapes)
        self._bucket, layout = bucket, sparse(coding, bucket)
        self._chosen = layout.chosen
        self._entries = SparseMessage(layout, bucket, bucket_dtype(bucket), device)
        self.remainder: Tensor = memory.private(self.length, accumulation_dtype(bucket), device)

    def talk(self, flat: Tensor) -> CodecReduction:
        return reduce_by_gather(self, flat)

    @torch.no_grad()
    def encode(self, flat: Tensor) -> Tensor:
        rest = self.remainder.add_(flat)
        places = torch.empty(0, dtype=torch.int64, device=rest.device)
        for each in self._chosen:
            places = select_largest(rest, each.kept, max_count=each.high).indices
        return self._entries.write(rest, places)

    @torch.no_grad()
    def add(self, payload: Tensor, out: Tensor) -> None:
        self._entries.add_to(payload, out)

    def scale(self, factor: float) -> None:
        self.remainder.mul_(factor)

    def state(self) -> dict[str, dict[str, Tensor]]:
        return residual_by_param(self._bucket, self.remainder)
