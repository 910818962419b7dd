"""dct: Dynamic Communication Thresholding, data-parallel: a hard threshold per parameter, found anew now and then.

life  steps for which a threshold is used; finding it costs more than using it
band  how many elements may pass: outside of [low, high] the threshold is found anew in the same step
Law: a parameter never sends more than `high` elements, and at a refresh without ties n − ⌊n·η⌋, zeros never.

Source: Gupta et al. (2021), Alg. 1. The band is ours: remainders grow after the first refresh, which saw none, so a
threshold that is kept for its whole life lets more and more through; and messages here have a fixed length.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from fourfold.parts.codec.entries import Entries, above, choose
from fourfold.parts.codec.talk import Talk, dtype_of, gather, put, work_dtype
from fourfold.plan.codec import Chosen, Coding, Shapes, rounds, sparse
from fourfold.plan.data import Bucket


class Dct:
    """See `Codec` and `Gathering`."""

    def __init__(self, coding: Coding, bucket: Bucket, shapes: Shapes, device: torch.device) -> None:
        self.rounds, self._life = rounds(coding, bucket, shapes), coding.life
        layout = sparse(coding, bucket)
        self._chosen = layout.chosen
        self._entries = Entries(layout, bucket, dtype_of(bucket), device)
        self.remainder: Tensor = torch.zeros(bucket.size, dtype=work_dtype(bucket), device=device)
        self.thresholds = torch.zeros(len(layout.chosen), dtype=torch.float64)
        self.steps = torch.zeros((), dtype=torch.int64)
        self.num_early = 0
        """Refreshes before their time, since the start."""

    def talk(self, flat: Tensor) -> Talk:
        return gather(self, flat)

    @torch.no_grad()
    def encode(self, flat: Tensor) -> Tensor:
        rest = self.remainder.add_(flat)
        due = int(self.steps) % self._life == 0
        self.steps += 1
        found = [self._choose(number, rest[each.start : each.stop], due) for number, each in enumerate(self._chosen)]
        places = [there.add_(each.start) for there, each in zip(found, self._chosen, strict=True)]
        none = torch.empty(0, dtype=torch.int64, device=rest.device)
        return self._entries.write(rest, torch.cat(places) if places else none)

    def _choose(self, number: int, rest: Tensor, due: bool) -> Tensor:
        """Places in a parameter's stretch that are to be sent."""
        each, threshold = self._chosen[number], float(self.thresholds[number])
        if not due:
            places = above(rest, threshold)
            if self._in_band(each, places.numel(), threshold, rest.dtype):
                return places
            self.num_early += 1
        choice = choose(rest, each.kept, most=each.high)
        self.thresholds[number] = choice.threshold
        return choice.places

    @staticmethod
    def _in_band(each: Chosen, count: int, threshold: float, dtype: torch.dtype) -> bool:
        # At the least threshold there is, few pass because most are zero, and looking again would not help.
        return count <= each.high and (count >= each.low or threshold <= torch.finfo(dtype).tiny)

    @torch.no_grad()
    def add(self, payload: Tensor, out: Tensor) -> None:
        self._entries.add(payload, out)

    def scale(self, factor: float) -> None:
        self.remainder.mul_(factor)
        self.thresholds.mul_(abs(factor))

    def state(self) -> dict[str, Tensor]:
        return {"remainder": self.remainder, "thresholds": self.thresholds, "steps": self.steps}

    def load(self, state: Mapping[str, Tensor]) -> None:
        put(self.state(), state)
