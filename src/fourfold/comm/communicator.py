"""Communicator: ranks that exchange values: all of the job, or those of some axes of its mesh.

world           the communicator of all ranks. `world.on_mesh(mesh).along("dp", "cp")` is that of the ranks that differ
                from this one on these axes only
ranks           the global ranks of a communicator, in order. All other numbers, `rank` too, are indices among them;
                messages name global ranks
host            where a process runs: boot id and network namespace; processes of one host can share memory
all_gather_json every rank passes a JSON value and receives every rank's
left            a rank takes part in nothing more, though its process may go on: the others wait for it no longer
Law: values travel as JSON, never as pickle. What is collective, is so among `ranks` only; one rank alone needs no
process group. Along axes that hold all ranks, a world is its own communicator.
"""

import contextlib
import copy
import json
import os
import platform
import secrets
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist

from fourfold.comm.collectives import Group
from fourfold.comm.meter import CommMeter
from fourfold.comm.polling import wait_until
from fourfold.comm.process_group_lifecycle import ProcessGroupRegistry
from fourfold.environment.processes import is_alive, this_process
from fourfold.environment.world import World
from fourfold.plan.topology import Topology
from fourfold.words.errors import PEER_GONE_MESSAGES, PeerError
from fourfold.words.mesh import Axis, Mesh

# ---- communicator --------------------------------------------------------------------------------------------------


PROCESS_EXIT_GRACE_SECONDS = 1.0  # a process's sockets close a moment before it is gone


class _RankProcess(NamedTuple):
    """The process of a rank, and its host. `farewell`: the abstract name of a socket that is there once it has left."""

    host: str
    hostname: str
    pid: int
    start_ticks: int
    farewell: str = ""

    def has_left(self) -> bool:
        if not self.farewell:
            return False
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
            probe.connect(self.farewell)  # sends nothing
            return True
        return False


class Communicator:
    """Some ranks of the job, this one among them.

    world   the place of this process in the job, whichever ranks the communicator holds
    ranks   its global ranks, in order
    rank    this rank's index among `ranks`: in the communicator of the whole world, its global rank
    """

    def __init__(self, world: World, device: torch.device) -> None:
        self.world, self.device = world, device
        self.ranks, self.rank = tuple(range(world.size)), world.rank
        self._mesh: Mesh | None = None
        self._mesh_ranks = self.ranks  # the global ranks that `_mesh` numbers
        self._process_groups = ProcessGroupRegistry()
        self._processes: list[_RankProcess] = []
        self._on_meshes: dict[Mesh, Self] = {}
        self._along: dict[tuple[int, ...], Self] = {}

    def register(self) -> Self:
        """Tell every rank the hosts and processes of all. Collective; of the world, before `on_mesh`."""
        # Abstract names are Linux's, and end with their process. Nobody else knows this one.
        farewell = f"\0fourfold-{secrets.token_hex(16)}" if sys.platform == "linux" else ""
        process = _RankProcess(host_id(), platform.node(), *this_process(), farewell)
        self._processes = [_RankProcess(*fields) for fields in self.all_gather_json(process)]
        return self

    # ---- the ranks of some axes -----------------------------------------------------------------------

    def on_mesh(self, mesh: Mesh) -> Self:
        """These ranks, which lie on `mesh` in their order. Not collective; the same object at every call."""
        assert mesh.size == self.size, f"{self.size} ranks on a mesh of {mesh.size}"
        if mesh == self._mesh and self.ranks == self._mesh_ranks:
            return self
        if mesh not in self._on_meshes:
            laid_out = self._on_meshes[mesh] = self._restricted_to(self.ranks)
            laid_out._mesh, laid_out._mesh_ranks = mesh, self.ranks
        return self._on_meshes[mesh]

    def along(self, *axes: Axis) -> Self:
        """The communicator of those ranks that differ from this one on these axes only.

        Not collective; the same object at every call, and this one if these are all its ranks.
        """
        assert self._mesh is not None, "the ranks of a communicator lie on a mesh once `on_mesh` has said which"
        own, place = frozenset(self.ranks), self._mesh_ranks.index(self.global_rank)
        ranks = tuple(rank for peer in self._mesh.peers(place, *axes) if (rank := self._mesh_ranks[peer]) in own)
        if ranks == self.ranks:
            return self
        if ranks not in self._along:
            self._along[ranks] = self._restricted_to(ranks)
        return self._along[ranks]

    def _restricted_to(self, ranks: tuple[int, ...]) -> Self:
        """A communicator of some of these ranks, which shares their process groups."""
        communicator = copy.copy(self)
        communicator.ranks, communicator.rank = ranks, ranks.index(self.global_rank)
        # Dicts of its own: one that held its owner would keep process groups until the next garbage collection.
        communicator._on_meshes, communicator._along = {}, {}
        return communicator

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def global_rank(self) -> int:
        """This rank's number in the job."""
        return self.world.rank

    @property
    def backend(self) -> str:
        """What carries the messages of process groups."""
        return "NCCL" if self.device.type == "cuda" else "gloo"

    # ---- peers ----------------------------------------------------------------------------------------

    @property
    def host(self) -> str:
        """Equal for two ranks if and only if they can share memory."""
        return host_id()

    @property
    def num_hosts(self) -> int:
        """The number of hosts that the ranks run on; 1 before `register`."""
        return len({self._processes[rank].host for rank in self.ranks}) if self._processes else 1

    def is_peer_dead(self, rank: int) -> bool:
        """Whether a rank's process has ended; False for ranks of other hosts. Not collective: called while waiting."""
        return any(not is_alive(peer.pid, peer.start_ticks) for peer in self._on_this_host(rank))

    def check_peers(self) -> None:
        """Raise PeerError if another rank of this host has ended or left. Not collective: called while waiting."""
        if who := self._find_gone():
            raise PeerError(f"{who} while rank {self.global_rank} waited for it")

    def leave(self) -> None:
        """Take part in nothing more: who waits for this rank gets a PeerError. Not collective.

        Ranks of other hosts notice it only where they wait in a gloo group of Fourfold's own.
        """
        own = self._processes[self.global_rank] if self._processes else None
        if own is None or own.has_left():
            return
        if own.farewell:
            farewell = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            farewell.bind(own.farewell)
            farewell.detach()  # stays until the process ends
        self._process_groups.abandon()

    def _on_this_host(self, rank: int) -> list[_RankProcess]:
        """The process of a rank; nothing where it is of another host."""
        peers = [self._processes[self.ranks[rank]]] if self._processes else []
        return [peer for peer in peers if peer.host == self._processes[self.global_rank].host]

    def _find_gone(self) -> str:
        """Which ranks of this host have died, or else have left, in words; empty: none."""
        others = [(self.ranks[rank], peer) for rank in range(self.size) for peer in self._on_this_host(rank)]
        for what, gone in (
            ("died", [each for each in others if not is_alive(each[1].pid, each[1].start_ticks)]),
            ("ended its step with an error", [each for each in others if each[1].has_left()]),
        ):
            if gone := [(rank, peer) for rank, peer in gone if rank != self.global_rank]:
                return f"{' and '.join(f'rank {rank} (host {peer.hostname})' for rank, peer in gone)} {what}"
        return ""

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
            while not (who := self._find_gone()) and time.monotonic() < deadline:
                time.sleep(0.01)
            who = who or f"a rank of another host ({message}) died"
            raise PeerError(f"{who} while rank {self.global_rank} waited for it") from error

    # ---- collectives ----------------------------------------------------------------------------------

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

    def barrier(self) -> None:
        """Return once all ranks have called this. Collective."""
        self.all_gather_json(None)

    def _all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        rows = [torch.empty_like(tensor) for _ in range(self.size)]
        with self.report_dead_peers():
            work = dist.all_gather(rows, tensor, group=self._default_group(), async_op=True)
            assert work is not None
            wait_until(work.is_completed, lambda _: self.check_peers(), CommMeter())
            work.wait()
        return [row.cpu() for row in rows]

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> None:
        """Copy rank `source`'s values into every rank's tensor, whatever its strides. Collective."""
        if self.size > 1:
            # gloo sends the memory as it lies, and strides and gaps between elements may differ between ranks.
            flat = tensor.contiguous()
            with self.report_dead_peers():
                dist.broadcast(flat, src=self.ranks[source], group=self._default_group())
            if flat is not tensor and self.rank != source:
                tensor.copy_(flat)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum over all ranks, in place. Collective."""
        if self.size > 1:
            with self.report_dead_peers():
                dist.all_reduce(tensor, group=self._default_group())

    def _default_group(self) -> dist.ProcessGroup | None:
        """The process group of the collectives above; None: torch's own, of all ranks."""
        if self.size == self.world.size:
            return None
        return self._process_groups.get_or_create("communicator", self.ranks)()

    def get_group(self, ranks: Sequence[int], purpose: str) -> Group:
        """The group of these ranks for one purpose. Its first call is collective among them.

        Ranks that have several groups in common must ask for these in the same order. A rank that is not in the group
        may ask for it, and must not use it.

        Collectives of one group pair up by order alone. Two sequences of collectives whose relative order may differ
        between ranks need two groups, hence two purposes.
        """
        members = [self.ranks[rank] for rank in ranks]
        getter = self._process_groups.get_or_create(purpose, members)
        return Group(getter, self.ranks, members, self.global_rank, self.report_dead_peers)


def host_id() -> str:
    """Equal for two processes if and only if they can share memory; FOURFOLD_HOST overrides it."""
    override = os.environ.get("FOURFOLD_HOST")
    if override:
        return override
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    if not boot_id.exists():
        return f"process {os.getpid()}"
    return f"{boot_id.read_text().strip()} {os.stat('/proc/self/ns/net').st_ino}"


# ---- the topology of this job --------------------------------------------------------------------------------------


def topology_along(world: Communicator, topology: Topology, some: Communicator) -> Topology:
    """The topology of some ranks of a world, whose own topology is known."""
    return topology.restricted_to(world.ranks.index(rank) for rank in some.ranks)


def gather_topology(comm: Communicator) -> Topology:
    """The hosts of all ranks of a communicator, and whether the ranks of each can share memory. Collective."""
    machine = platform.machine()
    unsupported = "" if sys.platform == "linux" and machine == "x86_64" else f"{sys.platform}, {machine}"
    said = comm.all_gather_json([comm.host, unsupported])
    causes = [
        f"shared memory needs Linux on x86-64, rank {rank} is not ({cause})"
        for rank, (_, cause) in enumerate(said)
        if cause
    ]
    return Topology(tuple(host for host, _ in said), comm.device.type, causes[0] if causes else "")
