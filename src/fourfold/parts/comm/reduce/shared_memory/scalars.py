"""Scalars: sums of a few float64 values over the ranks of a host, and over hosts.

kind  what the scalars are (LOSS, GRAD_NORM, …); each kind has a flag and room of its own
Law: ranks add in rank order, so every rank has the same bits.
"""

import mmap
from collections import deque

import torch

from fourfold.parts.comm.reduce.inter_host import InterHostReducer
from fourfold.parts.comm.reduce.shared_memory.call_check import CallCheck
from fourfold.parts.comm.reduce.shared_memory.flag_waits import FlagWaits
from fourfold.parts.comm.reduce.shared_memory.flags import HostFlags, HostRanks
from fourfold.parts.comm.reduce.shared_memory.layout import (
    NUM_SCALAR_KINDS,
    SCALARS_READY,
    SharedMemoryLayout,
    view_scalars,
)
from fourfold.words.program import LOSS


class HostScalars:
    """This rank's scalars, and its view of its peers'."""

    def __init__(
        self,
        mapping: mmap.mmap,
        layout: SharedMemoryLayout,
        host: HostRanks,
        flags: HostFlags,
        waits: FlagWaits,
        calls: CallCheck,
        inter_host: InterHostReducer | None,
    ) -> None:
        self._values = [view_scalars(mapping, layout, region) for region in range(host.size)]
        self._index, self._flags, self._waits, self._calls = host.index, flags, waits, calls
        self._inter_host = inter_host
        self._lengths = [0] * NUM_SCALAR_KINDS
        self._pending: deque[int] = deque()
        self._sums: dict[int, list[float]] = {}

    def all_reduce_async(self, kind: int, values: torch.Tensor) -> None:
        """Publish this rank's values [n]. Does not wait."""
        parity = self._flags.counts[SCALARS_READY + kind] % 2
        self._values[self._index][kind, parity, : len(values)] = values
        self._lengths[kind] = len(values)
        self._pending.append(kind)
        self._flags.increment(SCALARS_READY + kind)

    def wait(self, kind: int) -> list[float]:
        # In the order in which they began, whichever is asked for first: between hosts, reductions pair up by order,
        # and one rank may need the loss while it reduces gradients, another only after other scalars.
        while kind in self._pending:
            first = self._pending.popleft()
            self._sums[first] = self._sum(first)
        return self._sums.pop(kind)

    def _sum(self, kind: int) -> list[float]:
        count = self._flags.counts[SCALARS_READY + kind]
        self._waits.wait(SCALARS_READY + kind, count)
        if kind == LOSS:
            self._calls.compare()
        rows = [values[kind, (count - 1) % 2, : self._lengths[kind]] for values in self._values]
        total = rows[0].clone()
        for row in rows[1:]:
            total += row
        if self._inter_host is None:
            return total.tolist()
        return self._inter_host.all_reduce_scalars(total.tolist(), self._calls.call if kind == LOSS else None)
