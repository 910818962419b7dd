"""Transport: what a layout change of a bucket costs between these ranks, and how it is done.

slot      this rank's flat of a bucket's gradient
launch    say that the slot is complete; reductions are launched in program order, on every rank the same
sum       the sum over ranks of all slots of a bucket; it rests where `sums` says
measure   a few float64 scalars summed over ranks
call      what the ranks do together, and in which step; see `calls`
Law: every rank launches and measures the same things in the same order.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from fourfold.words.spans import SILENT, Recorder


class Part(NamedTuple):
    """A stretch [start, stop) of a bucket, in elements, and the tensor that holds it."""

    start: int
    stop: int
    flat: torch.Tensor


class Transport(Protocol):
    """The data ranks, as the buckets see them."""

    name: str
    size: int
    index: int
    waiting_seconds: float
    """Time spent moving gradients and waiting for others, since the start."""
    slots: Sequence[torch.Tensor]
    """This rank's gradient flats, one a bucket."""
    recorder: Recorder
    """Told of waits and of this rank's part of each reduction."""

    def enter(self, call: str) -> None:
        """This rank begins a collective call. Does not wait; who reads the sums of LOSS knows that all began it."""
        ...

    def agree(self) -> None:
        """Wait until all ranks have begun a call. Raises DivergenceError unless it is the same one."""
        ...

    def open(self) -> None:
        """Wait until everybody has finished with this rank's slots of the previous step."""
        ...

    def launch(self, bucket: int) -> None:
        """This rank's slot of `bucket` is complete. Does not wait."""
        ...

    def complete(self, bucket: int) -> None:
        """Wait until the sum of a launched bucket is there."""
        ...

    def sums(self, bucket: int) -> Sequence[Part]:
        """Where a bucket's sum rests: always the same tensors; read only."""
        ...

    def own(self, bucket: int) -> Part:
        """The part of a bucket's sum that this rank measures and scales, so that all ranks cover it once."""
        ...

    def scale(self, factor: float) -> None:
        """Multiply every sum by a factor that all ranks agree on."""
        ...

    def gather(self, bucket: int) -> None:
        """Put the whole sum into this rank's slot."""
        ...

    def close(self) -> None:
        """This rank has finished with the sums of this step."""
        ...

    def measure(self, kind: int, values: torch.Tensor) -> None:
        """Begin summing float64 scalars [n] over the ranks. Does not wait."""
        ...

    def measured(self, kind: int) -> list[float]:
        """The sums begun by `measure`. Those of LOSS raise DivergenceError where ranks are in different calls."""
        ...


class Alone:
    """One rank: a sum is what the slot holds."""

    name = "alone"
    size, index = 1, 0

    def __init__(self, slots: Sequence[torch.Tensor]) -> None:
        self.slots: Sequence[torch.Tensor] = slots
        self.waiting_seconds, self.recorder = 0.0, SILENT
        self._measured: dict[int, torch.Tensor] = {}

    def enter(self, call: str) -> None:
        pass

    def agree(self) -> None:
        pass

    def open(self) -> None:
        pass

    def launch(self, bucket: int) -> None:
        pass

    def complete(self, bucket: int) -> None:
        pass

    def sums(self, bucket: int) -> Sequence[Part]:
        return [self.own(bucket)]

    def own(self, bucket: int) -> Part:
        flat = self.slots[bucket]
        return Part(0, flat.numel(), flat)

    def scale(self, factor: float) -> None:
        for flat in self.slots:
            flat.mul_(factor)

    def gather(self, bucket: int) -> None:
        pass

    def close(self) -> None:
        pass

    def measure(self, kind: int, values: torch.Tensor) -> None:
        self._measured[kind] = values

    def measured(self, kind: int) -> list[float]:
        return self._measured.pop(kind).tolist()
