"""Transport: what a layout change of a bucket costs between these ranks, and how it is done.

slot      this rank's flat of a bucket's gradient; where gradients rest split, several buckets take turns in one
launch    say that the slot is complete; reductions are launched in program order, on every rank the same
sum       the sum over ranks of all slots of a bucket; it rests where `sums` says
share     what a rank updates where optimizer states rest split: an equal stretch of every bucket
measure   a few float64 scalars summed over ranks
call      what the ranks do together, and in which step; see `calls`
Law: every rank launches and measures the same things in the same order.
"""

from collections.abc import Callable, Sequence
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
    slots: Sequence[torch.Tensor]
    """This rank's gradient flats, one a bucket. Buckets with the same number in `turns` share their memory."""
    turns: tuple[int, ...]
    weights: Sequence[torch.Tensor] | None
    """The flats of the weights, where they exist once per host; None where each rank is to have its own."""
    writes: bool
    """Whether this rank is the one that writes into `weights` what all are to have."""
    gathers: bool
    """Whether weights rest split among ranks that do not share memory: `bring` gathers them before use."""
    replica: int
    """Where shares exist several times (hybrid sharding): which of them is this rank's."""

    @property
    def waiting_seconds(self) -> float:
        """Time spent moving gradients and waiting for others, since the start."""
        ...

    @property
    def sent_bytes(self) -> float:
        """Bytes of gradients and weights that this rank has sent over process groups, since the start, as by ring."""
        ...

    @property
    def recorder(self) -> Recorder:
        """Told of waits and of this rank's part of each reduction."""
        ...

    @recorder.setter
    def recorder(self, recorder: Recorder) -> None: ...

    @property
    def factor(self) -> Callable[[], float]:
        """What sums are multiplied by where states rest whole; asked once all ranks have measured the loss."""
        ...

    @factor.setter
    def factor(self, factor: Callable[[], float]) -> None: ...

    def enter(self, call: str) -> None:
        """This rank begins a collective call. Does not wait; who reads the sums of LOSS knows that all began it."""
        ...

    def agree(self) -> None:
        """Wait until all ranks have begun a call. Raises DivergenceError unless it is the same one."""
        ...

    def lend(self, bucket: int) -> None:
        """Wait until this rank's slot of `bucket` may be written."""
        ...

    def launch(self, bucket: int, name: int) -> None:
        """This rank's slot of `bucket` is complete; the reduction is called `name`. Does not wait for its end."""
        ...

    def complete(self, bucket: int) -> None:
        """Wait until the sum of a launched bucket is there, or can be made by `take`."""
        ...

    def is_complete(self, bucket: int) -> bool:
        """Whether `complete` would not wait. May do this rank's part of reductions."""
        ...

    def is_free(self, bucket: int) -> bool:
        """Whether `lend` and `launch` would not wait. May do this rank's part of reductions."""
        ...

    def take(self, bucket: int, start: int, stop: int, factor: float) -> None:
        """Have the sum of [start, stop), inside this rank's share of a completed bucket, multiplied by `factor`."""
        ...

    def settle(self, bucket: int) -> None:
        """Have the whole sum of this rank's share of a completed bucket, now."""
        ...

    def sums(self, bucket: int) -> Sequence[Part]:
        """Where a bucket's sum rests: always the same tensors. Only this rank's share where states rest split."""
        ...

    def own(self, bucket: int) -> Part:
        """The part of a bucket's sum that this rank measures and scales, so that all ranks cover it once."""
        ...

    def scale(self, factor: float) -> None:
        """Multiply every completed sum by a factor that all ranks agree on, where states rest whole."""
        ...

    def gather(self, bucket: int) -> None:
        """Put the whole sum into this rank's slot, where states rest whole."""
        ...

    def permit(self) -> None:
        """This rank's backward is over: it reads the weights of this step no more. Does not wait."""
        ...

    def permitted(self) -> None:
        """Wait until weights may be written: where they exist once per host, until all its ranks have permitted it."""
        ...

    def publish(self, bucket: int, weight: torch.Tensor) -> None:
        """This rank's share of a bucket's weights is new. Begins to bring it to all; in program order."""
        ...

    def arrive(self, bucket: int) -> None:
        """Wait until all shares of a bucket that this rank has published are new. `close` waits for all buckets."""
        ...

    def bring(self, bucket: int, share: torch.Tensor, out: torch.Tensor) -> Callable[[], None]:
        """Begin to gather a bucket of weights, of which this rank has `share`, into `out`. The returned function waits.

        All ranks gather the same buckets in the same order, and wait for them in that order.
        """
        ...

    def hear(self, row: Sequence[int]) -> list[list[int]]:
        """The rows of all ranks, in rank order. Waits until all have given one."""
        ...

    def close(self) -> None:
        """This rank has finished with the sums of this step. The weights are whole when this returns."""
        ...

    def spread(self) -> None:
        """Bring rank 0's `weights` to every host. Collective."""
        ...

    def measure(self, kind: int, values: torch.Tensor) -> None:
        """Begin summing float64 scalars [n] over the ranks. Does not wait."""
        ...

    def measured(self, kind: int) -> list[float]:
        """The sums begun by `measure`. Those of LOSS raise DivergenceError where ranks are in different calls."""
        ...


def one() -> float:
    """The factor of sums that are used as they are."""
    return 1.0


Held = Callable[[int], Sequence[torch.Tensor]]


class Alone:
    """One rank: a sum is what the slot holds, and every rest is whole.

    Without slots: it is what `held(bucket)` gives, and who holds it lends, launches and updates.
    """

    name = "alone"
    size, index = 1, 0
    weights: Sequence[torch.Tensor] | None = None
    writes, gathers, replica = True, False, 0

    def __init__(self, slots: Sequence[torch.Tensor], turns: tuple[int, ...] = (), *, held: Held | None = None) -> None:
        self.slots: Sequence[torch.Tensor] = slots
        self.turns = turns or tuple(range(len(slots)))
        self._held = held or (lambda bucket: [self.slots[bucket]])
        self.waiting_seconds, self.sent_bytes = 0.0, 0.0
        self.recorder, self.factor = SILENT, one
        self._scaled = [False] * len(self.turns)
        self._measured: dict[int, torch.Tensor] = {}

    def enter(self, call: str) -> None:
        pass

    def agree(self) -> None:
        pass

    def lend(self, bucket: int) -> None:
        pass

    def launch(self, bucket: int, name: int) -> None:
        pass

    def complete(self, bucket: int) -> None:
        if not self._scaled[bucket]:
            self._scaled[bucket] = True
            if (factor := self.factor()) != 1.0:
                self._multiply(bucket, factor)

    def _multiply(self, bucket: int, factor: float) -> None:
        for flat in self._held(bucket):
            flat.mul_(factor)

    def is_complete(self, bucket: int) -> bool:
        return True

    def is_free(self, bucket: int) -> bool:
        return True

    def take(self, bucket: int, start: int, stop: int, factor: float) -> None:
        raise AssertionError("one rank's states rest whole")

    def settle(self, bucket: int) -> None:
        pass

    def sums(self, bucket: int) -> Sequence[Part]:
        return [self.own(bucket)]

    def own(self, bucket: int) -> Part:
        flat = self.slots[bucket]
        return Part(0, flat.numel(), flat)

    def scale(self, factor: float) -> None:
        for bucket in range(len(self.turns)):
            self._multiply(bucket, factor)

    def gather(self, bucket: int) -> None:
        pass

    def permit(self) -> None:
        pass

    def permitted(self) -> None:
        pass

    def publish(self, bucket: int, weight: torch.Tensor) -> None:
        pass

    def bring(self, bucket: int, share: torch.Tensor, out: torch.Tensor) -> Callable[[], None]:
        raise AssertionError("one rank's weights rest whole")

    def hear(self, row: Sequence[int]) -> list[list[int]]:
        return [list(row)]

    def arrive(self, bucket: int) -> None:
        pass

    def close(self) -> None:
        self._scaled = [False] * len(self.turns)

    def spread(self) -> None:
        pass

    def measure(self, kind: int, values: torch.Tensor) -> None:
        self._measured[kind] = values

    def measured(self, kind: int) -> list[float]:
        return self._measured.pop(kind).tolist()
