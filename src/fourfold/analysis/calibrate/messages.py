"""Messages: seconds of what ranks exchange inside a forward or backward, and between stages.

hop  one block of a ring to the neighbour, while one comes from the other side
Law: all pairs and groups exchange at the same time, as they do in a step.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fourfold.analysis.calibrate.timing import Points, Turns
from fourfold.parts.comm.communicator import Communicator
from fourfold.parts.comm.edges import StageEdges, make_edges
from fourfold.parts.comm.meter import CommMeter
from fourfold.parts.comm.ring import make_ring
from fourfold.parts.comm.tensor_groups import make_tensor_group
from fourfold.words.mesh import Mesh

MESSAGE_BYTES = (2**12, 2**16, 2**19, 2**21, 2**23)
NETWORK_BYTES = (2**12, 2**14, 2**16, 2**18, 2**20)
ELEMENT_BYTES = 4


class ExchangeTimes(NamedTuple):
    """Of groups of so many ranks, by bytes: an all-reduce of tensor ranks, a hop of a ring."""

    size: int
    all_reduce: Points
    hop: Points


def _sizes(ranks: Communicator) -> Sequence[int]:
    return NETWORK_BYTES if ranks.num_hosts > 1 else MESSAGE_BYTES


def measure_edges(turns: Turns) -> Points:
    """A message between two stages, by bytes. Collective."""
    ranks = turns.ranks
    places = 2 if ranks.size % 2 == 0 else ranks.size
    edges = make_edges(ranks.on_mesh(Mesh(pp=places, dp=ranks.size // places)).along("pp"), CommMeter())
    points = []
    for num_bytes in _sizes(ranks):
        message = torch.zeros(num_bytes // ELEMENT_BYTES, device=ranks.device)

        def run(message: Tensor = message) -> None:
            _echo(edges, message)

        points.append((float(num_bytes), turns.median_seconds(run) / 2))
    return points


def _echo(edges: StageEdges, message: Tensor) -> None:
    """To the next stage and back; the stage before has a message of its own on its way."""
    if edges.to_next is not None:
        edges.to_next.send([message])
    if edges.from_previous is not None and edges.to_previous is not None:
        edges.to_previous.send(edges.from_previous.receive())
    if edges.from_next is not None:
        edges.from_next.receive()


def measure_exchanges(turns: Turns, sizes: Sequence[int]) -> list[ExchangeTimes]:
    """What tensor ranks and sequence ranks exchange, for groups of these sizes. Collective."""
    return [_measure_exchanges(turns, size) for size in sizes]


def _measure_exchanges(turns: Turns, size: int) -> ExchangeTimes:
    ranks = turns.ranks
    group_ranks = ranks.on_mesh(Mesh(dp=ranks.size // size, tp=size)).along("tp")
    tensor = make_tensor_group(group_ranks, "calibration", CommMeter())
    ring = make_ring(group_ranks, [range(size)], "calibration", CommMeter())
    reduced: Points = []
    hops: Points = []
    for num_bytes in _sizes(ranks):
        values = torch.zeros(num_bytes // ELEMENT_BYTES, device=ranks.device)

        def reduce(values: Tensor = values) -> None:
            tensor.all_reduce(values)

        def circle(values: Tensor = values) -> None:
            for _ in ring.iterate_blocks([values]):
                pass

        reduced.append((float(num_bytes), turns.median_seconds(reduce)))
        hops.append((float(num_bytes), turns.median_seconds(circle) / (size - 1)))
    return ExchangeTimes(size, reduced, hops)
