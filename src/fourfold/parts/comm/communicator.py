"""Communicator: the processes of this job, joined. Wraps torch.distributed's process group.

host            where a process runs: boot id and network namespace; processes of one host can share memory
all_gather_json every rank passes a JSON value and receives every rank's
Law: values travel as JSON, never as pickle; a world of one rank needs no process group.
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

PROCESS_EXIT_GRACE_SECONDS = 1.0  # a process's sockets close a moment before it is gone


class _RankProcess(NamedTuple):
    """The process of a rank, and its host."""

    host: str
    hostname: str
    pid: int
    start_ticks: int


class Communicator:
    """All ranks of the job, or this process alone."""

    def __init__(self, world: World, device: torch.device) -> None:
        self.world, self.device = world, device
        self._process_groups = ProcessGroupRegistry()
        self._processes: list[_RankProcess] = []

    def register(self) -> "Communicator":
        """Tell every rank the hosts and processes of all. Collective."""
        process = _RankProcess(host_id(), platform.node(), *this_process())
        self._processes = [_RankProcess(*fields) for fields in self.all_gather_json(process)]
        return self

    @property
    def num_hosts(self) -> int:
        """The number of hosts that ranks run on; 1 before `register`."""
        return len({process.host for process in self._processes}) or 1

    def is_peer_dead(self, rank: int) -> bool:
        """Whether a rank's process has ended; False for ranks of other hosts. Not collective: called while waiting."""
        if not self._processes or self._processes[rank].host != self._processes[self.rank].host:
            return False
        return not is_alive(self._processes[rank].pid, self._processes[rank].start_ticks)

    def check_peers(self) -> None:
        """Raise PeerError if another rank of this host has ended. Not collective: called while waiting."""
        dead = self._dead_ranks()
        if dead:
            raise PeerError(f"{self._format_ranks(dead)} died while rank {self.rank} needed it")

    def _dead_ranks(self) -> list[int]:
        return [rank for rank in range(self.size) if self.is_peer_dead(rank)]

    def _format_ranks(self, ranks: Sequence[int]) -> str:
        return " and ".join(f"rank {rank} (host {self._processes[rank].hostname})" for rank in ranks)

    @contextlib.contextmanager
    def report_dead_peers(self) -> Iterator[None]:
        """Within: a broken connection raises a PeerError that names the dead rank."""
        try:
            yield
        except RuntimeError as error:
            if not any(words in str(error).lower() for words in PEER_GONE_MESSAGES):
                raise
            message = str(error).splitlines()[0]
            deadline = time.monotonic() + PROCESS_EXIT_GRACE_SECONDS
            while not (dead := self._dead_ranks()) and time.monotonic() < deadline:
                time.sleep(0.01)
            who = self._format_ranks(dead) if dead else f"a rank of another host ({message})"
            raise PeerError(f"{who} died while rank {self.rank} waited for it") from error

    @property
    def rank(self) -> int:
        return self.world.rank

    @property
    def size(self) -> int:
        return self.world.size

    def all_gather_json(self, value: Any) -> list[Any]:
        """Every rank's JSON value, in rank order. Collective."""
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
        """Copy rank `source`'s values into every rank's tensor, whatever its strides. Collective."""
        if self.size > 1:
            # gloo sends the memory as it lies, and strides and gaps between elements may differ between ranks.
            flat = tensor.contiguous()
            with self.report_dead_peers():
                dist.broadcast(flat, src=source)
            if flat is not tensor and self.rank != source:
                tensor.copy_(flat)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum over all ranks, in place. Collective."""
        if self.size > 1:
            dist.all_reduce(tensor)

    @property
    def host(self) -> str:
        """Equal for two ranks if and only if they can share memory."""
        return host_id()

    def get_group(self, ranks: Sequence[int], purpose: str) -> Group:
        """The group of these ranks for one purpose. Every rank must ask for the same groups in the same order.

        Collectives of one group pair up by order alone. Two sequences of collectives whose relative order may differ
        between ranks need two groups, hence two purposes.
        """
        return TorchGroup(self.process_group_getter(ranks, purpose))

    def process_group_getter(self, ranks: Sequence[int], purpose: str) -> Callable[[], dist.ProcessGroup | None]:
        """Returns a function that returns torch's process group; call it at every use, and keep no group."""
        return self._process_groups.get_or_create(purpose, ranks)


def host_id() -> str:
    """Equal for two processes if and only if they can share memory; FOURFOLD_HOST overrides it."""
    override = os.environ.get("FOURFOLD_HOST")
    if override:
        return override
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    if not boot_id.exists():
        return f"process {os.getpid()}"
    return f"{boot_id.read_text().strip()} {os.stat('/proc/self/ns/net').st_ino}"
