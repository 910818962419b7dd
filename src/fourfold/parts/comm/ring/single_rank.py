"""A ring group of one rank."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fourfold.parts.comm.meter import CommMeter
from fourfold.parts.comm.ring.protocol import RingAccumulator, concat_flat


class NullRingGroup:
    """See `RingGroup`."""

    name = "alone"
    size, index = 1, 0

    def __init__(self, meter: CommMeter) -> None:
        self.meter = meter

    def iterate_blocks(self, parts: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
        yield 0, concat_flat(parts)

    def make_accumulator(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> RingAccumulator:
        return _NullAccumulator(torch.zeros(num_elements, dtype=dtype, device=device))

    def all_gather(self, parts: Sequence[Tensor]) -> Sequence[Tensor]:
        return [concat_flat(parts)]

    def all_to_all(self, parts: Tensor) -> Tensor:
        return parts


class _NullAccumulator:
    """Sums that no other rank adds to; see `RingAccumulator`."""

    def __init__(self, zeros: Tensor) -> None:
        self._zeros = zeros

    def receive(self) -> Tensor:
        raise AssertionError("one rank has no other rank's block")

    def send(self) -> None:
        raise AssertionError("one rank has no neighbour to send to")

    def result(self) -> Tensor:
        return self._zeros
