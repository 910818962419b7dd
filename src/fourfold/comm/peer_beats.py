"""Peer beats: the first rank of each host tells those of the other hosts every second that it is there.

beat     a datagram: the sender's host, its number, and whether the sender's main thread waits for other ranks
answer   the receiver's datagram to a beat, at once; the time between them says how fast the link is
bye      a beat that is the last: its sender leaves the run, and is not missed
Law: a datagram that does not hold the job's token changes nothing, and none holds anything but a few numbers.
"""

import contextlib
import json
import math
import os
import platform
import secrets
import socket
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from fourfold.comm.communicator import Communicator
from fourfold.environment import launchers
from fourfold.environment.rendezvous import TCPRendezvous, find_rendezvous
from fourfold.words.errors import LaunchError

BEAT_SECONDS = 1.0
MAX_BYTES = 256
BYE_COPIES = 3  # datagrams may be lost
NUM_ANSWERS = 3
BEAT, ANSWER, BYE = "beat", "answer", "bye"
Address = tuple[str, int]


@dataclass
class Peer:
    """The first rank of another host. Times are of the monotonic clock.

    heard_at         when the last datagram came from it; None before the first
    answers          how long it took to answer the last beats, in seconds
    fastest_seconds  the quickest answer so far
    """

    rank: int
    host: str
    address: Address
    heard_at: float | None = None
    answers: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_ANSWERS))
    fastest_seconds: float = math.inf
    is_waiting: bool = False
    has_left: bool = False

    @property
    def answer_seconds(self) -> float:
        """The quickest of the last NUM_ANSWERS, because one alone may have waited for a core; 0 before so many."""
        return min(self.answers) if len(self.answers) == NUM_ANSWERS else 0.0

    def __str__(self) -> str:
        return f"rank {self.rank} (host {self.host})"


class PeerBeats:
    """This rank's beats, and what it has heard. `own`: this rank, for messages; `index`: its host's."""

    def __init__(self, own: str, index: int, peers: dict[int, Peer], token: str, connection: socket.socket) -> None:
        self.own, self.index, self.peers = own, index, peers
        self._token, self._socket, self._number, self._sent_at = token, connection, 0, 0.0

    def beat(self, *, is_waiting: bool) -> None:
        """Send a beat to every peer."""
        self._number, self._sent_at = self._number + 1, time.monotonic()
        for peer in self.peers.values():
            peer.answers.append(BEAT_SECONDS)  # at least, unless the answer comes
            self._send(peer.address, BEAT, self._number, is_waiting=is_waiting)

    def listen(self, seconds: float) -> float:
        """Take in what comes within so many seconds, and answer it. Returns when it last began to wait.

        What has come before that moment is taken in. Later this thread may have been held up, with beats unread.
        """
        began = time.monotonic()
        end = began + seconds
        while (now := time.monotonic()) < end:
            began = now
            self._socket.settimeout(end - began)
            try:
                content, address = self._socket.recvfrom(MAX_BYTES)
            except OSError:  # the time is over; or the network says that a datagram did not arrive, as silence will
                continue
            self._take(content, address)
        return began

    def close(self) -> None:
        for _ in range(BYE_COPIES):
            for peer in self.peers.values():
                self._send(peer.address, BYE, self._number, is_waiting=False)
        self._socket.close()

    def _take(self, content: bytes, address: Address) -> None:
        try:
            token, kind, index, number, is_waiting = json.loads(content)
            peer, is_ours = self.peers[index], secrets.compare_digest(token, self._token)
        except (ValueError, KeyError, TypeError, RecursionError):  # not from a rank of this job
            return
        if not is_ours:
            return
        now = time.monotonic()
        peer.heard_at, peer.is_waiting, peer.address = now, is_waiting is True, address
        peer.has_left = peer.has_left or kind == BYE
        if kind == BEAT and type(number) is int:
            self._send(address, ANSWER, number, is_waiting=peer.is_waiting)
        elif kind == ANSWER and number == self._number and peer.answers:  # if not forgotten since it was sent
            peer.answers[-1] = now - self._sent_at
            peer.fastest_seconds = min(peer.fastest_seconds, peer.answers[-1])

    def _send(self, address: Address, kind: str, number: int, *, is_waiting: bool) -> None:
        content = json.dumps([self._token, kind, self.index, number, is_waiting]).encode()
        with contextlib.suppress(OSError):  # there is no way to the peer at the moment: it will miss this beat
            self._socket.sendto(content, address)


def open_beats(comm: Communicator) -> PeerBeats | None:
    """The beats of this rank; None where it is not the first of its host, or all are on one host. Collective."""
    hosts: Sequence[str] = comm.all_gather_json(comm.host)
    if len(set(hosts)) == 1:
        return None
    is_first = hosts.index(comm.host) == comm.rank
    connection = _open_socket() if is_first else None
    address = None if connection is None else connection.getsockname()
    rows = comm.all_gather_json([address, platform.node(), secrets.token_hex(16)])
    if connection is None:
        return None
    firsts = [rank for rank, (found, _, _) in enumerate(rows) if found is not None]
    peers = {
        index: Peer(comm.ranks[rank], rows[rank][1], tuple(rows[rank][0]))
        for index, rank in enumerate(firsts)
        if rank != comm.rank
    }
    own = f"rank {comm.global_rank} (host {platform.node()})"
    return PeerBeats(own, firsts.index(comm.rank), peers, rows[0][2], connection)


def _open_socket() -> socket.socket | None:
    """A socket at the address by which this host reaches rank 0's; None if it has none."""
    connection = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
            way.connect((_first_host(), 9))  # sends nothing
            own = way.getsockname()[0]
        # A host may know its own name as a loopback address, at which others do not reach it. They learn the address
        # from its first beat.
        connection.bind(("" if own.startswith("127.") else own, 0))
    except OSError:  # such as a network of IPv6 only
        connection.close()
        return None
    return connection


def _first_host() -> str:
    """The host of rank 0, as this host calls it."""
    with contextlib.suppress(LaunchError):  # contradicting variables: the user has made a group all the same
        info = launchers.detect(os.environ)
        address = None if info is None else find_rendezvous(info, os.environ)
        if isinstance(address, TCPRendezvous):
            return address.host
    return os.environ.get("MASTER_ADDR") or platform.node()
