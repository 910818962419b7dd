"""Ranks as threads of one process: the simulated tests. Real shared memory; groups of threads, not of processes.

Law: what a rank does here is what it does as a process; threads replace only the communicator's own collectives
(`all_gather_json`, `broadcast`, `all_reduce`) and those of groups. Ranks along some axes meet each other only, and no
thread waits for one of another team. A collective runs when its last member begins it, so
members may begin at different times, and one that members begin in different orders is found.
"""

import contextlib
import functools
import gc
import itertools
import json
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from fourfold.axes.context.work.context_group import ContextGroup, connect_context
from fourfold.comm.collectives import Group, Work
from fourfold.comm.communicator import Communicator
from fourfold.comm.meter import CommMeter
from fourfold.environment.world import World

# ---- ranks -----------------------------------------------------------------------------------------------------------


TIME_LIMIT_SECONDS = 120.0


GroupKey = tuple[str, tuple[int, ...]]
"""A group's purpose and its global ranks."""


class _Rendezvous:
    """What the threads of a communicator share: one value per rank, and a barrier before and after reading them."""

    def __init__(self, size: int) -> None:
        self.values: list[Any] = [None] * size
        self.barrier = threading.Barrier(size, timeout=TIME_LIMIT_SECONDS)


class _ThreadWorld:
    """What the threads of a world share: a rendezvous for each communicator and group, and the collectives of groups.

    A communicator's rendezvous has the purpose "".
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.collectives: dict[tuple[Any, ...], _Collective] = {}
        self.is_broken = False
        self._rendezvous: dict[GroupKey, _Rendezvous] = {}
        self._messages: dict[tuple[Any, ...], queue.Queue[torch.Tensor]] = {}

    def messages(self, key: tuple[Any, ...]) -> queue.Queue[torch.Tensor]:
        """What one member of a group has sent to another one, under one tag."""
        with self.lock:
            return self._messages.setdefault(key, queue.Queue())

    def rendezvous(self, key: GroupKey) -> _Rendezvous:
        """Where the ranks of a group meet."""
        with self.lock:
            if key not in self._rendezvous:
                self._rendezvous[key] = _Rendezvous(len(key[1]))
                if self.is_broken:
                    self._rendezvous[key].barrier.abort()
            return self._rendezvous[key]

    def abort(self) -> None:
        """A thread has failed: all waits for others, now and later, raise BrokenBarrierError."""
        with self.lock:
            self.is_broken = True
            for each in self._rendezvous.values():
                each.barrier.abort()


class _Collective:
    """One collective of a group; the last member to begin runs it for all."""

    def __init__(self, size: int, world: _ThreadWorld) -> None:
        self._inputs: list[tuple[str, torch.Tensor, torch.Tensor] | None] = [None] * size
        self._num_missing, self._done, self._world = size, threading.Event(), world

    def contribute(self, index: int, kind: str, out: torch.Tensor, flat: torch.Tensor) -> None:
        self._inputs[index] = kind, out, flat
        self._num_missing -= 1
        if self._num_missing == 0:
            inputs = [each for each in self._inputs if each is not None]
            assert len({(kind, out.numel(), flat.numel()) for kind, out, flat in inputs}) == 1, "different collectives"
            with torch.no_grad():
                COLLECTIVES[kind]([out for _, out, _ in inputs], [flat for _, _, flat in inputs])
            self._done.set()

    def wait(self, out: torch.Tensor) -> torch.Tensor:
        deadline = time.monotonic() + TIME_LIMIT_SECONDS
        while not self._done.wait(0.05):
            if self._world.is_broken or time.monotonic() > deadline:
                raise threading.BrokenBarrierError
        return out

    def is_completed(self) -> bool:
        return self._done.is_set()


def _all_reduce(outs: list[torch.Tensor], flats: list[torch.Tensor]) -> None:
    total = torch.stack(flats).sum(0)
    for out in outs:
        out.copy_(total)


def _all_to_all(outs: list[torch.Tensor], flats: list[torch.Tensor]) -> None:
    for index, out in enumerate(outs):
        out.copy_(torch.stack([flat.view(len(outs), -1)[index] for flat in flats]).view(-1))


def _all_gather(outs: list[torch.Tensor], shards: list[torch.Tensor]) -> None:
    gathered = torch.cat(shards)
    for out in outs:
        out.copy_(gathered)


COLLECTIVES = {"all_reduce": _all_reduce, "all_to_all": _all_to_all, "all_gather": _all_gather}


class ThreadGroup(Group):
    """One thread's view of a group of threads; see `Group`. `numbers` are those of the collectives it begins."""

    def __init__(self, world: _ThreadWorld, key: GroupKey, numbers: Iterator[int], comm: Communicator) -> None:
        self._world, self._key, self._numbers = world, key, numbers
        self._rank, self._comm_ranks = comm.global_rank, comm.ranks

    def _start(self, kind: str, out: torch.Tensor, flat: torch.Tensor) -> Work:
        members = self._key[1]
        assert self._rank in members, f"rank {self._rank} is not in the group {members}"
        with self._world.lock:
            name = (*self._key, next(self._numbers))
            work = self._world.collectives.get(name)
            if work is None:
                work = self._world.collectives[name] = _Collective(len(members), self._world)
            work.contribute(members.index(self._rank), kind, out, flat)
            if work.is_completed():
                del self._world.collectives[name]
        return Work(functools.partial(work.wait, out), work.is_completed)

    def all_reduce(self, flat: torch.Tensor) -> Work:
        return self._start("all_reduce", flat, flat)

    def reduce_scatter(self, out: torch.Tensor, flat: torch.Tensor) -> Work:
        raise NotImplementedError("only GPUs use it")

    def all_to_all(self, out: torch.Tensor, flat: torch.Tensor) -> Work:
        return self._start("all_to_all", out, flat)

    def all_gather(self, out: torch.Tensor, shard: torch.Tensor) -> Work:
        return self._start("all_gather", out, shard)

    def broadcast(self, flat: torch.Tensor, source: int) -> None:
        gathered = flat.new_empty(len(self._key[1]) * flat.numel())
        self.all_gather(gathered, flat).wait()
        flat.copy_(gathered.view(len(self._key[1]), -1)[self._key[1].index(self._comm_ranks[source])])

    def send(self, flat: torch.Tensor, target: int) -> Work:
        assert self._key[1] == (self._rank, self._comm_ranks[target]), "a group is of a sender and a receiver"
        self._world.messages(self._key).put(flat.clone())
        return Work(lambda: flat)

    def receive(self, flat: torch.Tensor, source: int) -> None:
        assert self._key[1] == (self._comm_ranks[source], self._rank), "a group is of a sender and a receiver"
        flat.copy_(self._take(self._key))

    def shift(self, flat: torch.Tensor, tag: int) -> Work:
        members = self._key[1]
        index = members.index(self._rank)
        self._world.messages((*self._key, self._rank, tag)).put(flat.clone())
        return Work(functools.partial(self._take, (*self._key, members[index - 1], tag)))

    def _take(self, key: tuple[Any, ...]) -> torch.Tensor:
        deadline = time.monotonic() + TIME_LIMIT_SECONDS
        while True:
            try:
                return self._world.messages(key).get(timeout=0.05)
            except queue.Empty:
                if self._world.is_broken or time.monotonic() > deadline:
                    raise threading.BrokenBarrierError from None


class ThreadCommunicator(Communicator):
    """One thread's view of a world of threads."""

    def __init__(self, rank: int, size: int, thread_world: _ThreadWorld, *, hosts: int = 1) -> None:
        super().__init__(World(rank=rank, size=size, local_rank=rank, local_size=size), torch.device("cpu"))
        self._thread_world, self._host = thread_world, f"host {rank * hosts // size}"
        self._collective_numbers: dict[GroupKey, Iterator[int]] = {}

    @property
    def host(self) -> str:
        return self._host

    def get_group(self, ranks: Sequence[int], purpose: str) -> ThreadGroup:
        key = purpose, tuple(self.ranks[rank] for rank in ranks)
        if key not in self._collective_numbers:
            self._collective_numbers[key] = itertools.count()
            if self.global_rank in key[1]:  # its members make a group together, as they do a process group
                self._thread_world.rendezvous(key).barrier.wait()
        return ThreadGroup(self._thread_world, key, self._collective_numbers[key], self)

    def all_gather_object(self, value: Any) -> list[Any]:
        """Every thread's value itself, in rank order. Collective."""
        rendezvous = self._rendezvous()
        rendezvous.values[self.rank] = value
        rendezvous.barrier.wait()
        values = list(rendezvous.values)
        rendezvous.barrier.wait()
        return values

    def _rendezvous(self) -> _Rendezvous:
        return self._thread_world.rendezvous(("", self.ranks))

    def all_gather_json(self, value: Any) -> list[Any]:
        return [json.loads(text) for text in self.all_gather_object(json.dumps(value))]

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> None:
        if self.size > 1:
            values = self.all_gather_object(tensor)[source]
            if self.rank != source:
                tensor.copy_(values)
            self._rendezvous().barrier.wait()

    def all_reduce(self, tensor: torch.Tensor) -> None:
        if self.size > 1:
            total = torch.stack(self.all_gather_object(tensor.clone())).sum(0)
            tensor.copy_(total)


def run(size: int, body: Callable[[ThreadCommunicator], Any], *, hosts: int = 1) -> list[Any]:
    """Run `body(comm)` on `size` threads, spread over `hosts`; their results in rank order.

    Raises the first error of any thread.
    """
    thread_world = _ThreadWorld()
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def work(rank: int) -> None:
        try:
            results[rank] = body(ThreadCommunicator(rank, size, thread_world, hosts=hosts))
        except BaseException as error:  # raised in the caller's thread, below
            errors.append(error)
            thread_world.abort()

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(size)]
    with _garbage_collection_paused():
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + TIME_LIMIT_SECONDS
        for thread in threads:
            # Once a thread has failed, the others may wait for it for ever: they end with the process.
            while thread.is_alive() and not errors and time.monotonic() < deadline:
                thread.join(0.05)
    if errors:
        raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
    if any(thread.is_alive() for thread in threads):
        raise TimeoutError(f"a world of {size} threads did not end within {TIME_LIMIT_SECONDS:.0f} s")
    return results


@contextlib.contextmanager
def _garbage_collection_paused() -> Iterator[None]:
    """Within, the garbage collector does not run by itself.

    torch holds a lock of the process's random number generator while it makes the tensor of its state. If a collection
    begins there and a finalizer lets another thread run, and that asks for the state too, each waits for the other.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


# ---- the context axis ------------------------------------------------------------------------------------------------


def make_axis(
    comm: ThreadCommunicator, ring: str = "zigzag", ulysses: int = 1, *, transport: str = "messages"
) -> ContextGroup:
    """The context axis of a thread; all threads hold tokens of one sequence. Collective.

    `transport`: "messages" or "shared" (memory).
    """
    choice = "shared" if transport == "shared" else "gloo"
    return connect_context(comm, CommMeter(), ring=ring, ulysses=ulysses, transport=choice)
