"""Ranks: the processes of this job, joined. Wraps the process group of torch.distributed.

exchange   every rank gives a text, every rank gets all texts
host       where a process runs: boot id and network namespace; processes of one host can share memory
roster     host and process of every rank, so that a death can be told with a name
Law: texts are JSON, never pickle; a world of one rank needs no process group.
"""

import contextlib
import json
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fourfold.environment.processes import is_alive, this_process
from fourfold.environment.world import World
from fourfold.parts.comm.collectives import Group, TorchGroup
from fourfold.parts.comm.process_group_lifecycle import ProcessGroupRegistry
from fourfold.words.errors import PEER_GONE_MESSAGES, PeerError

PROCESS_EXIT_GRACE_SECONDS = 1.0  # a process's sockets are closed a moment before it is gone


class _RankProcess(NamedTuple):
    """Where a rank lives."""

    host: str
    hostname: str
    pid: int
    start_ticks: int


class Communicator:
    """All ranks of the job, or one alone."""

    def __init__(self, world: World, device: torch.device) -> None:
        self.world, self.device = world, device
        self._process_groups = ProcessGroupRegistry()
        self._processes: list[_RankProcess] = []

    def register(self) -> "Communicator":
        """Have every rank know where all live. Collective."""
        mine = _RankProcess(host_id(), platform.node(), *this_process())
        self._processes = [_RankProcess(*theirs) for theirs in self.all_gather_json(mine)]
        return self

    @property
    def num_hosts(self) -> int:
        """On how many hosts the ranks are; 1 where nobody has enrolled."""
        return len({process.host for process in self._processes}) or 1

    def is_peer_dead(self, rank: int) -> bool:
        """Whether a rank's process has ended, as far as this host can tell. Not collective: waits ask it."""
        if not self._processes or self._processes[rank].host != self._processes[self.rank].host:
            return False
        return not is_alive(self._processes[rank].pid, self._processes[rank].start_ticks)

    def check_peers(self) -> None:
        """Raise PeerError where another rank of this host has ended. Not collective: waits call it."""
        dead = self._dead_ranks()
        if dead:
            raise PeerError(f"{self._format_ranks(dead)} died while rank {self.rank} needed it")

    def _dead_ranks(self) -> list[int]:
        return [rank for rank in range(self.size) if self.is_peer_dead(rank)]

    def _format_ranks(self, ranks: Sequence[int]) -> str:
        return " and ".join(f"rank {rank} (host {self._processes[rank].hostname})" for rank in ranks)

    @contextlib.contextmanager
    def report_dead_peers(self) -> Iterator[None]:
        """Within: a connection that breaks is a PeerError that says who has died."""
        try:
            yield
        except RuntimeError as error:
            said = str(error).splitlines()[0] if str(error) else ""
            if not any(words in str(error).lower() for words in PEER_GONE_MESSAGES):
                raise
            deadline = time.monotonic() + PROCESS_EXIT_GRACE_SECONDS
            while not (dead := self._dead_ranks()) and time.monotonic() < deadline:
                time.sleep(0.01)
            who = self._format_ranks(dead) if dead else f"a rank of another host ({said})"
            raise PeerError(f"{who} died while rank {self.rank} waited for it") from error

    @property
    def rank(self) -> int:
        return self.world.rank

    @property
    def size(self) -> int:
        return self.world.size

    def all_gather_json(self, value: Any) -> list[Any]:
        """Every rank's JSON value, in rank order."""
        if self.size == 1:
            return [value]
        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(self.device)
        lengths = self._all_gather(torch.tensor([text.numel()], device=self.device))
        padded = torch.zeros(int(max(lengths)), dtype=torch.uint8, device=self.device)
        padded[: text.numel()] = text
        rows = self._all_gather(padded)
        return [json.loads(bytes(row[: int(n)].tolist())) for row, n in zip(rows, lengths, strict=True)]

    def _all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        rows = [torch.empty_like(tensor) for _ in range(self.size)]
        with self.report_dead_peers():
            dist.all_gather(rows, tensor)
        return [row.cpu() for row in rows]

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> None:
        """Rank `source`'s values, everywhere, in place, however the tensor lies in memory."""
        if self.size > 1:
            # gloo sends the memory as it lies: strides, and gaps between elements, may be other ones elsewhere.
            flat = tensor.contiguous()
            with self.report_dead_peers():
                dist.broadcast(flat, src=source)
            if flat is not tensor and self.rank != source:
                tensor.copy_(flat)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """The sum over all ranks, everywhere, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)

    @property
    def host(self) -> str:
        """The same for two ranks exactly if they can share memory."""
        return host_id()

    def get_group(self, ranks: Sequence[int], purpose: str) -> Group:
        """A group of these ranks for one purpose. Every rank must ask for the same groups in one order.

        Collectives of one group pair up by order alone, so two streams whose order is not fixed need two groups.
        """
        return TorchGroup(self.process_group_getter(ranks, purpose))

    def process_group_getter(self, ranks: Sequence[int], purpose: str) -> Callable[[], dist.ProcessGroup | None]:
        """The same as torch.distributed has it, to be asked for at every use."""
        return self._process_groups.get_or_create(purpose, ranks)


def host_id() -> str:
    """The same for two processes exactly if they can share memory; FOURFOLD_HOST overrides it."""
    given = os.environ.get("FOURFOLD_HOST")
    if given:
        return given
    boot = Path("/proc/sys/kernel/random/boot_id")
    if not boot.exists():
        return f"process {os.getpid()}"
    return f"{boot.read_text().strip()} {os.stat('/proc/self/ns/net').st_ino}"
