"""Split: reduce-scatter and all-gather of equal shares over a process group.

share     the index-th of `size` equal stretches of a flat
received  the other ranks' addends of this rank's share, in rank order, until they are added up
Law: whoever adds, the addends are added in rank order: ((0 + 1) + 2) + …

Over gloo a reduce-scatter is an all-to-all and a sum: gloo's own moves as many bytes as its all-reduce and takes 1.3
to 2.3 times as long (`docs/measured.md`).
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fourfold.parts import memory
from fourfold.parts.comm.ranks import Ranks

Future = Callable[[], Any]


def ignore(future: Future) -> None:
    """For those who do not follow a collective."""


class Flight(NamedTuple):
    """A collective on its way: `land` waits for it and gives what it is about."""

    land: Callable[[], Any]
    has_landed: Callable[[], bool]


def landed() -> bool:
    """Whether a flight of nothing has landed."""
    return True


class Splitter:
    """The ranks among which flats are split. Every rank must begin the same changes in the same order.

    Sums and gathers are two orders: an update in backward may come before or after a launch, as it happens.
    """

    def __init__(self, ranks: Ranks, members: Sequence[int]) -> None:
        self._ranks = ranks
        self._sums, self._gathers = ranks.group(members, "buckets"), ranks.group(members, "weights")
        self.size = len(members)
        self.index = list(members).index(ranks.rank) if ranks.rank in members else -1
        self._free: dict[tuple[int, torch.dtype], list[Tensor]] = {}

    def share(self, flat: Tensor) -> Tensor:
        """This rank's share, a view."""
        length = flat.numel() // self.size
        return flat[self.index * length : (self.index + 1) * length]

    def scatter(self, flat: Tensor, begun: Callable[[Future], None] = ignore) -> Flight:
        """Begin to sum `flat` over the ranks; what lands is this rank's share of the sum.

        The sum lies in this rank's share of `flat`, the rest of which is no longer of any use. `begun` is told of the
        collective's future.
        """
        mine = self.share(flat)
        if flat.device.type == "cuda":
            work = _begun(dist.reduce_scatter_tensor(mine, flat, group=self._sums, async_op=True))
            begun(work.get_future)

            def land() -> Tensor:
                with self._ranks.naming_the_dead():
                    work.wait()
                return mine

            return Flight(land, work.is_completed)
        received = self._take(flat.numel(), flat.dtype)
        work = _begun(dist.all_to_all_single(received, flat, group=self._sums, async_op=True))
        begun(work.get_future)

        def land_and_add() -> Tensor:
            with self._ranks.naming_the_dead():
                work.wait()
            add_up(received.view(self.size, -1).unbind(), out=mine)
            self._give_back(received)
            return mine

        return Flight(land_and_add, work.is_completed)

    def gather(self, flat: Tensor) -> Callable[[], None]:
        """Begin to bring every rank's share of `flat` to all; the returned function waits."""
        # A copy: gloo does not promise that the input may be a part of the output.
        mine = self.share(flat) if flat.device.type == "cuda" else self._copied(self.share(flat))
        work = _begun(dist.all_gather_into_tensor(flat, mine, group=self._gathers, async_op=True))

        def land() -> None:
            with self._ranks.naming_the_dead():
                work.wait()
            if flat.device.type != "cuda":
                self._give_back(mine)

        return land

    def _copied(self, part: Tensor) -> Tensor:
        staged = self._take(part.numel(), part.dtype)
        return staged.copy_(part)

    def _take(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        free = self._free.setdefault((num_elements, dtype), [])
        return free.pop() if free else memory.private(num_elements, dtype, torch.device("cpu"))

    def _give_back(self, flat: Tensor) -> None:
        self._free[flat.numel(), flat.dtype].append(flat)


def add_up(parts: Sequence[Tensor], *, out: Tensor) -> None:
    """The sum of the parts, in their order whoever adds; `out` may be one of them."""
    total = parts[0]
    if len(parts) == 1:
        if out is not total:
            out.copy_(total)
        return
    for number, part in enumerate(parts[1:], 1):
        # Only the last sum lands in `out`: that may be an addend which is still to come.
        total = torch.add(total, part, out=out if number == len(parts) - 1 else None)


def _begun(work: dist.Work | None) -> dist.Work:
    assert work is not None
    return work
