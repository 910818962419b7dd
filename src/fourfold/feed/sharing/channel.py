"""Channel: how the rank that reads tells the others of its host which batch lies in which slot.

notice   of the reader: a slot, and how many of its bytes are used; 48 bytes on a socket
reply    of a sharer: the start of a slot that it has released, or RECEIVED for a notice that it has taken; 8 bytes
Law: every wait ends: with what was waited for, with the loop, or with an error that names the rank waited for. A reader
is never more than MAX_AHEAD notices ahead of a sharer.
"""

import contextlib
import select
import socket
import struct
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from fourfold.feed.sharing.slots import Slot
from fourfold.parts.comm.communicator import PROCESS_EXIT_GRACE_SECONDS
from fourfold.words.errors import PeerError

POLL_SECONDS = 0.05
TIME_LIMIT_SECONDS = 1800.0
MAX_AHEAD = 8
RECEIVED = -1
NOTICE, REPLY = struct.Struct("<6q"), struct.Struct("<q")
IsOpen = Callable[[], bool]


class Notice(NamedTuple):
    """A batch in a slot. `num_bytes`: with its header, which begins at `header_start`."""

    slot: Slot
    num_bytes: int
    header_start: int


class Peers(NamedTuple):
    """`own`: this rank. `check` raises PeerError if a rank of this host has ended."""

    own: int
    check: Callable[[], None]

    def wait(self, step: Callable[[], bool], is_open: IsOpen, rank: int, what: str) -> bool:
        """Wait until `step()`, which may itself wait a moment; False if the loop has ended before. Raises PeerError."""
        began = time.monotonic()
        while is_open():
            if step():
                return True
            self.check()
            if time.monotonic() - began > TIME_LIMIT_SECONDS:
                text = f"rank {rank} did not {what} within {TIME_LIMIT_SECONDS:.0f} s, which rank {self.own} waited for"
                raise PeerError(text)
        return False

    def lost(self, rank: int) -> PeerError:
        """The error of a connection that `rank` has closed. Raises PeerError if its process has ended."""
        deadline = time.monotonic() + PROCESS_EXIT_GRACE_SECONDS
        while time.monotonic() < deadline:
            self.check()
            time.sleep(0.01)
        return PeerError(f"rank {rank}, which reads the batches of rank {self.own} too, has ended its feed")


class SharerEnd:
    """The socket of a rank that does not read."""

    def __init__(self, connection: socket.socket, reader: int, peers: Peers) -> None:
        self._socket, self._reader, self._peers = connection, reader, peers
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._partial = b""

    def receive(self, is_open: IsOpen) -> Notice | None:
        """The reader's next notice; None if the loop has ended before. Raises PeerError."""
        if not self._peers.wait(self._has_notice, is_open, self._reader, "read a batch"):
            return None
        fields, self._partial = NOTICE.unpack(self._partial), b""
        self.reply(RECEIVED)
        return Notice(Slot(*fields[:4]), *fields[4:])

    def reply(self, value: int) -> None:
        """Tell the reader of a slot that is released, or of a notice that is taken."""
        with contextlib.suppress(OSError):  # the reader is gone: `receive` says so, if there is something to wait for
            self._socket.sendall(REPLY.pack(value))

    def close(self) -> None:
        """End the connection."""
        self._socket.close()

    def _has_notice(self) -> bool:
        if self._poll.poll(POLL_SECONDS * 1000):
            try:
                found = self._socket.recv(NOTICE.size - len(self._partial))
            except ConnectionResetError:  # the reader is gone, and has not read all replies
                found = b""
            if not found:
                raise self._peers.lost(self._reader)
            self._partial += found
        return len(self._partial) == NOTICE.size


class _Sharer:
    """What the reader knows of a sharer."""

    def __init__(self, rank: int, connection: socket.socket) -> None:
        self.rank, self.connection = rank, connection
        self.num_ahead, self.partial = 0, b""
        self.held: set[int] = set()
        """The starts of the slots that it has not released yet."""


class ReaderEnd:
    """The sockets of the rank that reads. `released` is called with a slot's start when a sharer releases it."""

    def __init__(self, connections: Mapping[int, socket.socket], peers: Peers) -> None:
        self._peers = peers
        self._sharers = [_Sharer(rank, connection) for rank, connection in connections.items()]
        for each in self._sharers:
            each.connection.setblocking(False)

    @property
    def num_sharers(self) -> int:
        """How many ranks a batch is for, besides this one."""
        return len(self._sharers)

    def collect(self) -> list[int]:
        """The starts of the slots that sharers have released since the last call, once for each of them."""
        released = []
        for each in tuple(self._sharers):
            released += self._read_replies(each)
        return released

    def wait_for_sharers(self, is_open: IsOpen, released: Callable[[list[int]], None]) -> bool:
        """Wait until no sharer is MAX_AHEAD notices behind; False if the loop has ended before. Raises PeerError."""

        def has_room() -> bool:
            released(self.collect())
            late = [each for each in self._sharers if each.num_ahead >= MAX_AHEAD]
            if late:
                poll = select.poll()
                poll.register(late[0].connection, select.POLLIN)
                poll.poll(POLL_SECONDS * 1000)
            return not late

        rank = self._sharers[0].rank if self._sharers else self._peers.own
        return self._peers.wait(has_room, is_open, rank, "take its batches")

    def send(self, notice: Notice) -> list[int]:
        """Tell every sharer of a batch. Returns the slots of those that are gone, once for each of them."""
        released = []
        content = NOTICE.pack(*notice.slot, notice.num_bytes, notice.header_start)
        for each in tuple(self._sharers):
            each.held.add(notice.slot.start)
            each.num_ahead += 1
            try:
                each.connection.sendall(content)
            except OSError:
                released += self._forget(each)
        return released

    def close(self) -> None:
        """End the connections."""
        for each in self._sharers:
            each.connection.close()

    def _read_replies(self, sharer: _Sharer) -> list[int]:
        released = []
        while True:
            try:
                found = sharer.connection.recv(4096)
            except BlockingIOError:
                return released
            except OSError:
                found = b""
            if not found:
                return released + self._forget(sharer)
            content = sharer.partial + found
            whole = len(content) - len(content) % REPLY.size
            sharer.partial = content[whole:]
            for (value,) in REPLY.iter_unpack(content[:whole]):
                if value == RECEIVED:
                    sharer.num_ahead -= 1
                elif value in sharer.held:
                    sharer.held.remove(value)
                    released.append(value)

    def _forget(self, sharer: _Sharer) -> list[int]:
        """A sharer has ended its feed, or its process has: training finds that out where it needs the rank."""
        self._sharers.remove(sharer)
        sharer.connection.close()
        return list(sharer.held)
