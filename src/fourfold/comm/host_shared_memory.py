"""Host shared memory: how the ranks of one host come to map the same memory.

leader       the lowest of them: it makes the memory and sends its descriptor to the others
peer socket  a socket between the leader and another rank, over which the descriptor comes
"""

import os
import secrets
import socket
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from fourfold.comm.communicator import Communicator
from fourfold.plan.check import no_shared_memory_problem, transport_device_problems
from fourfold.torch_kit import memory
from fourfold.words.errors import LaunchError, PlanError, Problem

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
