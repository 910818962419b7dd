"""Shared regions: memory that the ranks of a group on one host map together, and the flags by which they wait.

region  one rank's part of the mapping: its words, then areas of which only what is used is ever reserved
word    an int64 that only the region's owner writes
flag    a word that only grows, the first of a cache line; the others of its line are free for what belongs to it
Law: what a rank has written before it raises a flag, its peers see once they see the flag: x86-64 keeps the order of
plain stores, and that of loads (total store order). Elsewhere regions are not made (`gather_topology`). Functions of
torch that write past the caches fence their stores before they return, as compilers and libc on x86-64 rely on.

leader       the lowest rank of a host: it makes the memory and sends its descriptor to the others
peer socket  a socket between the leader and another rank, over which the descriptor comes
"""

import functools
import mmap
import os
import secrets
import socket
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fourfold.comm.communicator import Communicator, gather_topology
from fourfold.comm.meter import CommMeter
from fourfold.comm.polling import wait_until
from fourfold.plan.check import no_shared_memory_problem, transport_device_problems
from fourfold.torch_kit import memory
from fourfold.words.errors import LaunchError, PeerError, PlanError, Problem

# ---- host shared memory ----------------------------------------------------------------------------------------------

CONNECT_TIMEOUT_SECONDS = 60.0


class _MemoryServer(NamedTuple):
    """The leader's memory, and the socket where the other ranks ask for it."""

    handle: int = -1
    listener: socket.socket | None = None
    problem: str = ""

    @property
    def address(self) -> str:
        """Of the socket; empty on the other ranks."""
        return self.listener.getsockname().decode("latin-1") if self.listener is not None else ""

    def close(self) -> None:
        if self.listener is not None:
            self.listener.close()
            memory.close_shared(self.handle)


class SharedHostMemory(NamedTuple):
    """The descriptor of the host's memory, and sockets to peers by their index on the host."""

    handle: int
    peer_sockets: dict[int, socket.socket]

    def take_handle(self) -> int:
        """The descriptor, for who needs no sockets: these are closed."""
        for each in self.peer_sockets.values():
            each.close()
        return self.handle


def check_transport_device(choice: str, device: str) -> None:
    """Raise PlanError for a transport, the plan's choice, that this kind of device cannot have."""
    if problems := transport_device_problems(choice, device):
        raise PlanError(problems, where="the plan")


def wants_shared_memory(comm: Communicator, choice: str) -> bool:
    """Whether ranks of one host should share memory, by the plan's choice of a transport."""
    return comm.device.type == "cpu" and choice in ("auto", "shared")


def no_shared_memory(reason: str) -> PlanError:
    """The error if the plan asks for shared memory that the ranks cannot have."""
    return PlanError(no_shared_memory_problem(reason), where="the plan")


def open_host_memory(
    create: Callable[[], int], comm: Communicator, host_ranks: Sequence[int]
) -> tuple[SharedHostMemory | None, str]:
    """Memory that the leader makes by `create`, for `host_ranks`; or None and the reason, on every rank of `comm`.

    Collective among the ranks of `comm`, of which `host_ranks` are some: those of this rank's host. Ranks of the same
    host that are not in `comm` have no part in it, and may share memory of their own. Raises LaunchError.
    """
    server = _create_and_listen(create, comm, host_ranks)
    by_rank = comm.all_gather_json([server.problem, server.address])
    problems = [problem for problem in (server.problem, *(each for each, _ in by_rank)) if problem]
    if problems:
        server.close()
        return None, problems[0]
    _, leader_address = by_rank[host_ranks[0]]
    try:
        return _exchange_handle(server, leader_address, host_ranks, comm.rank), ""
    except (OSError, IndexError) as error:
        server.close()
        ranks = [comm.ranks[rank] for rank in host_ranks]
        got = f"ranks {ranks} could not connect to each other ({error or 'one of them has ended'})"
        raise LaunchError(Problem(got, "all of them to be alive")) from error


def _create_and_listen(create: Callable[[], int], comm: Communicator, host_ranks: Sequence[int]) -> _MemoryServer:
    if comm.rank != host_ranks[0]:
        return _MemoryServer()
    try:
        handle = create()
    except memory.MemoryUnavailable as error:
        return _MemoryServer(problem="; ".join(f"{p.got}, need {p.need}" for p in error.problems))
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.settimeout(CONNECT_TIMEOUT_SECONDS)
    # An abstract name belongs to the network namespace, as a host does, and vanishes with the socket.
    listener.bind(f"\0fourfold-{secrets.token_hex(16)}")
    listener.listen(len(host_ranks))
    return _MemoryServer(handle, listener)


def _exchange_handle(
    server: _MemoryServer, leader_address: str, host_ranks: Sequence[int], rank: int
) -> SharedHostMemory:
    sockets: dict[int, socket.socket] = {}
    if server.listener is None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(CONNECT_TIMEOUT_SECONDS)
        sock.connect(leader_address.encode("latin-1"))
        sock.sendall(host_ranks.index(rank).to_bytes(4, "little"))
        _, handles, _, _ = socket.recv_fds(sock, 1, 1)
        sockets[0] = sock
        return SharedHostMemory(handles[0], sockets)
    while len(sockets) < len(host_ranks) - 1:
        sock, _ = server.listener.accept()
        if not _is_same_user(sock):
            sock.close()
            continue
        index = int.from_bytes(sock.recv(4, socket.MSG_WAITALL), "little")
        socket.send_fds(sock, [b"m"], [server.handle])
        sockets[index] = sock
    server.listener.close()
    return SharedHostMemory(server.handle, sockets)


def _is_same_user(sock: socket.socket) -> bool:
    """Whether the other end runs as this user: abstract sockets have no file permissions."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int.from_bytes(credentials[4:8], sys.byteorder) == os.getuid()


# ---- shared regions --------------------------------------------------------------------------------------------------

ALIGNMENT_BYTES = 4096
FLAG_STRIDE = 8  # int64s: a cache line of its own for each flag
AREA_BYTES = 2**34  # of addresses, not of memory
NUM_AREAS = 4
TIME_LIMIT_SECONDS = 1800.0


def region_bytes(num_areas: int = NUM_AREAS) -> int:
    """Bytes of a region with so many areas."""
    return ALIGNMENT_BYTES + num_areas * AREA_BYTES


def total_bytes(size: int, num_areas: int = NUM_AREAS) -> int:
    """Bytes of the growing memory of `size` ranks."""
    return size * region_bytes(num_areas)


@dataclass(frozen=True)
class GroupPlace:
    """A rank's index in a group, and the global ranks of the group."""

    index: int
    ranks: tuple[int, ...]

    @property
    def size(self) -> int:
        return len(self.ranks)

    @classmethod
    def of(cls, comm: Communicator, groups: Sequence[Sequence[int]]) -> "tuple[GroupPlace, Sequence[int]]":
        """This rank's place in its group, of those that partition a communicator's ranks; and the group's indices."""
        members = next(each for each in groups if comm.rank in each)
        return cls(list(members).index(comm.rank), tuple(comm.ranks[rank] for rank in members)), members


ONE_RANK = GroupPlace(0, (0,))


class SharedRegions:
    """The regions of a group, as one of its ranks sees them.

    handle       growing memory of `total_bytes`, which this object then owns
    num_areas    of each region
    check_peers  called now and then while this rank waits; raises PeerError if a rank has died
    """

    def __init__(
        self,
        handle: int,
        place: GroupPlace,
        meter: CommMeter,
        *,
        check_peers: Callable[[], None],
        num_areas: int = NUM_AREAS,
        time_limit_seconds: float = TIME_LIMIT_SECONDS,
    ) -> None:
        self.place, self.meter, self._region_bytes = place, meter, region_bytes(num_areas)
        self.check_peers, self._time_limit_seconds = check_peers, time_limit_seconds
        self._handle = os.dup(handle)
        weakref.finalize(self, memory.close_shared, self._handle).atexit = False
        self._mapping: mmap.mmap = memory.map_shared(handle)
        self.words = memoryview(self._mapping).cast("B").cast("q")
        """All words of the mapping; `word` says where one is."""
        self._address = torch.frombuffer(self._mapping, dtype=torch.uint8, count=1).data_ptr()
        self._reserved: dict[tuple[int, int], int] = {}

    # ---- flags ---------------------------------------------------------------------------------------

    def word(self, index: int, flag: int, offset: int = 0) -> int:
        """The place of a rank's flag, or of another word of its line, among `words`."""
        return index * self._region_bytes // 8 + flag * FLAG_STRIDE + offset

    def wait_flag(self, flag: int, count: int, index: int) -> None:
        """Wait until a rank's flag has reached `count`. Raises PeerError."""
        words, word = self.words, self.word(index, flag)
        if words[word] < count:
            self.wait(lambda: words[word] >= count, index)

    def wait(self, is_reached: Callable[[], bool], index: int) -> None:
        """Wait until something is so that another rank brings about. Raises PeerError."""

        def check(waited_seconds: float) -> None:
            self.check_peers()
            if waited_seconds > self._time_limit_seconds:
                late = f"rank {self.place.ranks[index]}"
                raise PeerError(f"{late} did not arrive within {self._time_limit_seconds:.0f} s")

        wait_until(is_reached, check, self.meter)

    # ---- areas ---------------------------------------------------------------------------------------

    def contains(self, address: int) -> bool:
        """Whether an address of this process lies in the mapping."""
        return 0 <= address - self._address < len(self._mapping)

    def view(self, index: int, area: int, num_elements: int, dtype: torch.dtype) -> Tensor:
        """The first elements of a rank's area. Raises MemoryUnavailable."""
        num_bytes = num_elements * dtype.itemsize
        start = self._start(index, area)
        if num_bytes > AREA_BYTES:
            need = f"at most {AREA_BYTES / 2**30:.0f} GiB that a rank passes to others at once"
            raise memory.MemoryUnavailable(Problem(f"{num_bytes} bytes", need, 'transport = "gloo"'))
        if num_bytes > self._reserved.get((index, area), 0):
            memory.grow(self._handle, start, num_bytes)
            self._reserved[index, area] = num_bytes
        if num_elements == 0:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self._mapping, dtype=dtype, count=num_elements, offset=start)

    def area_words(self, index: int, area: int, num_words: int) -> memoryview:
        """The first words of an area, of which its owner has reserved as many."""
        start = self._start(index, area) // 8
        return self.words[start : start + num_words]

    def area_bytes(self, index: int, area: int, num_bytes: int) -> memoryview:
        """The first bytes of an area, of which its owner has reserved as many; a new object, which tensors keep."""
        start = self._start(index, area)
        return memoryview(self._mapping)[start : start + num_bytes]

    def _start(self, index: int, area: int) -> int:
        return index * self._region_bytes + ALIGNMENT_BYTES + area * AREA_BYTES


def choose_regions(
    comm: Communicator,
    groups: Sequence[Sequence[int]],
    meter: CommMeter,
    *,
    choice: str = "auto",
    num_areas: int = NUM_AREAS,
    may_cross_hosts: bool = False,
) -> SharedRegions | None:
    """The regions of this rank's group, if the plan's transport lets groups share memory, and they can; else None.

    Collective among `comm`'s ranks, which `groups` partition: all get regions, or none. Raises PlanError if the plan
    asks for a transport that cannot be had; `may_cross_hosts`: not for want of shared memory.
    """
    check_transport_device(choice, comm.device.type)
    if all(len(each) == 1 for each in groups) or not wants_shared_memory(comm, choice):
        return None
    regions, reason = _open_regions(comm, groups, meter, num_areas)
    if regions is None and choice == "shared" and not may_cross_hosts:
        raise no_shared_memory(reason)
    return regions


def _open_regions(
    comm: Communicator, groups: Sequence[Sequence[int]], meter: CommMeter, num_areas: int
) -> tuple[SharedRegions | None, str]:
    """The regions if every group is within one host; or None and the reason."""
    place, members = GroupPlace.of(comm, groups)
    topology = gather_topology(comm)
    if topology.unshared_cause:
        return None, topology.unshared_cause
    across_hosts = [each for each in groups if len(topology.hosts_of(each)) > 1]
    if across_hosts:
        return None, f"ranks {[comm.ranks[rank] for rank in across_hosts[0]]} are on several hosts"
    create = functools.partial(memory.create_growing, total_bytes(place.size, num_areas))
    host_memory, reason = open_host_memory(create, comm, members)
    if host_memory is None:
        return None, reason
    handle = host_memory.take_handle()
    return SharedRegions(handle, place, meter, check_peers=comm.check_peers, num_areas=num_areas), ""
