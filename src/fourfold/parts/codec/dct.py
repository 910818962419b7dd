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
from fourfold.parts.codec.entries import Entries, above, choose
from fourfold.parts.codec.talk import Talk, by_slot, dtype_of, gather, work_dtype
from fourfold.plan.codec import Chosen, Coding, Shapes, length, rounds, sparse
from fourfold.plan.data import Bucket


class Dct:
    """See `Codec` and `Gathering`."""

    def __init__(self, coding: Coding, bucket: Bucket, shapes: Shapes, device: torch.device) -> None:
        self.message_dtype, self.length = torch.uint8, length(bucket)
        self.rounds, self._life = rounds(coding, bucket, shapes), coding.life
        self._bucket, layout = bucket, sparse(coding, bucket)
        self._chosen = layout.chosen
        self._entries = Entries(layout, bucket, dtype_of(bucket), device)
        self.remainder: Tensor = memory.private(self.length, work_dtype(bucket), device)
        self.thresholds = torch.zeros(len(layout.chosen), dtype=torch.float64)
        self.ages = torch.zeros(len(layout.chosen), dtype=torch.int64)
        self.num_early = 0
        """Refreshes before their time, since the start."""

    def talk(self, flat: Tensor) -> Talk:
        return gather(self, flat)

    @torch.no_grad()
    def encode(self, flat: Tensor) -> Tensor:
        rest = self.remainder.add_(flat)
        found = [self._choose(number, rest[each.start : each.stop]) for number, each in enumerate(self._chosen)]
        places = [there.add_(each.start) for there, each in zip(found, self._chosen, strict=True)]
        none = torch.empty(0, dtype=torch.int64, device=rest.device)
        return self._entries.write(rest, torch.cat(places) if places else none)

    def _choose(self, number: int, rest: Tensor) -> Tensor:
        """Places in a parameter's stretch that are to be sent."""
        each, threshold, age = self._chosen[number], float(self.thresholds[number]), int(self.ages[number])
        self.ages[number] += 1
        if age % self._life:
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

    def state(self) -> dict[str, dict[str, Tensor]]:
        found = by_slot(self._bucket, self.remainder)
        names = {slot.start: slot.name for slot in self._bucket.slots}
        for number, each in enumerate(self._chosen):
            one = slice(number, number + 1)
            found[names[each.start]] |= {"threshold": self.thresholds[one], "age": self.ages[one]}
        return found
