"""Scalars: sums of a few float64 values over the ranks of a host, and over hosts.

kind   what the scalars are (LOSS, GRAD_NORM, …); each kind has a flag and room of its own
queue  the sums that this rank has begun and not all ranks are known to have begun, in order
Law: ranks add in rank order, so every rank has the same bits. Between hosts sums pair up by order, so they begin there
in the order of the queue, whichever is asked for first.
"""

from collections import deque
from typing import NamedTuple

from torch import Tensor

from fourfold.parts.comm.reduce.async_result import AsyncResult, always_done
from fourfold.parts.comm.reduce.inter_host import InterHostScalars
from fourfold.parts.comm.reduce.scalar_room import check_room
from fourfold.parts.comm.reduce.shared_memory.call_check import CallCheck
from fourfold.parts.comm.reduce.shared_memory.flag_waits import MappedHost
from fourfold.parts.comm.reduce.shared_memory.layout import SCALARS_READY, view_scalars
from fourfold.words.program import LOSS


class _QueuedSum(NamedTuple):
    """A sum that this rank has begun, of `length` values. A rank whose flag has reached `number` has begun it too."""

    kind: int
    number: int
    length: int


class HostScalars:
    """See `ScalarReducer`. `calls`: compared with the LOSS; None for other scalars than those of the world."""

    def __init__(
        self, host: MappedHost, between_hosts: InterHostScalars | None, calls: CallCheck | None = None
    ) -> None:
        self._values = [view_scalars(host.mapping, host.layout, region) for region in range(host.ranks.size)]
        self._index, self._flags, self._waits = host.ranks.index, host.flags, host.waits
        self._capacity = host.layout.num_scalars
        self._between_hosts, self._calls = between_hosts, calls
        self._queue: deque[_QueuedSum] = deque()
        self._sums: dict[int, AsyncResult] = {}

    def all_reduce_async(self, kind: int, values: Tensor) -> None:
        check_room(values, self._capacity)
        flag = SCALARS_READY + kind
        self._values[self._index][kind, self._flags.counts[flag] % 2, : len(values)] = values
        self._flags.increment(flag)
        self._queue.append(_QueuedSum(kind, self._flags.counts[flag], len(values)))

    def is_ready(self, kind: int) -> bool:
        while self._queue and self._flags.min(SCALARS_READY + self._queue[0].kind) >= self._queue[0].number:
            self._add_up_first()
        return kind in self._sums and self._sums[kind].is_done()

    def wait(self, kind: int) -> list[float]:
        # One rank may need the loss while it reduces gradients, another only after other scalars.
        while kind not in self._sums:
            first = self._queue[0]
            self._waits.wait(SCALARS_READY + first.kind, first.number)
            self._add_up_first()
        if self._calls is not None and kind == LOSS:
            self._calls.check_begun(None)
        return self._sums.pop(kind).wait()

    def _add_up_first(self) -> None:
        """Add up the first sum of the queue, which all ranks of the host have begun; begin to add up hosts."""
        kind, number, length = self._queue.popleft()
        rows = [values[kind, (number - 1) % 2, :length] for values in self._values]
        total = rows[0].clone()
        for row in rows[1:]:
            total += row
        if self._between_hosts is None:
            self._sums[kind] = AsyncResult(total.tolist, always_done)
        else:
            call = self._calls.call if self._calls is not None and kind == LOSS else None
            self._sums[kind] = self._between_hosts.all_reduce_async(total, call)
