"""Links: ranks that show each other blocks: the places of a ring, or those that exchange heads.

block   a flat of the same length and dtype on every rank; here K and V of a rank's tokens, in one message
visit   the blocks of all, one after the other: one's own, then that of the place before, and so on
carry   sums that end at their owner: each rank adds its part for the owner that it is visited by, its own last
wire    what messages are sent by: a process group, or queues of threads
Law: all ranks of a link do the same things with it in the same order. What a visit shows is to be read before the
next one is asked for, and never written.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from fourfold.words.spans import RING, SILENT, Recorder

Landing = Callable[[], Tensor]
BLOCKS, SUMS = range(2)  # the lanes of a wire: messages of one lane arrive in order


class Carry(Protocol):
    """Sums on their way to their owners; `take` and `give` by turns, size − 1 times, then `own`."""

    def take(self) -> Tensor:
        """What the ranks before have added up for the owner of the block visited now; zeros if there are none."""
        ...

    def give(self) -> None:
        """This rank has added its part to what it took."""
        ...

    def own(self) -> Tensor:
        """What all others have added up for this rank."""
        ...


class Link(Protocol):
    """This rank's view of the ranks of a link."""

    name: str
    size: int
    index: int

    @property
    def sent_bytes(self) -> float:
        """Given to process groups, since the start."""
        ...

    @property
    def waiting_seconds(self) -> float:
        """Spent waiting for others, since the start."""
        ...

    @property
    def recorder(self) -> Recorder:
        """Told of waits."""
        ...

    @recorder.setter
    def recorder(self, recorder: Recorder) -> None: ...

    def visit(self, parts: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
        """(owner, its block: its parts, one after the other), for all. To be read to the end.

        The next one is on its way while one is looked at.
        """
        ...

    def carry(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> Carry:
        """Begin sums of this length."""
        ...

    def gather(self, parts: Sequence[Tensor]) -> Sequence[Tensor]:
        """The blocks of all, by index; this rank's to keep."""
        ...

    def swap(self, parts: Tensor) -> Tensor:
        """parts [size, n], one for each rank -> [size, n], what each rank had for this one."""
        ...


class NoLink:
    """One rank; see `Link`."""

    name = "alone"
    size, index = 1, 0

    def __init__(self) -> None:
        self.sent_bytes, self.waiting_seconds, self.recorder = 0.0, 0.0, SILENT

    def visit(self, parts: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
        yield 0, _block(parts)

    def carry(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> Carry:
        return _Nothing(torch.zeros(num_elements, dtype=dtype, device=device))

    def gather(self, parts: Sequence[Tensor]) -> Sequence[Tensor]:
        return [_block(parts)]

    def swap(self, parts: Tensor) -> Tensor:
        return parts


class _Nothing:
    """What nobody else adds to; see `Carry`."""

    def __init__(self, zeros: Tensor) -> None:
        self._zeros = zeros

    def take(self) -> Tensor:
        raise AssertionError("one rank is visited by nobody")

    def give(self) -> None:
        raise AssertionError("one rank gives nothing away")

    def own(self) -> Tensor:
        return self._zeros


class Wire(Protocol):
    """What messages are sent by."""

    name: str
    size: int
    index: int
    sent_bytes: float
    waiting_seconds: float
    recorder: Recorder

    def shift(self, flat: Tensor, lane: int) -> Landing:
        """Begin to send to the next place; what lands is what the place before has sent."""
        ...

    def gather(self, flat: Tensor) -> Tensor:
        """[n] -> [size, n]"""
        ...

    def swap(self, parts: Tensor) -> Tensor:
        """[size, n], one row for each rank -> [size, n], the row of each rank for this one."""
        ...


class Messages:
    """A link whose blocks are handed on from place to place; see `Link`."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self.name, self.size, self.index = wire.name, wire.size, wire.index

    @property
    def sent_bytes(self) -> float:
        return self._wire.sent_bytes

    @property
    def waiting_seconds(self) -> float:
        return self._wire.waiting_seconds

    @property
    def recorder(self) -> Recorder:
        return self._wire.recorder

    @recorder.setter
    def recorder(self, recorder: Recorder) -> None:
        self._wire.recorder = recorder

    def visit(self, parts: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
        block = _block(parts)
        for hop in range(self.size):
            land = _begin(self._wire, block, BLOCKS) if hop < self.size - 1 else None
            yield (self.index - hop) % self.size, block
            if land is not None:
                block = land()

    def carry(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> Carry:
        return _Handed(self._wire, torch.zeros(num_elements, dtype=dtype, device=device))

    def gather(self, parts: Sequence[Tensor]) -> Sequence[Tensor]:
        return self._wire.gather(_block(parts)).unbind()

    def swap(self, parts: Tensor) -> Tensor:
        return self._wire.swap(parts)


class _Handed:
    """Sums handed on from place to place; see `Carry`. `zeros` are this rank's, to begin with."""

    def __init__(self, wire: Wire, zeros: Tensor) -> None:
        self._wire, self._held = wire, zeros
        self._land: Landing | None = None

    def take(self) -> Tensor:
        if self._land is not None:
            self._held = self._land()
        return self._held

    def give(self) -> None:
        self._land = _begin(self._wire, self._held, SUMS)

    def own(self) -> Tensor:
        return self.take()


def _begin(wire: Wire, flat: Tensor, lane: int) -> Landing:
    told, shifted = wire.recorder.sending(RING), wire.shift(flat, lane)

    def land() -> Tensor:
        taken = shifted()
        told()
        return taken

    return land


def _block(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([part.reshape(-1) for part in parts])


def scatter(link: Link, parts: Tensor) -> Tensor:
    """parts [size, n], this rank's addends for each -> [n], the sum of all ranks' for this one, in rank order."""
    return link.swap(parts).sum(0)
