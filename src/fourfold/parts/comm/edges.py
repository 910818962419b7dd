"""Edges of a pipeline: which transport joins neighbouring stages: shared memory, or messages over gloo or NCCL.

Law: both ends of an edge choose the same, from what all ranks of the pipeline have said of themselves.
"""

from collections.abc import Sequence

from fourfold.parts.comm.communicator import Communicator
from fourfold.parts.comm.edge.process_group import ProcessGroupReceiver, ProcessGroupSender
from fourfold.parts.comm.edge.protocol import ReceivingEdge, SendingEdge, StageEdges
from fourfold.parts.comm.edge.shared_memory import NUM_SLOTS, SharedMemoryReceiver, SharedMemorySender
from fourfold.parts.comm.meter import CommMeter
from fourfold.parts.comm.shared_regions import SharedRegions, open_regions
from fourfold.parts.comm.transports import check_transport_device, no_shared_memory


def make_edges(
    pipeline: Communicator, meter: CommMeter, *, choice: str = "by-host", is_ring: bool = False
) -> StageEdges:
    """The edges of this rank to its neighbours among the ranks of a pipeline. Collective.

    choice   the plan's transport
    is_ring  the last rank is followed by the first one, which has a later stage too

    Raises PlanError if the plan asks for a transport that cannot be had.
    """
    check_transport_device(choice, pipeline.device.type)
    size, edges = pipeline.size, StageEdges()
    # A rank has two neighbours: pairs that begin with an even index, then those that begin with an odd one.
    rounds = [[(start, start + 1) for start in range(parity, size - 1, 2)] for parity in range(min(2, size - 1))]
    for pairs in rounds:
        edges = _connect(pipeline, pairs, edges, meter, choice, purpose="edge")
    if is_ring:  # groups of its own: with two ranks, both edges are between the same ones
        edges = _connect(pipeline, [(size - 1, 0)], edges, meter, choice, purpose="ring edge")
    return edges


def connect_pair(
    pipeline: Communicator, first: int, second: int, meter: CommMeter, *, choice: str = "by-host"
) -> tuple[SendingEdge, ReceivingEdge] | None:
    """This rank's ends of two edges between two ranks of a pipeline; None if it is neither. Collective among all."""
    edges = _connect(pipeline, [(first, second)], StageEdges(), meter, choice, purpose="tied")
    ends = (edges.to_next, edges.from_next) if pipeline.rank == first else (edges.to_previous, edges.from_previous)
    return None if ends[0] is None or ends[1] is None else (ends[0], ends[1])


def _connect(
    pipeline: Communicator,
    pairs: Sequence[tuple[int, int]],
    edges: StageEdges,
    meter: CommMeter,
    choice: str,
    purpose: str,
) -> StageEdges:
    """These edges and those of the pair that this rank is in. Collective."""
    paired = {each for pair in pairs for each in pair}
    groups = [*pairs, *((each,) for each in range(pipeline.size) if each not in paired)]
    regions = _open(pipeline, groups, meter, choice)
    for first, second in pairs:
        if pipeline.rank == first:
            sender, receiver = _ends(pipeline, regions, second, meter, purpose, is_first=True)
            edges = edges._replace(to_next=sender, from_next=receiver)
        elif pipeline.rank == second:
            sender, receiver = _ends(pipeline, regions, first, meter, purpose, is_first=False)
            edges = edges._replace(to_previous=sender, from_previous=receiver)
    return edges


def _open(
    pipeline: Communicator, groups: Sequence[tuple[int, ...]], meter: CommMeter, choice: str
) -> SharedRegions | None:
    if pipeline.device.type != "cpu" or choice not in ("by-host", "shared"):
        return None
    regions, reason = open_regions(pipeline, groups, meter, num_areas=NUM_SLOTS)
    if regions is None and choice == "shared":
        raise no_shared_memory(reason)
    return regions


def _ends(
    pipeline: Communicator,
    regions: SharedRegions | None,
    neighbour: int,
    meter: CommMeter,
    purpose: str,
    *,
    is_first: bool,
) -> tuple[SendingEdge, ReceivingEdge]:
    """This rank's ends of the two edges to a neighbour. `is_first`: this rank sends activations."""
    if regions is not None:
        other = 1 if is_first else 0
        return SharedMemorySender(regions, other), SharedMemoryReceiver(regions, other)
    if is_first:  # both make the two groups in one order
        sender = ProcessGroupSender(pipeline, neighbour, meter, purpose)
        return sender, ProcessGroupReceiver(pipeline, neighbour, meter, purpose)
    receiver = ProcessGroupReceiver(pipeline, neighbour, meter, purpose)
    return ProcessGroupSender(pipeline, neighbour, meter, purpose), receiver
