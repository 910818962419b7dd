"""Shared memory: the processes of one host reduce without a message.

flag     only grows; where it lies, as slots and scalars do, is in `slotting.py`
slice    the part of every bucket that one rank sums, in rank order, into its own slot
Law: a slot is written while no other rank may read it. A rank reads others' slots after `launched` says that
they are complete, others' sums after `summed`, and nobody writes again before `closed` says that all have read.

Plain stores of the flags order after the data on x86 (total store order); elsewhere this transport is not used.
To sum, a rank reads its slice of all N slots and writes one slice, 1/N of the bucket; the update then reads every
slice where its owner put it.

Measured: `docs/measured.md`, "Collectives".
"""

import functools
import mmap
import os
import platform
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from fourfold.parts.comm.calls import CallBoard
from fourfold.parts.comm.group import GradShards
from fourfold.parts.comm.slotting import (
    CALLED,
    CLOSED,
    DEAD,
    FLAG_STRIDE,
    LAUNCHED,
    MEASURED,
    NUM_FLAGS,
    NUM_MEASURES,
    PERMITTED,
    SCALED,
    STAGED,
    SUMMED,
    TAKEN,
    UPDATED,
    Slotting,
    scalars_of,
    slots_of,
    stages_of,
    weights_of,
)
from fourfold.parts.comm.split import Flight, add_up
from fourfold.parts.comm.staging import Flags, Staging
from fourfold.parts.comm.transport import Part, one
from fourfold.plan.data import RESTS, Rest
from fourfold.plan.order import share
from fourfold.words.action import LOSS
from fourfold.words.errors import PeerError
from fourfold.words.layout import PARTIAL, SPLIT
from fourfold.words.spans import SILENT

SPINS = 200
YIELD_SECONDS = 0.002
POLL_SECONDS = 0.0002
LIVENESS_SECONDS = 0.05
COMING_SECONDS = 2.0


class Between(Protocol):
    """The ranks of the same local index on all hosts, or on those of one replica, and which of these this one is."""

    size: int
    index: int
    replica: int
    sent_bytes: float

    def begin(self, flat: torch.Tensor) -> Flight:
        """Begin an all-reduce in place; what lands is `flat`."""
        ...

    def scatter(self, flat: torch.Tensor) -> Flight:
        """Begin a reduce-scatter; what lands is this host's share of the sum."""
        ...

    def gather(self, flat: torch.Tensor) -> Callable[[], None]:
        """Begin an all-gather in place of the hosts' shares; the returned function waits for it."""
        ...

    def bring(self, share: torch.Tensor, out: torch.Tensor) -> Callable[[], None]:
        """Begin an all-gather of the hosts' shares; the returned function waits for it."""
        ...

    def hear(self, row: Sequence[int]) -> list[list[int]]:
        """The rows of all ranks of all hosts, in rank order."""
        ...

    def broadcast(self, flat: torch.Tensor) -> None:
        """Bring the first host's values to all."""
        ...

    def measure(self, values: Sequence[float], call: str | None = None) -> list[float]:
        """Sums over the hosts. With a call: raises DivergenceError where another host is in another one."""
        ...


class Shared:
    """The transport between the processes of a host; see `Transport`. `between` reaches the other hosts."""

    def __init__(
        self,
        mapping: mmap.mmap,
        slotting: Slotting,
        *,
        index: int,
        size: int,
        rest: Rest = RESTS[0],
        ranks: Sequence[int] = (),
        links: Mapping[int, socket.socket] | None = None,
        between: Between | None = None,
        coded: bool = False,
        time_limit_seconds: float = 1800.0,
    ) -> None:
        self.name = "shared memory" + (" + gloo between hosts" if between else "")
        self.index, self.size = index, size
        self.waiting_seconds, self.recorder, self.factor = 0.0, SILENT, one
        self._between, self._limit = between, time_limit_seconds
        # Else a codec has been between the hosts already: what this host's ranks have adds up to the whole sum.
        self._reduces_between = between is not None and not coded
        self._ranks = tuple(ranks) or tuple(range(size))
        self._links = dict(links or {})
        self._mapping = mapping
        self._flags = memoryview(mapping).cast("B").cast("q")
        self._words = slotting.region_bytes // 8
        self._all_slots = [slots_of(mapping, slotting, region) for region in range(size)]
        self.slots: Sequence[torch.Tensor] = self._all_slots[index]
        self.turns = slotting.turns
        self._scalars = [scalars_of(mapping, slotting, region) for region in range(size)]
        self._slices = [[_slice(length, size, peer) for peer in range(size)] for length in slotting.sizes]
        starts = [region * slotting.region_bytes + slotting.calls_offset for region in range(size)]
        self._board, self._call = CallBoard(mapping, starts, self._ranks), ""
        self._counts = [0] * NUM_FLAGS
        self._lengths = [0] * NUM_MEASURES
        self._unread: deque[int] = deque()  # measures that have begun
        self._read: dict[int, list[float]] = {}
        self._queue: list[tuple[int, int]] = []  # launched, not yet summed, in program order
        self._flying: deque[tuple[int, Flight]] = deque()  # summed here, on their way between hosts
        self._numbers = [0] * len(self.slots)  # the number of a bucket's last launch
        self._split = rest.state == SPLIT
        # Sums of one's own share can be made when they are used, a piece at a time that stays in the cache.
        self._lazy = self._split and rest.gradient == PARTIAL and not self._reduces_between
        self._summed = [False] * len(self.slots)
        hosts = between.size if between is not None else 1
        self._grad_shards = GradShards(self.slots, size * hosts) if rest.gradient == SPLIT else None
        self._pending_gathers: deque[Callable[[], None] | None] = (
            deque()
        )  # published, not yet on all of this host's memory
        self._published = [0] * len(self.slots)  # the number of a bucket's last publication
        self.writes = index == 0 or not slotting.weights_bytes
        self.weights: Sequence[torch.Tensor] | None = None
        behind = size * slotting.region_bytes
        if slotting.weights_bytes:
            self.weights = weights_of(mapping, slotting, behind)
        self.replica = 0 if between is None else between.replica
        self._staging = self._staging_in(stages_of(mapping, slotting, behind)) if slotting.stage_bytes else None
        self.gathers = self._staging is not None

    @property
    def sent_bytes(self) -> float:
        return 0.0 if self._between is None else self._between.sent_bytes

    # ---- flags --------------------------------------------------------------------------------------

    def _increment_flag(self, flag: int) -> None:
        self._counts[flag] += 1
        self._flags[self.index * self._words + flag * FLAG_STRIDE] = self._counts[flag]

    def _least(self, flag: int) -> int:
        return min(self._flags[peer * self._words + flag * FLAG_STRIDE] for peer in range(self.size))

    def _wait(self, flag: int, count: int) -> None:
        """Until every rank's flag has reached `count`: spin, then yield, then doze, looking for dead peers."""
        for _ in range(SPINS):
            if self._least(flag) >= count:
                return
        begin = time.perf_counter()
        looked = begin
        with self.recorder.waiting():
            while self._least(flag) < count:
                now = time.perf_counter()
                if now - begin < YIELD_SECONDS:
                    os.sched_yield()
                    continue
                time.sleep(POLL_SECONDS)
                if now - looked > LIVENESS_SECONDS:
                    looked = now
                    self._look_for_strays(now - begin)
                    try:
                        self._look_for_dead(flag, count, now - begin)
                    except PeerError:
                        self._compare()  # A rank that went astray ends of it: that is the cause, not its death.
                        raise
        self.waiting_seconds += time.perf_counter() - begin

    def _look_for_dead(self, flag: int, count: int, waited_seconds: float) -> None:
        # Nothing is ever sent on a link: it can be read only once its other end is gone.
        poll = select.poll()
        for link in self._links.values():
            poll.register(link, select.POLLIN)
        ready = {handle for handle, _ in poll.poll(0)}
        dead = [peer for peer, link in self._links.items() if link.fileno() in ready]
        # The leader alone has links to all: it writes down who died before it ends of it.
        known = self._flags[DEAD * FLAG_STRIDE]
        if known == 0 and dead and self.index == 0:
            self._flags[DEAD * FLAG_STRIDE] = known = dead[0] + 1
        if (known or dead) and self._least(flag) < count:
            rank = self._ranks[known - 1 if known else dead[0]]
            raise PeerError(
                f"rank {rank} (host {platform.node()}) died while rank {self._ranks[self.index]} waited for it"
            )
        if waited_seconds > self._limit:
            flags = {self._ranks[p]: self._flags[p * self._words + flag * FLAG_STRIDE] for p in range(self.size)}
            late = ", ".join(str(rank) for rank, reached in flags.items() if reached < count)
            raise PeerError(f"rank {late} did not come within {self._limit:.0f} s")

    # ---- calls ---------------------------------------------------------------------------------------

    def enter(self, call: str) -> None:
        self._call = call
        self._board.write(self.index, self._counts[CALLED] + 1, call)
        self._increment_flag(CALLED)

    def agree(self) -> None:
        self._wait(CALLED, self._counts[CALLED])
        self._compare()
        if self._between is not None:
            self._between.measure([], self._call)

    def _look_for_strays(self, waited_seconds: float) -> None:
        # Those that are only late are waited for, so that every rank's call can be told.
        if self._least(CALLED) >= self._counts[CALLED] or waited_seconds > COMING_SECONDS:
            self._compare()

    def _compare(self) -> None:
        def counted() -> list[int]:
            return [self._flags[peer * self._words + CALLED * FLAG_STRIDE] for peer in range(self.size)]

        self._board.check(self.index, counted)

    # ---- weights that rest split between hosts -------------------------------------------------------

    def _staging_in(self, stages: Sequence[torch.Tensor]) -> Staging:
        flags = Flags(
            staged=functools.partial(self._increment_flag, STAGED),
            taken=functools.partial(self._increment_flag, TAKEN),
            all_staged=functools.partial(self._wait, STAGED),
            all_taken=functools.partial(self._wait, TAKEN),
        )
        return Staging(stages, flags)

    def bring(self, bucket: int, share: torch.Tensor, out: torch.Tensor) -> Callable[[], None]:
        assert self._staging is not None
        assert self._between is not None
        begin = functools.partial(self._between.bring, share)
        return self._timed(self._staging.bring(slice(*self._slices[bucket][self.index]), out, begin))

    def hear(self, row: Sequence[int]) -> list[list[int]]:
        assert self._between is not None
        begin = time.perf_counter()
        with self.recorder.waiting():
            everyone = self._between.hear(row)
        self.waiting_seconds += time.perf_counter() - begin
        return everyone

    def _timed(self, land: Callable[[], None]) -> Callable[[], None]:
        def land_in_time() -> None:
            begin, waited = time.perf_counter(), self.waiting_seconds
            with self.recorder.waiting():
                land()
            self.waiting_seconds = waited + time.perf_counter() - begin

        return land_in_time

    # ---- a bucket's reduction -----------------------------------------------------------------------

    def lend(self, bucket: int) -> None:
        self._wait(CLOSED, self._counts[CLOSED])
        if self._grad_shards is not None:
            numbers = [n for n, turn in zip(self._numbers, self.turns, strict=True) if turn == self.turns[bucket]]
            self._sum_until(max(numbers))
            self._wait(SUMMED, max(numbers))

    def launch(self, bucket: int, name: int) -> None:
        self._queue.append((bucket, name))
        self._increment_flag(LAUNCHED)
        self._numbers[bucket] = self._counts[LAUNCHED]
        if not self._lazy:
            self._advance()

    def complete(self, bucket: int) -> None:
        number = self._numbers[bucket]
        if self._lazy:
            self._wait(LAUNCHED, number)
            return
        done = self._counts[SUMMED] if self._split else self._least(SUMMED)
        if done >= number:
            return
        begin, waited = time.perf_counter(), self.waiting_seconds
        with self.recorder.waiting():
            self._sum_until(number)
            if not self._split:
                self._wait(SUMMED, number)
        self.waiting_seconds = waited + time.perf_counter() - begin

    def is_complete(self, bucket: int) -> bool:
        number = self._numbers[bucket]
        if self._lazy:
            return self._least(LAUNCHED) >= number
        self._advance()
        while self._flying and self._flying[0][1].has_landed():
            self._sum_until(self._counts[SUMMED] + 1)
        return (self._counts[SUMMED] if self._split else self._least(SUMMED)) >= number

    def is_free(self, bucket: int) -> bool:
        last = max(n for n, turn in zip(self._numbers, self.turns, strict=True) if turn == self.turns[bucket])
        self._advance()
        while self._flying and self._flying[0][1].has_landed():
            self._sum_until(self._counts[SUMMED] + 1)
        return self._least(CLOSED) >= self._counts[CLOSED] and self._least(SUMMED) >= last

    def _sum_until(self, number: int) -> None:
        """Have this rank's part of the first `number` reductions done."""
        while self._counts[SUMMED] < number:
            self._advance()
            if self._flying:
                # Before any wait for a later launch: who is to launch it may be waiting for this sum.
                bucket, flight = self._flying.popleft()
                self._landed(bucket, flight.land())
            elif self._counts[SUMMED] < number:
                self._wait(LAUNCHED, self._counts[LAUNCHED] - len(self._queue) + 1)

    def _advance(self) -> None:
        """Sum this rank's slice of every bucket that all ranks have launched."""
        begin = time.perf_counter()
        there = max(0, self._least(LAUNCHED) - (self._counts[LAUNCHED] - len(self._queue)))
        for bucket, name in self._queue[:there]:
            with self.recorder.reducing(name):
                start, stop = self._slices[bucket][self.index]
                mine = self._add_up(bucket, start, stop)
                if not self._split and (factor := self.factor()) != 1.0:
                    mine.mul_(factor)
            if self._between is None or not self._reduces_between:
                self._landed(bucket, self._host_share(mine))
            else:
                begun = self._between.scatter(mine) if self._split else self._between.begin(mine)
                self._flying.append((bucket, begun))
        del self._queue[:there]
        self.waiting_seconds += time.perf_counter() - begin

    def _host_share(self, mine: torch.Tensor) -> torch.Tensor:
        """This host's part of a rank's slice."""
        if self._between is None:
            return mine
        return mine[slice(*share(0, mine.numel(), self._between.size, self._between.index))]

    def _landed(self, bucket: int, total: torch.Tensor) -> None:
        if self._grad_shards is not None:
            self._grad_shards.accumulate(bucket, total)
        self._increment_flag(SUMMED)

    def _add_up(self, bucket: int, start: int, stop: int) -> torch.Tensor:
        """The sum of [start, stop) over this host's ranks, in this rank's slot."""
        parts = [slots[bucket][start:stop] for slots in self._all_slots]
        add_up(parts, out=parts[self.index])
        return parts[self.index]

    def take(self, bucket: int, start: int, stop: int, factor: float) -> None:
        if self._lazy and not self._summed[bucket]:
            self._add_up(bucket, start, stop)
        if factor != 1.0:
            own = self.own(bucket)
            own.flat[start - own.start : stop - own.start].mul_(factor)

    def sums(self, bucket: int) -> Sequence[Part]:
        if self._split:
            return [self.own(bucket)]
        return [
            Part(start, stop, self._all_slots[peer][bucket][start:stop])
            for peer, (start, stop) in enumerate(self._slices[bucket])
            if stop > start
        ]

    def own(self, bucket: int) -> Part:
        start, stop = self._slices[bucket][self.index]
        if self._between is not None:
            start, stop = share(start, stop, self._between.size, self._between.index)
        flat = self.slots[bucket][start:stop] if self._grad_shards is None else self._grad_shards.flats[bucket]
        return Part(start, stop, flat)

    def settle(self, bucket: int) -> None:
        if self._lazy and not self._summed[bucket]:
            self._add_up(bucket, *self._slices[bucket][self.index])
            self._summed[bucket] = True

    def scale(self, factor: float) -> None:
        for slot, slices in zip(self.slots, self._slices, strict=True):
            start, stop = slices[self.index]
            slot[start:stop].mul_(factor)
        self._increment_flag(SCALED)
        self._wait(SCALED, self._counts[SCALED])

    def gather(self, bucket: int) -> None:
        for peer, (start, stop) in enumerate(self._slices[bucket]):
            if peer != self.index:
                self.slots[bucket][start:stop].copy_(self._all_slots[peer][bucket][start:stop])

    def permit(self) -> None:
        self._increment_flag(PERMITTED)

    def permitted(self) -> None:
        if self.weights is not None:
            self._wait(PERMITTED, self._counts[PERMITTED])

    def publish(self, bucket: int, weight: torch.Tensor) -> None:
        land = None
        if self._between is not None and self._between.size > 1:
            start, stop = self._slices[bucket][self.index]
            land = self._between.gather(weight[start:stop])
        self._pending_gathers.append(land)
        self._published[bucket] = self._counts[UPDATED] + len(self._pending_gathers)
        if land is None:
            self._land_until(self._published[bucket])

    def _land_until(self, number: int) -> None:
        """Have this rank's slices of the first `number` publications in this host's memory, told one by one."""
        while self._counts[UPDATED] < number:
            if (land := self._pending_gathers.popleft()) is not None:
                land()
            self._increment_flag(UPDATED)

    def arrive(self, bucket: int) -> None:
        # Those before it too, in program order: a rank of another host may wait for one of them.
        self._land_until(self._published[bucket])
        self._wait(UPDATED, self._published[bucket])

    def close(self) -> None:
        self._land_until(self._counts[UPDATED] + len(self._pending_gathers))
        self._queue.clear()
        self._summed = [False] * len(self._summed)
        if self._grad_shards is not None:
            self._grad_shards.begin_step()
        self._increment_flag(CLOSED)
        # Every rank has updated its share: the weights are whole.
        self._wait(UPDATED, self._counts[UPDATED])

    def spread(self) -> None:
        assert self.weights is not None
        if self._between is not None and self.writes:
            for flat in self.weights:
                self._between.broadcast(flat)

    # ---- scalars and weights ------------------------------------------------------------------------

    def measure(self, kind: int, values: torch.Tensor) -> None:
        turn = self._counts[MEASURED + kind] % 2
        self._scalars[self.index][kind, turn, : len(values)] = values
        self._lengths[kind] = len(values)
        self._unread.append(kind)
        self._increment_flag(MEASURED + kind)

    def measured(self, kind: int) -> list[float]:
        # In the order in which they were begun, whichever is asked for first: between hosts they pair up by order, and
        # one rank may need the loss while it reduces, another only after other measures.
        while kind in self._unread:
            first = self._unread.popleft()
            self._read[first] = self._sum_measure(first)
        return self._read.pop(kind)

    def _sum_measure(self, kind: int) -> list[float]:
        count = self._counts[MEASURED + kind]
        self._wait(MEASURED + kind, count)
        if kind == LOSS:
            self._compare()
        total = self._scalars[0][kind, (count - 1) % 2, : self._lengths[kind]].clone()
        for peer in range(1, self.size):
            total += self._scalars[peer][kind, (count - 1) % 2, : self._lengths[kind]]
        if self._between is None:
            return total.tolist()
        return self._between.measure(total.tolist(), self._call if kind == LOSS else None)


def _slice(length: int, size: int, index: int) -> tuple[int, int]:
    """[start, stop) of a rank's slice; cut at multiples of 32 elements: no cache line has two writers."""
    blocks = -(-length // 32)
    return min(length, blocks * index // size * 32), min(length, blocks * (index + 1) // size * 32)
