"""Flag waits: a rank waits for the flags of its host's ranks, and notices ranks that die or diverge meanwhile.

Law: no wait outlasts the rank it waits for: it raises PeerError if that rank dies, DivergenceError if it is in
another call.
"""

import contextlib
import platform
import select
import time
from collections.abc import Iterator

from fourfold.parts.comm.polling import wait_until
from fourfold.parts.comm.reduce.shared_memory.call_check import CallCheck
from fourfold.parts.comm.reduce.shared_memory.flags import HostFlags, HostRanks
from fourfold.parts.comm.reduce.shared_memory.layout import DEAD_PEER
from fourfold.words.errors import PeerError
from fourfold.words.trace_events import NULL_RECORDER, Recorder


class FlagWaits:
    """This rank's waits, and the time it has spent in them."""

    def __init__(self, flags: HostFlags, host: HostRanks, calls: CallCheck, *, time_limit_seconds: float) -> None:
        self._flags, self._host, self._calls = flags, host, calls
        self._time_limit_seconds = time_limit_seconds
        self.waiting_seconds = 0.0
        self.recorder: Recorder = NULL_RECORDER

    def wait(self, flag: int, count: int) -> None:
        """Wait until every rank's flag has reached `count`."""

        def check(waited_seconds: float) -> None:
            self._check_peers(flag, count, waited_seconds)

        self.waiting_seconds += wait_until(lambda: self._flags.min(flag) >= count, check, self.recorder)

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """Count the time within as waiting, and waits within it only once."""
        begin, waited = time.perf_counter(), self.waiting_seconds
        with self.recorder.waiting():
            yield
        self.waiting_seconds = waited + time.perf_counter() - begin

    def _check_peers(self, flag: int, count: int, waited_seconds: float) -> None:
        self._calls.compare_after(waited_seconds)
        try:
            self._check_alive(flag, count)
            self._check_time_limit(flag, count, waited_seconds)
        except PeerError:
            self._calls.compare()  # The peer may have died because ranks diverged: then report the divergence.
            raise

    def _check_alive(self, flag: int, count: int) -> None:
        # Nothing is ever sent on these sockets: one can be read only once its other end is gone.
        poll, sockets = select.poll(), self._host.peer_sockets
        for sock in sockets.values():
            poll.register(sock, select.POLLIN)
        ready = {descriptor for descriptor, _ in poll.poll(0)}
        dead = [peer for peer, sock in sockets.items() if sock.fileno() in ready]
        # Only the leader has a socket to every rank, so it records the dead rank before it fails itself.
        recorded = self._flags.read(DEAD_PEER, 0)
        if recorded == 0 and dead and self._host.index == 0:
            recorded = dead[0] + 1
            self._flags.write(DEAD_PEER, recorded)
        if (recorded or dead) and self._flags.min(flag) < count:
            rank = self._host.ranks[recorded - 1 if recorded else dead[0]]
            raise PeerError(f"rank {rank} (host {platform.node()}) died while rank {self._host.rank} waited for it")

    def _check_time_limit(self, flag: int, count: int, waited_seconds: float) -> None:
        if waited_seconds > self._time_limit_seconds:
            reached = zip(self._host.ranks, self._flags.read_all(flag), strict=True)
            late = ", ".join(str(rank) for rank, value in reached if value < count)
            raise PeerError(f"rank {late} did not come within {self._time_limit_seconds:.0f} s")
