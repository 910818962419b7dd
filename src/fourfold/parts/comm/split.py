"""Split: reduce-scatter and all-gather of equal shares over a group.

share     the index-th of `size` equal stretches of a flat
received  the other ranks' addends of this rank's share, in rank order, until they are added up
replica   ranks that have all shares among them; who have the same share sum it over the replicas
Law: whoever adds, the addends are added in rank order: ((0 + 1) + 2) + …

Over gloo a reduce-scatter is an all-to-all and a sum: gloo's own moves as many bytes as its all-reduce and takes 1.3
to 2.3 times as long (`docs/measured.md`).
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fourfold.parts import memory
from fourfold.parts.comm.groups import Group, Work
from fourfold.parts.comm.ranks import Communicator
from fourfold.plan.data import Places
from fourfold.words.layout import Change

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


class _Onward:
    """A sum over one replica's ranks that is then summed over the replicas; all ranks do so in the order of scatters.

    Every look at one of them sends on those before it, whose second sums others may be waiting for.
    """

    def __init__(self, first: Flight, replicas: Group, before: "deque[_Onward]") -> None:
        self._first, self._replicas, self._before = first, replicas, before
        self._sum: Tensor | None = None
        self._second: Work | None = None

    def _send_next(self) -> None:
        head = self._before.popleft()
        share = head._sum = head._first.land()
        head._second = head._replicas.all_reduce(share)

    def has_landed(self) -> bool:
        while self._second is None:
            if not self._before[0]._first.has_landed():
                return False
            self._send_next()
        return self._second.is_completed()

    def land(self) -> Tensor:
        while self._second is None:
            self._send_next()
        self._second.wait()
        assert self._sum is not None
        return self._sum


class Splitter:
    """The ranks among which flats are split. Every rank must begin the same changes in the same order.

    Sums and gathers are two orders: an update in backward may come before or after a launch, as it happens.
    """

    def __init__(self, ranks: Communicator, members: Sequence[int], *, shard: int | None = None) -> None:
        """`shard` neighbours of the members have all shares among them (None: all members)."""
        self._ranks = ranks
        self.size = shard or len(members)
        self.places = Places(self.size, len(members) // self.size)
        own = list(members).index(ranks.rank) if ranks.rank in members else -1
        self.index, self.replica = own % self.size, own // self.size
        # Every rank asks for every group.
        for first in range(0, len(members) if self.size > 1 else 0, self.size):
            some = list(members[first : first + self.size])
            sums, gathers = ranks.get_group(some, "buckets"), ranks.get_group(some, "weights")
            if ranks.rank in some:
                self._sums, self._gathers = sums, gathers
        for place in range(self.size if self.places.replicas > 1 else 0):
            same = list(members[place :: self.size])
            replicas = ranks.get_group(same, "replicas")
            if ranks.rank in same:
                self._replicas = replicas
        self._onward: deque[_Onward] = deque()
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
        flight = self._scatter(flat, begun) if self.size > 1 else Flight(lambda: flat, landed)
        if self.places.replicas == 1:
            return flight
        onward = _Onward(flight, self._replicas, self._onward)
        self._onward.append(onward)
        onward.has_landed()  # there may be nothing to wait for

        def land() -> Tensor:
            with self._ranks.report_dead_peers():
                return onward.land()

        return Flight(land, onward.has_landed)

    def _scatter(self, flat: Tensor, begun: Callable[[Future], None]) -> Flight:
        mine = self.share(flat)
        if flat.device.type == "cuda":
            work = self._sums.reduce_scatter(mine, flat)
            begun(work.get_future)

            def land() -> Tensor:
                with self._ranks.report_dead_peers():
                    work.wait()
                return mine

            return Flight(land, work.is_completed)
        received = self._take(flat.numel(), flat.dtype)
        work = self._sums.all_to_all(received, flat)
        begun(work.get_future)

        def land_and_add() -> Tensor:
            with self._ranks.report_dead_peers():
                work.wait()
            add_up(received.view(self.size, -1).unbind(), out=mine)
            self._give_back(received)
            return mine

        return Flight(land_and_add, work.is_completed)

    def gather(self, flat: Tensor) -> Callable[[], None]:
        """Begin to bring every rank's share of `flat` to all; the returned function waits."""
        if flat.device.type == "cuda":
            return self.bring(self.share(flat), flat)
        # A copy: gloo does not promise that the input may be a part of the output.
        mine = self._copied(self.share(flat))
        land = self.bring(mine, flat)

        def land_and_free() -> None:
            land()
            self._give_back(mine)

        return land_and_free

    def bring(self, share: Tensor, out: Tensor) -> Callable[[], None]:
        """Begin to bring every rank's share to all, into `out`; the returned function waits."""
        work = self._gathers.all_gather(out, share)

        def land() -> None:
            with self._ranks.report_dead_peers():
                work.wait()

        return land

    def reduced_bytes(self, flat: Tensor) -> float:
        """Bytes this rank sends to sum a flat, as by ring."""
        return self.places.reduced_bytes(Change.REDUCE_SCATTER, flat.numel() * flat.element_size())

    def gathered_bytes(self, flat: Tensor) -> float:
        """Bytes this rank sends to bring the shares of a flat together, as by ring."""
        return self.places.gathered_bytes(Change.ALL_GATHER, flat.numel() * flat.element_size())

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
