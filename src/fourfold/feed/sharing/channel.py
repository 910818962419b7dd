"""Channel: how the rank that reads gives its batches to the others of its host: slots of memory, and notices of them.

chunk    a range of addresses in the memory of these ranks, which each of them maps as a whole
slot     a part of a chunk for one batch; the reader fills it, and then every rank has a view of it
view     a rank's own look at a slot, copy-on-write: what a rank writes into its batch, the others do not see
notice   of the reader: a slot, and how many of its bytes are used; 48 bytes on a socket
reply    of a sharer: the start of a slot that it has released, or RECEIVED for a notice that it has taken; 8 bytes
Law: a slot is filled again only when no tensor of its batch is left on any rank. Every wait ends: with what was waited
for, with the loop, or with an error that names the rank waited for. A reader is never more than MAX_AHEAD notices ahead
of a sharer.
"""

import contextlib
import mmap
import os
import select
import socket
import struct
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fourfold.comm.communicator import PROCESS_EXIT_GRACE_SECONDS
from fourfold.torch_kit import memory
from fourfold.words.errors import DataError, PeerError, Problem

# ---- slots -----------------------------------------------------------------------------------------------------------


ADDRESS_BYTES = 2**44  # of addresses, not of memory
CHUNK_BYTES = 2**28
LEAST_BYTES = 2**16
MAX_FREE = 8  # slots of one size that keep their memory; a feed has a few batches at a time


class Slot(NamedTuple):
    """`start` and `num_bytes` are those of its addresses."""

    chunk_start: int
    chunk_bytes: int
    start: int
    num_bytes: int


class SlotViews:
    """This rank's views of slots, and which of them are gone."""

    def __init__(self, handle: int) -> None:
        self._handle = handle
        self._chunks: dict[int, mmap.mmap] = {}
        self._released: deque[int] = deque()

    def view(self, slot: Slot, num_bytes: int) -> Tensor:
        """The first bytes of a slot: uint8 [num_bytes]. The slot is released when no view of it is left."""
        chunk = self._chunks.get(slot.chunk_start)
        if chunk is None:
            chunk = memory.map_copy_on_write(self._handle, slot.chunk_start, slot.chunk_bytes)
            self._chunks[slot.chunk_start] = chunk
        offset, rounded = slot.start - slot.chunk_start, -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        array = np.frombuffer(chunk, dtype=np.uint8, count=num_bytes, offset=offset)
        # Tensors keep this array, not the map: when it goes, so has the last of them.
        weakref.finalize(array, _release, chunk, (offset, rounded), self._released, slot.start).atexit = False
        return torch.from_numpy(array)

    def take_released(self) -> list[int]:
        """The starts of the slots of which the last tensor is gone since the last call."""
        return [self._released.popleft() for _ in range(len(self._released))]


def _release(chunk: mmap.mmap, part: tuple[int, int], released: deque[int], start: int) -> None:
    memory.reset_copy_on_write(chunk, *part)
    released.append(start)


class SlotWriter:
    """The slots, as the rank that fills them sees them. `handle`: growing memory of ADDRESS_BYTES."""

    def __init__(self, handle: int) -> None:
        self._handle = handle
        self._chunks: dict[int, mmap.mmap] = {}
        self._slots: dict[int, Slot] = {}
        self._reserved: dict[int, int] = {}
        self._holders: dict[int, int] = {}
        self._free: dict[int, list[Slot]] = {}
        self._chunk, self._used = Slot(0, 0, 0, 0), 0

    def take(self, num_bytes: int, num_holders: int) -> tuple[Slot, Tensor]:
        """A free slot, and its bytes to be filled: uint8 [num_bytes]. Raises DataError without memory."""
        size = max(LEAST_BYTES, 1 << (num_bytes - 1).bit_length())
        free = self._free.setdefault(size, [])
        slot = free.pop() if free else self._make(size)
        if num_bytes > self._reserved.get(slot.start, 0):
            self._reserve(slot, num_bytes)
        self._holders[slot.start] = num_holders
        chunk = self._chunks[slot.chunk_start]
        offset = slot.start - slot.chunk_start
        return slot, torch.from_numpy(np.frombuffer(chunk, dtype=np.uint8, count=num_bytes, offset=offset))

    def give_back(self, start: int) -> None:
        """One of the ranks that hold a slot has released it."""
        self._holders[start] -= 1
        if self._holders[start]:
            return
        slot = self._slots[start]
        free = self._free[slot.num_bytes]
        if len(free) >= MAX_FREE:  # a loop that kept its batches has let them go
            memory.shrink(self._handle, start, self._reserved.pop(start))
        free.insert(0, slot)  # those with memory are taken first

    def _make(self, size: int) -> Slot:
        if self._used + size > self._chunk.chunk_bytes:
            start, num_bytes = self._chunk.chunk_start + self._chunk.chunk_bytes, max(CHUNK_BYTES, size)
            if start + num_bytes > ADDRESS_BYTES:
                raise _no_memory(size, "no addresses left")
            self._chunk, self._used = Slot(start, num_bytes, start, num_bytes), 0
            self._chunks[start] = memory.map_region(self._handle, start, num_bytes)
        start = self._chunk.chunk_start + self._used
        self._used += size
        slot = self._slots[start] = Slot(self._chunk.chunk_start, self._chunk.chunk_bytes, start, size)
        return slot

    def _reserve(self, slot: Slot, num_bytes: int) -> None:
        num_bytes = min(slot.num_bytes, -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE)
        try:
            memory.grow(self._handle, slot.start, num_bytes)
        except memory.MemoryUnavailable as error:
            raise _no_memory(num_bytes, error.problems[0].got) from error
        self._reserved[slot.start] = num_bytes


def _no_memory(num_bytes: int, reason: str) -> DataError:
    need = f"{num_bytes / 2**20:.0f} MiB of shared memory for a batch of the ranks of this host"
    attempt = "a smaller batch_size, batches that are not kept, or ff.Feed(..., shared=False)"
    return DataError(Problem(f"host {os.uname().nodename}: {reason}", need, attempt), where="the feed")


# ---- messages --------------------------------------------------------------------------------------------------------


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
