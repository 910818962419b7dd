"""Edges of a pipeline: which transport joins neighbouring stages: shared memory, or messages over gloo or NCCL.

Law: both ends of an edge choose the same, from what all ranks of the pipeline have said of themselves.
"""

from fourfold.parts.comm.communicator import Communicator
from fourfold.parts.comm.edge.process_group import ProcessGroupReceiver, ProcessGroupSender
from fourfold.parts.comm.edge.protocol import ReceivingEdge, SendingEdge, StageEdges
from fourfold.parts.comm.edge.shared_memory import SharedMemoryReceiver, SharedMemorySender
from fourfold.parts.comm.meter import CommMeter
from fourfold.parts.comm.shared_regions import SharedRegions, open_regions
from fourfold.parts.comm.transports import check_transport_device, no_shared_memory


def make_edges(pipeline: Communicator, meter: CommMeter, *, choice: str = "by-host") -> StageEdges:
    """The edges of this rank to its neighbours among the ranks of a pipeline. Collective.

    `choice` is the plan's transport. Raises PlanError if the plan asks for a transport that cannot be had.
    """
    check_transport_device(choice, pipeline.device.type)
    size, index, edges = pipeline.size, pipeline.rank, StageEdges()
    # A rank has two neighbours: pairs that begin with an even index, then those that begin with an odd one.
    for parity in range(min(2, size - 1)):
        starts = range(parity, size - 1, 2)
        pairs = [[start, start + 1] for start in starts]
        paired = {each for pair in pairs for each in pair}
        groups = sorted([*pairs, *([each] for each in range(size) if each not in paired)])
        regions = _open(pipeline, groups, meter, choice)
        if index not in paired:
            continue
        if index in starts:
            sender, receiver = _ends(pipeline, regions, index + 1, meter, is_lower=True)
            edges = edges._replace(to_next=sender, from_next=receiver)
        else:
            sender, receiver = _ends(pipeline, regions, index - 1, meter, is_lower=False)
            edges = edges._replace(to_previous=sender, from_previous=receiver)
    return edges


def _open(pipeline: Communicator, groups: list[list[int]], meter: CommMeter, choice: str) -> SharedRegions | None:
    if pipeline.device.type != "cpu" or choice not in ("by-host", "shared"):
        return None
    regions, reason = open_regions(pipeline, groups, meter)
    if regions is None and choice == "shared":
        raise no_shared_memory(reason)
    return regions


def _ends(
    pipeline: Communicator, regions: SharedRegions | None, neighbour: int, meter: CommMeter, *, is_lower: bool
) -> tuple[SendingEdge, ReceivingEdge]:
    """This rank's ends of the two edges to a neighbour. `is_lower`: this rank has the earlier stage."""
    if regions is not None:
        other = 1 if is_lower else 0
        return SharedMemorySender(regions, other), SharedMemoryReceiver(regions, other)
    if is_lower:  # both make the two groups in one order
        return ProcessGroupSender(pipeline, neighbour, meter), ProcessGroupReceiver(pipeline, neighbour, meter)
    receiver = ProcessGroupReceiver(pipeline, neighbour, meter)
    return ProcessGroupSender(pipeline, neighbour, meter), receiver
