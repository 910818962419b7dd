"""Group scalars: sums of a few float64 values over a process group, and the calls that ranks compare with the loss.

Law: a sum begins when it is asked for, so every rank begins them in the same order; see also `fingerprint_check`.
"""

import torch
from torch import Tensor

from fourfold.comm.collectives import Work
from fourfold.comm.communicator import Communicator
from fourfold.comm.meter import CommMeter
from fourfold.comm.reduce.collective_fingerprint import FingerprintCheck
from fourfold.comm.reduce.protocol import NUM_LOSS_SCALARS, WorldChannel, check_room
from fourfold.words.program import LOSS


class GroupScalars:
    """See `ScalarReducer`: the ranks of a communicator."""

    def __init__(self, comm: Communicator, group_name: str, capacity: int, meter: CommMeter) -> None:
        self._communicator, self._capacity, self._meter = comm, capacity, meter
        self._group = comm.get_group(range(comm.size), group_name)
        self._pending: dict[int, tuple[Tensor, Work]] = {}

    def all_reduce_async(self, kind: int, values: Tensor) -> None:
        check_room(values, self._capacity)
        self._begin(kind, values.to(self._communicator.device, copy=True))

    def _begin(self, kind: int, tensor: Tensor) -> None:
        assert kind not in self._pending, "the sum of this kind before it has not been waited for"
        with self._communicator.report_dead_peers():
            self._pending[kind] = tensor, self._group.all_reduce(tensor)

    def is_ready(self, kind: int) -> bool:
        return kind in self._pending and self._pending[kind][1].is_completed()

    def wait(self, kind: int) -> list[float]:
        tensor, work = self._pending.pop(kind)
        with self._meter.timed(), self._communicator.report_dead_peers():
            work.wait()
            return tensor.tolist()


class WorldGroupScalars(GroupScalars):
    """The scalars of the world; with the LOSS, ranks compare their calls."""

    def __init__(self, comm: Communicator, meter: CommMeter) -> None:
        super().__init__(comm, "scalars", NUM_LOSS_SCALARS, meter)
        self._fingerprint_check = FingerprintCheck(self._group, range(comm.size), comm.rank, comm.device)
        self.call, self._num_loss_values = "", 0
        """The call that this rank is in."""

    def all_reduce_async(self, kind: int, values: Tensor) -> None:
        if kind != LOSS:
            super().all_reduce_async(kind, values)
            return
        check_room(values, self._capacity)
        self._num_loss_values = len(values)
        self._begin(LOSS, self._fingerprint_check.append_fingerprint(values, self.call))

    def wait(self, kind: int) -> list[float]:
        sums = super().wait(kind)
        if kind != LOSS:
            return sums
        self._fingerprint_check.check(sums, self.call)
        return sums[: self._num_loss_values]


class GroupCalls:
    """See `CallChecker`: the ranks of a process group meet in the sum of their losses."""

    def __init__(self, scalars: WorldGroupScalars) -> None:
        self._scalars = scalars

    def begin(self, call: str) -> None:
        self._scalars.call = call

    def check_same(self) -> None:
        self._scalars.all_reduce_async(LOSS, torch.zeros(0))
        self._scalars.wait(LOSS)

    def check_begun(self, waited_seconds: float | None) -> None:
        """What ranks without shared memory are in is known only once they have met."""


def group_world(world: Communicator, meter: CommMeter) -> WorldChannel:
    """The channel over a process group. Collective."""
    scalars = WorldGroupScalars(world, meter)
    return WorldChannel(scalars, GroupCalls(scalars))
