"""Rings: which exchange of blocks joins the ranks of a sequence: shared memory, or messages over gloo or NCCL.

Law: the ranks of a sequence choose the same, from what all of them have said of themselves.
"""

from collections.abc import Sequence

from fourfold.parts.comm.communicator import Communicator
from fourfold.parts.comm.meter import CommMeter
from fourfold.parts.comm.ring.p2p import RingOverP2P
from fourfold.parts.comm.ring.p2p_channel import ProcessGroupChannel
from fourfold.parts.comm.ring.protocol import RingGroup
from fourfold.parts.comm.ring.shared_memory import RingOverSharedMemory
from fourfold.parts.comm.ring.single_rank import NullRingGroup
from fourfold.parts.comm.shared_regions import open_regions
from fourfold.parts.comm.transports import check_transport_device, no_shared_memory


def make_ring(
    comm: Communicator, groups: Sequence[Sequence[int]], purpose: str, meter: CommMeter, *, choice: str = "by-host"
) -> RingGroup:
    """The ring among the ranks of this rank's group. Collective among `comm`'s ranks, which `groups` partition.

    `groups` are the same on every rank. Raises PlanError if the plan asks for a transport that cannot be had.
    """
    check_transport_device(choice, comm.device.type)
    group = next(each for each in groups if comm.rank in each)
    if all(len(each) == 1 for each in groups):
        return NullRingGroup(meter)
    if comm.device.type == "cpu" and choice in ("by-host", "shared"):
        ring, reason = make_shared_memory_ring(comm, groups, meter)
        if ring is not None:
            return ring
        if choice == "shared":
            raise no_shared_memory(reason)
    return RingOverP2P(ProcessGroupChannel(comm, group, purpose, meter))


def make_shared_memory_ring(
    comm: Communicator, groups: Sequence[Sequence[int]], meter: CommMeter
) -> tuple[RingOverSharedMemory | None, str]:
    """The ring of this rank's group if every group is within one host; or None and the reason. Collective."""
    regions, reason = open_regions(comm, groups, meter)
    return (None, reason) if regions is None else (RingOverSharedMemory(regions), "")
