"""Unequal hosts: which hosts the places of a pipeline have, where some compute faster than others.

place  of the pipeline: consecutive ranks, so whole hosts or a part of one; it computes as fast as its slowest host
kind   places that compute equally fast
order  of the hosts, in which their ranks are numbered
Law: every host is used once, and places that share a host are neighbours.
Source: HetPipe (Park et al., 2005.14038, §3): each stage of a pipeline has GPUs of one kind.
"""

from collections.abc import Sequence
from typing import NamedTuple

from fourfold.plan.decide.stages import Chain, Segment, Submesh, best_division
from fourfold.plan.predict.cluster import Cluster


class Places(NamedTuple):
    """The places of a pipeline.

    kinds   with their speeds, fastest first; with equal hosts there is one
    order   by place: its kind, where hosts have several places each; None: any order will do
    """

    kinds: tuple[Submesh, ...]
    order: tuple[int, ...] | None = None

    @property
    def num_places(self) -> int:
        return sum(kind.num_places for kind in self.kinds)

    @property
    def total_speed(self) -> float:
        """Of all places together."""
        return sum(kind.num_places * kind.speed for kind in self.kinds)


def places_of(cluster: Cluster, num_places: int) -> Places:
    """The places into which a cluster is divided: hosts that are alike are together, the fastest first."""
    speeds = sorted(cluster.host_speeds or [1.0] * cluster.hosts, reverse=True)
    size, per_host = cluster.num_devices // num_places, cluster.devices_per_host
    if size % per_host == 0:
        count = size // per_host
        of_places = [speeds[(place + 1) * count - 1] for place in range(num_places)]
    elif per_host % size == 0:
        of_places = [speed for speed in speeds for _ in range(per_host // size)]
    else:  # places lie across the borders of hosts, and each may have ranks on a slow one
        of_places = [speeds[-1]] * num_places
    kinds = sorted(set(of_places), reverse=True)
    order = tuple(kinds.index(speed) for speed in of_places) if size < per_host else None
    return Places(tuple(Submesh(of_places.count(speed), speed) for speed in kinds), order)


def assign(places: Places, seconds: Sequence[float], microbatches: int) -> tuple[int, ...]:
    """By place: its kind, so that the step is shortest. `seconds`: what each place computes, at speed 1."""
    if places.order is not None or len(places.kinds) == 1:
        return places.order or (0,) * places.num_places
    # A chain of as many blocks as places has one division; only the kinds are open.
    nothing = Segment(0.0)
    found = best_division(
        Chain(nothing, tuple(map(Segment, seconds)), nothing),
        places.kinds,
        microbatches=microbatches,
        in_flight=[1] * len(seconds),
    )
    assert found is not None
    return found.submeshes


def host_order(cluster: Cluster, kinds: Sequence[int]) -> tuple[int, ...]:
    """The hosts, by index, in the order of their ranks. `kinds`: of the places, in their order."""
    fastest_first = sorted(range(cluster.hosts), key=lambda host: -cluster.host_speeds[host])
    if cluster.hosts % len(kinds):  # hosts have several places each, or places lie across their borders
        return tuple(fastest_first)
    count = cluster.hosts // len(kinds)
    ranked = sorted(range(len(kinds)), key=lambda place: kinds[place])
    of_place = {place: fastest_first[number * count : (number + 1) * count] for number, place in enumerate(ranked)}
    return tuple(host for place in range(len(kinds)) for host in of_place[place])
