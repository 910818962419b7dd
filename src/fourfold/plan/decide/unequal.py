"""Unequal hosts: which hosts the places of a pipeline have, where some compute faster than others.

place   of the pipeline: consecutive ranks, so whole hosts or a part of one; it computes as fast as its slowest host
order   of the hosts, in which their ranks are numbered: the fastest first, then as the places want them
Law: hosts of one place are as alike as they can be, and every host is used once.
Source: HetPipe (Park et al., 2005.14038, §3): each stage of a pipeline has GPUs of one kind.
"""

from collections import Counter
from collections.abc import Sequence

from fourfold.plan.decide.stages import Submesh
from fourfold.plan.predict.cluster import Cluster


def place_speeds(cluster: Cluster, num_places: int) -> list[float]:
    """The speeds of the places, fastest first."""
    speeds = sorted(cluster.host_speeds or [1.0] * cluster.hosts, reverse=True)
    size, per_host = cluster.num_devices // num_places, cluster.devices_per_host
    if size % per_host == 0:
        count = size // per_host
        return [speeds[(place + 1) * count - 1] for place in range(num_places)]
    if per_host % size == 0:
        return [speed for speed in speeds for _ in range(per_host // size)]
    # Places lie across the borders of hosts: each may have a rank on a slow one.
    return [speeds[-1]] * num_places


def submeshes(speeds: Sequence[float]) -> list[Submesh]:
    """The places by kind, fastest first."""
    counts = Counter(speeds)
    return [Submesh(counts[speed], speed) for speed in sorted(counts, reverse=True)]


def host_order(cluster: Cluster, speeds: Sequence[float]) -> tuple[int, ...]:
    """The hosts, by their index, in the order in which the places use them. `speeds`: of the places, in their order."""
    left = sorted(range(cluster.hosts), key=lambda host: -cluster.host_speeds[host])
    fastest_first = sorted(range(len(speeds)), key=lambda place: -speeds[place])
    shares = cluster.hosts / len(speeds)
    if shares >= 1:
        count = int(shares)
        of_place = {place: left[rank * count : (rank + 1) * count] for rank, place in enumerate(fastest_first)}
        return tuple(host for place in range(len(speeds)) for host in of_place[place])
    places_per_host = len(speeds) // cluster.hosts
    return tuple(left[place] for place in range(0, len(speeds), places_per_host))
