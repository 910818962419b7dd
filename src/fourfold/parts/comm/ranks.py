"""Ranks: the processes of this job, joined. Wraps the process group of torch.distributed.

exchange   every rank gives a text, every rank gets all texts
host       where a process runs: boot id and network namespace; processes of one host can share memory
Law: texts are JSON, never pickle; a world of one rank needs no process group.
"""

import atexit
import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fourfold.parts.comm import calls, meeting
from fourfold.parts.comm.transport import Part
from fourfold.words import launchers
from fourfold.words.action import LOSS
from fourfold.words.errors import LaunchError, Problem
from fourfold.words.spans import SILENT
from fourfold.words.world import World, from_environment


class Ranks:
    """All ranks of the job, or one alone."""

    def __init__(self, world: World, device: torch.device) -> None:
        self.world, self.device = world, device
        self._groups: dict[tuple[str, tuple[int, ...]], Any] = {}

    @property
    def rank(self) -> int:
        return self.world.rank

    @property
    def size(self) -> int:
        return self.world.size

    def exchange(self, value: Any) -> list[Any]:
        """Every rank's JSON value, in rank order."""
        if self.size == 1:
            return [value]
        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(self.device)
        lengths = self._gather(torch.tensor([text.numel()], device=self.device))
        padded = torch.zeros(int(max(lengths)), dtype=torch.uint8, device=self.device)
        padded[: text.numel()] = text
        rows = self._gather(padded)
        return [json.loads(bytes(row[: int(n)].tolist())) for row, n in zip(rows, lengths, strict=True)]

    def _gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        rows = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(rows, tensor)
        return [row.cpu() for row in rows]

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Rank 0's values, everywhere, in place."""
        if self.size > 1:
            dist.broadcast(tensor, src=0)

    def group(self, ranks: Sequence[int], purpose: str) -> dist.ProcessGroup | None:
        """A process group of these ranks for one purpose. Every rank must ask for the same groups in one order.

        Collectives of one group pair up by order alone, so two streams whose order is not fixed need two groups.
        """
        key = purpose, tuple(ranks)
        if key not in self._groups:
            self._groups[key] = dist.new_group(list(ranks))
        return self._groups[key]


def join() -> Ranks:
    """Join the process group that is there, or the one the launcher's environment speaks of, or stay alone."""
    world = present()
    if world is not None:
        return Ranks(world, _device(world.local_rank))
    world = from_environment() or World()
    device = _device(world.local_rank)
    if world.size > 1:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        _init_group("nccl" if device.type == "cuda" else "gloo")
        # Gloo's threads must end before the interpreter does, else the process aborts at its very end.
        atexit.register(leave)
    return Ranks(world, device)


def _init_group(backend: str) -> None:
    """Make the process group, where the launcher's environment says that ranks meet. Raises LaunchError."""
    seat = launchers.find(os.environ)
    assert seat is not None
    try:
        store = meeting.store(seat, os.environ)
        if store is None:
            dist.init_process_group(backend)
        else:
            dist.init_process_group(backend, store=store, rank=seat.rank, world_size=seat.size)
    except (ValueError, dist.DistError) as error:
        got = str(error).splitlines()[0]
        if seat.launcher is launchers.TORCHRUN:
            problem = Problem(got, "the variables of a launcher", "fourfold run -n N SCRIPT.py")
        else:
            attempt = "MASTER_ADDR and MASTER_PORT of your own"
            problem = Problem(got, f"rank 0 at {meeting.describe(seat, os.environ)}", attempt)
        raise LaunchError(problem) from error


def present() -> World | None:
    """The world of the process group that is there, or None; has no effect."""
    return _world_of_group() if dist.is_available() and dist.is_initialized() else None


def leave() -> None:
    """Leave the process group that `join` made."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def _world_of_group() -> World:
    rank, size = dist.get_rank(), dist.get_world_size()
    with contextlib.suppress(LaunchError):  # The user has made a group all the same.
        launched = from_environment()
        if launched is not None and (launched.rank, launched.size) == (rank, size):
            return launched
    return World(rank=rank, size=size, local_rank=rank, local_size=size)


def _device(local_rank: int) -> torch.device:
    gloo = dist.is_available() and dist.is_initialized() and dist.get_backend() == "gloo"
    if not torch.cuda.is_available() or gloo:
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if local_rank >= count:
        got = f"local rank {local_rank} on a host with {count} GPUs"
        raise LaunchError(Problem(got, "a GPU for each process", f'-n {count}, or CUDA_VISIBLE_DEVICES="" for CPUs'))
    return torch.device("cuda", local_rank)


def host_id() -> str:
    """The same for two processes exactly if they can share memory; FOURFOLD_HOST overrides it."""
    given = os.environ.get("FOURFOLD_HOST")
    if given:
        return given
    boot = Path("/proc/sys/kernel/random/boot_id")
    if not boot.exists():
        return f"process {os.getpid()}"
    return f"{boot.read_text().strip()} {os.stat('/proc/self/ns/net').st_ino}"


@contextlib.contextmanager
def _timed(transport: "GroupTransport") -> Iterator[None]:
    begin = time.perf_counter()
    with transport.recorder.waiting():
        yield
    transport.waiting_seconds += time.perf_counter() - begin


NUM_LOSS_SCALARS = 8


class _Roll:
    """A group's tags: each member adds its own in a place of its own, so that the sum holds all of them.

    All calls sum LOSS scalars of one length first: whichever two calls meet, they meet there.
    """

    def __init__(self, group: dist.ProcessGroup | None, members: Sequence[int], index: int, device: torch.device):
        self._group, self._members, self._index, self._device = group, members, index, device

    def tagged(self, values: torch.Tensor, call: str) -> torch.Tensor:
        """float64 [NUM_LOSS_SCALARS + members]"""
        tensor = torch.zeros(NUM_LOSS_SCALARS + len(self._members), dtype=torch.float64, device=self._device)
        tensor[: len(values)] = values
        tensor[NUM_LOSS_SCALARS + self._index] = calls.tag(call)
        return tensor

    def compare(self, sums: Sequence[float], call: str) -> None:
        """Raise DivergenceError, on all members alike, unless all tags are the same."""
        if len(set(sums[NUM_LOSS_SCALARS:])) == 1:
            return
        mine = torch.frombuffer(bytearray(calls.encode(call)), dtype=torch.uint8).to(self._device)
        rows = [torch.empty_like(mine) for _ in self._members]
        dist.all_gather(rows, mine, group=self._group)
        texts = [calls.decode(bytes(row.tolist())) for row in rows]
        raise calls.diverged(dict(zip(self._members, texts, strict=True)))


class GroupTransport:
    """The transport over a process group: gloo between hosts, NCCL on GPUs; see `Transport`."""

    def __init__(self, slots: Sequence[torch.Tensor], ranks: Ranks, members: Sequence[int]) -> None:
        self._group = ranks.group(members, "buckets")
        self._scalars_group = ranks.group(members, "scalars")
        self.name = "NCCL" if ranks.device.type == "cuda" else "gloo"
        self.size, self.index = len(members), list(members).index(ranks.rank)
        self.slots: Sequence[torch.Tensor] = slots
        self.waiting_seconds, self.recorder = 0.0, SILENT
        self._device = ranks.device
        self._works: dict[int, dist.Work] = {}
        self._measures: dict[int, tuple[torch.Tensor, dist.Work]] = {}
        self._roll = _Roll(self._scalars_group, members, self.index, ranks.device)
        self._call, self._num_loss = "", 0

    def enter(self, call: str) -> None:
        self._call = call

    def agree(self) -> None:
        self.measure(LOSS, torch.zeros(0))
        self.measured(LOSS)

    def open(self) -> None:
        pass

    def launch(self, bucket: int) -> None:
        work = self._works[bucket] = _all_reduce(self.slots[bucket], self._group)
        self.recorder.follow(bucket, work.get_future)

    def complete(self, bucket: int) -> None:
        if bucket in self._works:
            with _timed(self):
                self._works.pop(bucket).wait()

    def sums(self, bucket: int) -> Sequence[Part]:
        flat = self.slots[bucket]
        return [Part(0, flat.numel(), flat)]

    def own(self, bucket: int) -> Part:
        flat = self.slots[bucket]
        start, stop = flat.numel() * self.index // self.size, flat.numel() * (self.index + 1) // self.size
        return Part(start, stop, flat[start:stop])

    def scale(self, factor: float) -> None:
        for flat in self.slots:
            flat.mul_(factor)

    def gather(self, bucket: int) -> None:
        pass

    def close(self) -> None:
        pass

    def measure(self, kind: int, values: torch.Tensor) -> None:
        if kind == LOSS:
            self._num_loss = len(values)
            tensor = self._roll.tagged(values, self._call)
        else:
            tensor = values.to(self._device, copy=True)
        self._measures[kind] = tensor, _all_reduce(tensor, self._scalars_group)

    def measured(self, kind: int) -> list[float]:
        tensor, work = self._measures.pop(kind)
        with _timed(self):
            work.wait()
            sums = tensor.tolist()
        if kind != LOSS:
            return sums
        self._roll.compare(sums, self._call)
        return sums[: self._num_loss]


class BetweenHosts:
    """The ranks of one local index on every host, over gloo; see `shared.Between`."""

    def __init__(self, ranks: Ranks, members: Sequence[int]) -> None:
        self._group = ranks.group(members, "buckets")
        self._scalars_group = ranks.group(members, "scalars")
        self.size = len(members)
        self.index = list(members).index(ranks.rank) if ranks.rank in members else -1
        self._roll = _Roll(self._scalars_group, members, self.index, torch.device("cpu"))

    def begin(self, flat: torch.Tensor) -> Callable[[], None]:
        work = _all_reduce(flat, self._group)

        def land() -> None:
            work.wait()

        return land

    def measure(self, values: Sequence[float], call: str | None = None) -> list[float]:
        tensor = torch.tensor(values, dtype=torch.float64)
        if call is not None:
            tensor = self._roll.tagged(tensor, call)
        dist.all_reduce(tensor, group=self._scalars_group)
        sums = tensor.tolist()
        if call is not None:
            self._roll.compare(sums, call)
        return sums[: len(values)]


def _all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> dist.Work:
    work = dist.all_reduce(tensor, group=group, async_op=True)
    assert work is not None
    return work
