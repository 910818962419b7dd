"""Group: transports over a process group: gloo between processes and hosts, NCCL on GPUs.

flying    reductions that have begun and not ended, in program order
Law: every rank begins the same collectives of one group in the same order, and no more of them wait than `IN_FLIGHT`.
"""

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fourfold.parts import memory
from fourfold.parts.comm import calls
from fourfold.parts.comm.groups import Group, Work, rows
from fourfold.parts.comm.ranks import Ranks
from fourfold.parts.comm.split import Flight, Splitter, landed
from fourfold.parts.comm.transport import Part, one
from fourfold.plan.data import Rest
from fourfold.plan.memory import IN_FLIGHT
from fourfold.words.action import LOSS
from fourfold.words.layout import SPLIT, WHOLE, Change
from fourfold.words.layout import sent_bytes as layout_bytes
from fourfold.words.spans import SILENT

NUM_LOSS_SCALARS = 8


class Use(NamedTuple):
    """What a transport is for: where buckets rest, which of them take turns in a slot, and whose groups it uses.

    `coded`: what is launched is the sum over all ranks that a process group connects; a codec has seen to it.
    """

    rest: Rest
    turns: tuple[int, ...]
    purpose: str = ""
    coded: bool = False
    shard: int | None = None
    """Among how many neighbouring ranks that which rests split is split; None: all."""

    def named(self, what: str) -> str:
        return f"{self.purpose} {what}".strip()


class _Roll:
    """A group's tags: each member adds its own in a place of its own, so that the sum holds all of them.

    All calls sum LOSS scalars of one length first: whichever two calls meet, they meet there.
    """

    def __init__(self, group: Group, members: Sequence[int], index: int, device: torch.device):
        self._group, self._members, self._index, self._device = group, members, index, device

    def tagged(self, values: Tensor, call: str) -> Tensor:
        """float64 [NUM_LOSS_SCALARS + members]; at most NUM_LOSS_SCALARS values, or they would overwrite the tags."""
        assert len(values) <= NUM_LOSS_SCALARS
        tensor = torch.zeros(NUM_LOSS_SCALARS + len(self._members), dtype=torch.float64, device=self._device)
        tensor[: len(values)] = values
        tensor[NUM_LOSS_SCALARS + self._index] = calls.fingerprint(call)
        return tensor

    def compare(self, sums: Sequence[float], call: str) -> None:
        """Raise DivergenceError, on all members alike, unless all tags are the same."""
        if len(set(sums[NUM_LOSS_SCALARS:])) == 1:
            return
        mine = torch.frombuffer(bytearray(calls.encode_call(call)), dtype=torch.uint8).to(self._device)
        texts = [calls.decode_call(bytes(row.tolist())) for row in rows(self._group, mine, size=len(self._members))]
        raise calls.divergence_error(dict(zip(self._members, texts, strict=True)))


class GroupTransport:
    """The transport over a process group; see `Transport`."""

    weights: Sequence[Tensor] | None = None
    writes = True

    def __init__(self, slots: Sequence[Tensor], ranks: Ranks, members: Sequence[int], use: Use) -> None:
        self._ranks, self._coded = ranks, use.coded
        rest, turns = use.rest, use.turns
        self._group = ranks.group(members, use.named("buckets"))
        self._scalars_group = ranks.group(members, use.named("scalars"))
        self.name = "NCCL" if ranks.device.type == "cuda" else "gloo"
        self.size, self.index = len(members), list(members).index(ranks.rank)
        self.slots, self.turns = slots, turns
        self.waiting_seconds, self.sent_bytes = 0.0, 0.0
        self.recorder, self.factor = SILENT, one
        self._device = ranks.device
        self._splitter = None if rest.state == WHOLE else Splitter(ranks, members, shard=use.shard)
        self.replica = 0 if self._splitter is None else self._splitter.replica
        self._shards = None
        if self._splitter is not None and rest.gradient == SPLIT:
            self._shards = Shards(slots, self._splitter.size)
        self.gathers = rest.weight == SPLIT
        self._pleas = ranks.group(members, "pleas") if self.gathers else None
        self._place = (self.index, self.size) if self._splitter is None else (self._splitter.index, self._splitter.size)
        self._flying: dict[int, Flight] = {}
        self._spreading: dict[int, Callable[[], None]] = {}  # on their way to all, in program order
        self._measures: dict[int, tuple[Tensor, Work]] = {}
        self._roll = _Roll(self._scalars_group, members, self.index, ranks.device)
        self._call, self._num_loss = "", 0

    def enter(self, call: str) -> None:
        self._call = call

    def agree(self) -> None:
        self.measure(LOSS, torch.zeros(0))
        self.measured(LOSS)

    def lend(self, bucket: int) -> None:
        for other in [b for b in self._flying if self.turns[b] == self.turns[bucket]]:
            self.complete(other)

    def launch(self, bucket: int, name: int) -> None:
        if self._coded:
            self._flying[bucket] = Flight(functools.partial(self._share, bucket), landed)
            return
        if self._splitter is None:
            self.sent_bytes += ring_bytes(Change.ALL_REDUCE, self.slots[bucket], self.size)
            with self._ranks.naming_the_dead():
                work = self._group.all_reduce(self.slots[bucket])
            self.recorder.follow(name, work.get_future)
            self._flying[bucket] = Flight(_waiting(work), work.is_completed)
            return
        self.sent_bytes += self._splitter.reduced_bytes(self.slots[bucket])
        if len(self._flying) >= IN_FLIGHT:
            self.complete(next(iter(self._flying)))
        with self._ranks.naming_the_dead():
            follow = functools.partial(self.recorder.follow, name)
            self._flying[bucket] = self._splitter.scatter(self.slots[bucket], follow)

    def _share(self, bucket: int) -> Tensor | None:
        """This rank's share of a slot that holds the sum already."""
        return None if self._splitter is None else self._splitter.share(self.slots[bucket])

    def complete(self, bucket: int) -> None:
        if bucket in self._flying:
            with self._timed():
                total = self._flying.pop(bucket).land()
            if self._shards is not None and total is not None:
                self._shards.add(bucket, total)
            if self._splitter is None and (factor := self.factor()) != 1.0:
                self.slots[bucket].mul_(factor)

    def is_complete(self, bucket: int) -> bool:
        return bucket not in self._flying or self._flying[bucket].has_landed()

    def is_free(self, bucket: int) -> bool:
        waited_for = [b for b in self._flying if self.turns[b] == self.turns[bucket]]
        if self._splitter is not None and len(self._flying) >= IN_FLIGHT:
            waited_for.append(next(iter(self._flying)))
        return all(self._flying[b].has_landed() for b in waited_for)

    def take(self, bucket: int, start: int, stop: int, factor: float) -> None:
        if factor != 1.0:
            own = self.own(bucket)
            own.flat[start - own.start : stop - own.start].mul_(factor)

    def settle(self, bucket: int) -> None:
        pass

    def sums(self, bucket: int) -> Sequence[Part]:
        if self._splitter is not None:
            return [self.own(bucket)]
        flat = self.slots[bucket]
        return [Part(0, flat.numel(), flat)]

    def own(self, bucket: int) -> Part:
        length, (index, size) = self.slots[bucket].numel(), self._place
        start, stop = length * index // size, length * (index + 1) // size
        flat = self.slots[bucket][start:stop] if self._shards is None else self._shards.flats[bucket]
        return Part(start, stop, flat)

    def scale(self, factor: float) -> None:
        for flat in self.slots:
            flat.mul_(factor)

    def gather(self, bucket: int) -> None:
        pass

    def permit(self) -> None:
        pass

    def permitted(self) -> None:
        pass

    def publish(self, bucket: int, weight: Tensor) -> None:
        assert self._splitter is not None
        self.sent_bytes += self._splitter.gathered_bytes(weight)
        if len(self._spreading) >= IN_FLIGHT:
            self.arrive(next(iter(self._spreading)))
        with self._ranks.naming_the_dead():
            self._spreading[bucket] = self._splitter.gather(weight)

    def arrive(self, bucket: int) -> None:
        with self._timed():
            while bucket in self._spreading:
                self._spreading.pop(next(iter(self._spreading)))()

    def bring(self, bucket: int, share: Tensor, out: Tensor) -> Callable[[], None]:
        assert self._splitter is not None
        self.sent_bytes += self._splitter.gathered_bytes(out)
        with self._ranks.naming_the_dead():
            land = self._splitter.bring(share, out)

        def land_in_time() -> None:
            with self._timed():
                land()

        return land_in_time

    def hear(self, row: Sequence[int]) -> list[list[int]]:
        assert self._pleas is not None
        with self._timed():
            mine = torch.tensor(row, device=self._device)
            return [each.tolist() for each in rows(self._pleas, mine, size=self.size)]

    def close(self) -> None:
        for bucket in list(self._spreading):
            self.arrive(bucket)
        if self._shards is not None:
            self._shards.begin()

    def spread(self) -> None:
        pass

    def measure(self, kind: int, values: Tensor) -> None:
        if kind == LOSS:
            self._num_loss = len(values)
            tensor = self._roll.tagged(values, self._call)
        else:
            tensor = values.to(self._device, copy=True)
        with self._ranks.naming_the_dead():
            self._measures[kind] = tensor, self._scalars_group.all_reduce(tensor)

    def measured(self, kind: int) -> list[float]:
        tensor, work = self._measures.pop(kind)
        with self._timed():
            work.wait()
            sums = tensor.tolist()
        if kind != LOSS:
            return sums
        self._roll.compare(sums, self._call)
        return sums[: self._num_loss]

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        begin = time.perf_counter()
        with self.recorder.waiting(), self._ranks.naming_the_dead():
            yield
        self.waiting_seconds += time.perf_counter() - begin


class Shards:
    """This rank's shares of the gradients, where they rest split: what each round adds up to."""

    def __init__(self, slots: Sequence[Tensor], size: int) -> None:
        self.flats = [memory.private(flat.numel() // size, flat.dtype, flat.device) for flat in slots]
        self.begin()

    def begin(self) -> None:
        """Begin a step: the first sum of every bucket replaces what is there."""
        self._fresh = [True] * len(self.flats)

    def add(self, bucket: int, total: Tensor) -> None:
        """Take in the sum of a round."""
        if self._fresh[bucket]:
            self.flats[bucket].copy_(total)
        else:
            self.flats[bucket].add_(total)
        self._fresh[bucket] = False


class BetweenHosts:
    """The ranks of one local index on every host, over gloo; see `shared.Between`. `use.shard` counts hosts."""

    def __init__(self, ranks: Ranks, members: Sequence[int], use: Use) -> None:
        self._ranks = ranks
        self._group = ranks.group(members, use.named("buckets"))
        self._scalars_group = ranks.group(members, use.named("scalars"))
        self._leader, self.sent_bytes = members[0], 0.0
        index = list(members).index(ranks.rank) if ranks.rank in members else -1
        self._splitter = Splitter(ranks, members, shard=use.shard)
        self.size, self.index, self.replica = self._splitter.size, self._splitter.index, self._splitter.replica
        self._pleas = ranks.group(range(ranks.size), "pleas") if use.rest.weight == SPLIT else None
        self._roll = _Roll(self._scalars_group, members, index, torch.device("cpu"))

    def begin(self, flat: Tensor) -> Flight:
        self.sent_bytes += ring_bytes(Change.ALL_REDUCE, flat, self._splitter.places.size)
        with self._ranks.naming_the_dead():
            work = self._group.all_reduce(flat)

        def land() -> Tensor:
            with self._ranks.naming_the_dead():
                work.wait()
            return flat

        return Flight(land, work.is_completed)

    def scatter(self, flat: Tensor) -> Flight:
        self.sent_bytes += self._splitter.reduced_bytes(flat)
        with self._ranks.naming_the_dead():
            return self._splitter.scatter(flat)

    def gather(self, flat: Tensor) -> Callable[[], None]:
        self.sent_bytes += self._splitter.gathered_bytes(flat)
        with self._ranks.naming_the_dead():
            return self._splitter.gather(flat)

    def bring(self, share: Tensor, out: Tensor) -> Callable[[], None]:
        self.sent_bytes += self._splitter.gathered_bytes(out)
        with self._ranks.naming_the_dead():
            return self._splitter.bring(share, out)

    def hear(self, row: Sequence[int]) -> list[list[int]]:
        assert self._pleas is not None
        with self._ranks.naming_the_dead():
            return [each.tolist() for each in rows(self._pleas, torch.tensor(row), size=self._ranks.size)]

    def broadcast(self, flat: Tensor) -> None:
        with self._ranks.naming_the_dead():
            self._group.broadcast(flat, self._leader)

    def measure(self, values: Sequence[float], call: str | None = None) -> list[float]:
        tensor = torch.tensor(values, dtype=torch.float64)
        if call is not None:
            tensor = self._roll.tagged(tensor, call)
        with self._ranks.naming_the_dead():
            self._scalars_group.all_reduce(tensor).wait()
        sums = tensor.tolist()
        if call is not None:
            self._roll.compare(sums, call)
        return sums[: len(values)]


class Gatherer:
    """Ranks that gather each other's messages; see `coded.Wire`."""

    def __init__(self, ranks: Ranks, members: Sequence[int]) -> None:
        self._ranks, self._group = ranks, ranks.group(members, "messages")
        self.size, self.sent_bytes = len(members), 0.0

    def gather(self, payload: Tensor) -> Flight:
        """Begin to bring the messages [bytes] of all to all; what lands are they, in the order of the members."""
        everyone = torch.empty(self.size * payload.numel(), dtype=payload.dtype, device=payload.device)
        self.sent_bytes += ring_bytes(Change.ALL_GATHER, everyone, self.size)
        with self._ranks.naming_the_dead():
            work = self._group.all_gather(everyone, payload)

        def land() -> Sequence[Tensor]:
            with self._ranks.naming_the_dead():
                work.wait()
            return everyone.view(self.size, -1).unbind()

        return Flight(land, work.is_completed)


def ring_bytes(collective: Change, flat: Tensor, size: int) -> float:
    """Bytes each of `size` ranks sends to change the layout of `flat`."""
    return layout_bytes(collective, whole_bytes=flat.numel() * flat.element_size(), size=size)


def _waiting(work: Work) -> Callable[[], None]:
    def land() -> None:
        work.wait()

    return land
