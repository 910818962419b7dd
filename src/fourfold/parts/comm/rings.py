"""TODO."""

from collections.abc import Sequence

from fourfold.parts import memory
from fourfold.parts.comm.communicator import Communicator
from fourfold.parts.comm.host_shared_memory import open_host_memory
from fourfold.parts.comm.ring.p2p import RingOverP2P
from fourfold.parts.comm.ring.p2p_channel import ProcessGroupChannel
from fourfold.parts.comm.ring.protocol import RingGroup
from fourfold.parts.comm.ring.shared_memory import RingOverSharedMemory, RingPlace, total_bytes
from fourfold.parts.comm.ring.single_rank import NullRingGroup
from fourfold.parts.comm.transports import check_transport_device, gather_hosts
from fourfold.words.errors import PlanError, Problem


def make_ring(
    ranks: Communicator, groups: Sequence[Sequence[int]], purpose: str, *, choice: str = "by-host"
) -> RingGroup:
    """The link among the ranks of this rank's group. Collective; `groups` partition the ranks, alike on every rank.

    Raises PlanError where a transport is asked for that cannot be had.
    """
    check_transport_device(choice, ranks.device.type)
    mine = next(group for group in groups if ranks.rank in group)
    if all(len(group) == 1 for group in groups):
        return NullRingGroup()
    if ranks.device.type == "cpu" and choice in ("by-host", "shared"):
        neighbours, reason = _make_shared_memory_ring(ranks, groups, mine)
        if neighbours is not None:
            return neighbours
        if choice == "shared":
            problem = Problem(f'transport = "shared", but {reason}', "ranks that share memory", 'transport = "by-host"')
            raise PlanError(problem, where="the plan")
    wires = [ProcessGroupChannel(ranks, group, purpose) for group in groups]
    return RingOverP2P(next(wire for wire, group in zip(wires, groups, strict=True) if group is mine))


def _make_shared_memory_ring(
    ranks: Communicator, groups: Sequence[Sequence[int]], mine: Sequence[int]
) -> tuple[RingOverSharedMemory | None, str]:
    """The link of a group inside a host, if every group is; or None and the reason."""
    said, reason = gather_hosts(ranks)
    apart = [group for group in groups if len({said[rank] for rank in group}) > 1]
    if reason or apart:
        return None, reason or f"ranks {list(apart[0])} are on several hosts"
    met, problem = open_host_memory(lambda: memory.create_growing(total_bytes(len(mine))), ranks, mine)
    if met is None:
        return None, problem
    for socket in met.peer_sockets.values():
        socket.close()
    return RingOverSharedMemory(
        met.handle, RingPlace(list(mine).index(ranks.rank), tuple(mine)), check_peers=ranks.check_peers
    ), ""
