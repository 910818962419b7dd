"""Flag waits: a rank waits for the flags of its host's ranks, and notices ranks that die or diverge meanwhile.

Law: no wait outlasts the rank it waits for: it raises PeerError if that rank dies, DivergenceError if it is in
another call.
"""

import mmap
from typing import NamedTuple, Protocol

from fourfold.comm.meter import CommMeter
from fourfold.comm.polling import wait_until
from fourfold.comm.reduce.shared_memory.flags import HostFlags, HostRanks
from fourfold.comm.reduce.shared_memory.layout import SharedMemoryLayout
from fourfold.words.errors import PeerError

TIME_LIMIT_SECONDS = 1800.0


class DivergenceCheck(Protocol):
    """What a wait asks now and then; see `CallChecker`."""

    def check_begun(self, waited_seconds: float | None) -> None: ...


class FlagWaits:
    """This rank's waits."""

    def __init__(
        self,
        flags: HostFlags,
        host: HostRanks,
        calls: DivergenceCheck,
        meter: CommMeter,
        *,
        time_limit_seconds: float = TIME_LIMIT_SECONDS,
    ) -> None:
        self._flags, self._host, self._calls, self.meter = flags, host, calls, meter
        self._time_limit_seconds = time_limit_seconds

    def wait(self, flag: int, count: int) -> None:
        """Wait until every rank's flag has reached `count`."""

        def check(waited_seconds: float) -> None:
            self._check_peers(flag, count, waited_seconds)

        wait_until(lambda: self._flags.min(flag) >= count, check, self.meter)

    def _check_peers(self, flag: int, count: int, waited_seconds: float) -> None:
        self._calls.check_begun(waited_seconds)
        try:
            self._host.check_peers()
            self._check_time_limit(flag, count, waited_seconds)
        except PeerError:
            self._calls.check_begun(None)  # The peer may have died because ranks diverged: then report the divergence.
            raise

    def _check_time_limit(self, flag: int, count: int, waited_seconds: float) -> None:
        if waited_seconds > self._time_limit_seconds:
            reached = zip(self._host.ranks, self._flags.read_all(flag), strict=True)
            late = ", ".join(str(rank) for rank, value in reached if value < count)
            raise PeerError(f"rank {late} did not arrive within {self._time_limit_seconds:.0f} s")


class MappedHost(NamedTuple):
    """Memory that the ranks of a host share, as one of them sees it."""

    mapping: mmap.mmap
    layout: SharedMemoryLayout
    ranks: HostRanks
    flags: HostFlags
    waits: FlagWaits


def map_host(
    mapping: mmap.mmap,
    layout: SharedMemoryLayout,
    ranks: HostRanks,
    calls: DivergenceCheck,
    meter: CommMeter,
    *,
    time_limit_seconds: float = TIME_LIMIT_SECONDS,
) -> MappedHost:
    """`calls` is asked by every wait whether ranks have diverged."""
    flags = HostFlags(mapping, layout.region_bytes, index=ranks.index, size=ranks.size)
    waits = FlagWaits(flags, ranks, calls, meter, time_limit_seconds=time_limit_seconds)
    return MappedHost(mapping, layout, ranks, flags, waits)
