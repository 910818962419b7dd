"""Rings: which exchange of blocks joins the ranks of a sequence: shared memory, or messages over gloo or NCCL.

Law: the ranks of a sequence choose the same, from what all of them have said of themselves.
"""

from collections.abc import Sequence

from fourfold.parts import memory
from fourfold.parts.comm.communicator import Communicator
from fourfold.parts.comm.host_shared_memory import open_host_memory
from fourfold.parts.comm.meter import CommMeter
from fourfold.parts.comm.ring.p2p import RingOverP2P
from fourfold.parts.comm.ring.p2p_channel import ProcessGroupChannel
from fourfold.parts.comm.ring.protocol import RingGroup
from fourfold.parts.comm.ring.shared_memory import RingOverSharedMemory, RingPlace, total_bytes
from fourfold.parts.comm.ring.single_rank import NullRingGroup
from fourfold.parts.comm.topology import gather_topology
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
        ring, reason = make_shared_memory_ring(comm, groups, group, meter)
        if ring is not None:
            return ring
        if choice == "shared":
            raise no_shared_memory(reason)
    return RingOverP2P(ProcessGroupChannel(comm, group, purpose, meter))


def make_shared_memory_ring(
    comm: Communicator, groups: Sequence[Sequence[int]], group: Sequence[int], meter: CommMeter
) -> tuple[RingOverSharedMemory | None, str]:
    """The ring of a group if every group is within one host; or None and the reason. Collective."""
    topology = gather_topology(comm)
    across_hosts = [each for each in groups if len(topology.hosts_of(each)) > 1]
    if topology.unshared_cause or across_hosts:
        return (
            None,
            topology.unshared_cause or f"ranks {[comm.ranks[rank] for rank in across_hosts[0]]} are on several hosts",
        )
    host_memory, reason = open_host_memory(lambda: memory.create_growing(total_bytes(len(group))), comm, group)
    if host_memory is None:
        return None, reason
    for socket in host_memory.peer_sockets.values():
        socket.close()
    place = RingPlace(list(group).index(comm.rank), tuple(comm.ranks[rank] for rank in group))
    return RingOverSharedMemory(host_memory.handle, place, meter, check_peers=comm.check_peers), ""
