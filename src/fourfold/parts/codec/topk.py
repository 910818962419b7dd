"""topk: the largest elements of a bucket, as many in every step; the others wait in the remainder.

Law: the elements sent are the `kept` largest of gradient + remainder, ties taken from the front.
Source: Stich, Cordonnier, Jaggi, "Sparsified SGD with memory" (2018), Alg. 1.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from fourfold.parts.codec.entries import Entries, choose
from fourfold.parts.codec.talk import Talk, dtype_of, gather, put, work_dtype
from fourfold.plan.codec import Coding, Shapes, rounds, sparse
from fourfold.plan.data import Bucket


class TopK:
    """See `Codec` and `Gathering`."""

    def __init__(self, coding: Coding, bucket: Bucket, shapes: Shapes, device: torch.device) -> None:
        self.rounds = rounds(coding, bucket, shapes)
        layout = sparse(coding, bucket)
        self._chosen = layout.chosen
        self._entries = Entries(layout, bucket, dtype_of(bucket), device)
        self.remainder: Tensor = torch.zeros(bucket.size, dtype=work_dtype(bucket), device=device)

    def talk(self, flat: Tensor) -> Talk:
        return gather(self, flat)

    @torch.no_grad()
    def encode(self, flat: Tensor) -> Tensor:
        rest = self.remainder.add_(flat)
        places = torch.empty(0, dtype=torch.int64, device=rest.device)
        for each in self._chosen:
            places = choose(rest, each.kept, most=each.high).places
        return self._entries.write(rest, places)

    @torch.no_grad()
    def add(self, payload: Tensor, out: Tensor) -> None:
        self._entries.add(payload, out)

    def scale(self, factor: float) -> None:
        self.remainder.mul_(factor)

    def state(self) -> dict[str, Tensor]:
        return {"remainder": self.remainder}

    def load(self, state: Mapping[str, Tensor]) -> None:
        put(self.state(), state)
