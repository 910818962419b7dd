"""Host: how the ranks of one host come to map the same memory.

leader  the least of them: it makes the memory and hands out its descriptor
link    a socket between the leader and another; it can be read once its other end is gone
"""

import os
import secrets
import socket
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from fourfold.parts import memory
from fourfold.parts.comm.communicator import Communicator
from fourfold.words.errors import LaunchError, Problem

CONNECT_TIMEOUT_SECONDS = 60.0


class _MemoryServer(NamedTuple):
    """A host's memory at its leader, and the socket where the others ask for it."""

    handle: int = -1
    listener: socket.socket | None = None
    problem: str = ""

    def close(self) -> None:
        if self.listener is not None:
            self.listener.close()
            memory.close_shared(self.handle)


class SharedHostMemory(NamedTuple):
    """The descriptor of the host's memory, and links by local index."""

    handle: int
    peer_sockets: dict[int, socket.socket]


def open_host_memory(
    create: Callable[[], int], ranks: Communicator, here: Sequence[int]
) -> tuple[SharedHostMemory | None, str]:
    """Memory that the leader makes by `create`, at all of `here`; or None and the reason, on every rank of the job.

    Collective among all ranks. Raises LaunchError.
    """
    opened = _create_and_listen(create, ranks, here)
    problems = [problem for problem in (opened.problem, *ranks.all_gather_json(opened.problem)) if problem]
    if problems:
        opened.close()
        return None, problems[0]
    try:
        return _exchange_handle(opened, ranks, here), ""
    except (OSError, IndexError) as error:
        problem = Problem(f"ranks {here} did not meet ({error or 'one of them has ended'})", "all of them to be alive")
        raise LaunchError(problem) from error


def _create_and_listen(create: Callable[[], int], ranks: Communicator, here: Sequence[int]) -> _MemoryServer:
    if ranks.rank != here[0]:
        return _MemoryServer()
    try:
        handle = create()
    except memory.MemoryUnavailable as error:
        return _MemoryServer(problem="; ".join(f"{p.got}, need {p.need}" for p in error.problems))
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.settimeout(CONNECT_TIMEOUT_SECONDS)
    # An abstract name: it belongs to the network namespace, like the host, and vanishes with the socket.
    listener.bind(f"\0fourfold-{secrets.token_hex(16)}")
    listener.listen(len(here))
    return _MemoryServer(handle, listener)


def _exchange_handle(opened: _MemoryServer, ranks: Communicator, here: Sequence[int]) -> SharedHostMemory:
    address = opened.listener.getsockname().decode("latin-1") if opened.listener else ""
    addresses = ranks.all_gather_json(address)
    links: dict[int, socket.socket] = {}
    if opened.listener is None:
        link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        link.settimeout(CONNECT_TIMEOUT_SECONDS)
        link.connect(addresses[here[0]].encode("latin-1"))
        link.sendall(here.index(ranks.rank).to_bytes(4, "little"))
        _, handles, _, _ = socket.recv_fds(link, 1, 1)
        links[0] = link
        return SharedHostMemory(handles[0], links)
    while len(links) < len(here) - 1:
        link, _ = opened.listener.accept()
        if not _same_user(link):
            link.close()
            continue
        index = int.from_bytes(link.recv(4, socket.MSG_WAITALL), "little")
        socket.send_fds(link, [b"m"], [opened.handle])
        links[index] = link
    opened.listener.close()
    return SharedHostMemory(opened.handle, links)


def _same_user(link: socket.socket) -> bool:
    """Whether the other end runs as this user: abstract sockets have no file permissions."""
    credentials = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int.from_bytes(credentials[4:8], sys.byteorder) == os.getuid()
