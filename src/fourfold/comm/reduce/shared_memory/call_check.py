"""Call check: the ranks of a host compare which collective call each of them is in.

Law: see `collective_fingerprint`: no weight changes before all ranks are known to be in the same call.
"""

import mmap

import torch

from fourfold.comm.reduce.collective_fingerprint import CallBoard
from fourfold.comm.reduce.inter_host import InterHostScalars
from fourfold.comm.reduce.shared_memory.flag_waits import FlagWaits
from fourfold.comm.reduce.shared_memory.flags import HostFlags, HostRanks
from fourfold.comm.reduce.shared_memory.layout import CALL_BEGUN, SharedMemoryLayout

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

    def check_begun(self, waited_seconds: float | None) -> None:
        """Compare once all ranks have begun this call, or after a grace period in which late ranks may still begin it.

        So the error names the call of every rank that is merely late. None: compare now.
        """
        is_grace_period = waited_seconds is not None and waited_seconds <= DIVERGENCE_GRACE_SECONDS
        if is_grace_period and self._flags.min(CALL_BEGUN) < self._flags.counts[CALL_BEGUN]:
            return
        self.board.check(self._index, lambda: self._flags.read_all(CALL_BEGUN))


class HostCalls:
    """See `CallChecker`: the ranks of a host on their board, and hosts by the fingerprints of their calls."""

    def __init__(
        self, check: CallCheck, flags: HostFlags, waits: FlagWaits, between_hosts: InterHostScalars | None
    ) -> None:
        self._check, self._flags, self._waits, self._between_hosts = check, flags, waits, between_hosts

    def begin(self, call: str) -> None:
        self._check.begin(call)

    def check_begun(self, waited_seconds: float | None) -> None:
        self._check.check_begun(waited_seconds)

    def check_same(self) -> None:
        self._waits.wait(CALL_BEGUN, self._flags.counts[CALL_BEGUN])
        self._check.check_begun(None)
        if self._between_hosts is not None:
            self._between_hosts.all_reduce_async(torch.zeros(0), self._check.call).wait()
