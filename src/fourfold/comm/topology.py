"""The topology of this job: what its ranks say of their machines."""

import platform
import sys

from fourfold.comm.communicator import Communicator
from fourfold.plan.topology import Topology


def topology_along(world: Communicator, topology: Topology, some: Communicator) -> Topology:
    """The topology of some ranks of a world, whose own topology is known."""
    return topology.restricted_to(world.ranks.index(rank) for rank in some.ranks)


def gather_topology(comm: Communicator) -> Topology:
    """The hosts of all ranks of a communicator, and whether the ranks of each can share memory. Collective."""
    machine = platform.machine()
    unsupported = "" if sys.platform == "linux" and machine == "x86_64" else f"{sys.platform}, {machine}"
    said = comm.all_gather_json([comm.host, unsupported])
    causes = [
        f"shared memory needs Linux on x86-64, rank {rank} is not ({cause})"
        for rank, (_, cause) in enumerate(said)
        if cause
    ]
    return Topology(tuple(host for host, _ in said), comm.device.type, causes[0] if causes else "")
