"""Call check: the ranks of a host compare which collective call each of them is in.

Law: see `collective_fingerprint`: no weight changes before all ranks are known to be in the same call.
"""

import mmap

from fourfold.parts.comm.reduce.collective_fingerprint import CallBoard
from fourfold.parts.comm.reduce.shared_memory.flags import HostFlags, HostRanks
from fourfold.parts.comm.reduce.shared_memory.layout import CALL_BEGUN, SharedMemoryLayout

DIVERGENCE_GRACE_SECONDS = 2.0


class CallCheck:
    """The calls of this host's ranks, on a board in shared memory."""

    def __init__(self, mapping: mmap.mmap, layout: SharedMemoryLayout, host: HostRanks, flags: HostFlags) -> None:
        starts = [region * layout.region_bytes + layout.calls_offset for region in range(host.size)]
        self.board = CallBoard(mapping, starts, host.ranks)
        self._index, self._flags = host.index, flags
        self.call = ""
        """The call that this rank is in."""

    def begin(self, call: str) -> None:
        self.call = call
        self.board.write(self._index, self._flags.counts[CALL_BEGUN] + 1, call)
        self._flags.increment(CALL_BEGUN)

    def compare(self) -> None:
        """Raise DivergenceError if a rank is known to have begun another call than this one."""
        self.board.check(self._index, lambda: self._flags.read_all(CALL_BEGUN))

    def compare_after(self, waited_seconds: float) -> None:
        """Compare once all ranks have begun this call, or after a grace period in which late ranks may still begin it.

        So the error names the call of every rank that is merely late.
        """
        have_begun = self._flags.min(CALL_BEGUN) >= self._flags.counts[CALL_BEGUN]
        if have_begun or waited_seconds > DIVERGENCE_GRACE_SECONDS:
            self.compare()
