"""Clusters: the machines that a plan is made for, as plain data.

tier        how ranks reach each other: within a host, or between hosts
efficiency  the fraction of a peak that is reached; of a product it grows with its size
Law: a description has units and sources, and no rate is zero.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Self

from fourfold.plan.topology import Topology
from fourfold.words.errors import PlanError, Problem


class Tier(NamedTuple):
    """How the ranks of a host, or of several hosts, reach each other.

    latency    seconds of one message
    bandwidth  bytes per second that a rank sends while it receives as many, and while all others of its host do so too
    efficiency of collectives: the fraction of the bandwidth that they reach
    gather_efficiency  between hosts: that of all-gathers and reduce-scatters, which go around one ring of all ranks
    """

    latency: float
    bandwidth: float
    efficiency: float = 1.0
    gather_efficiency: float = 1.0


class ProductEfficiency(NamedTuple):
    """The fraction of the peak that a product reaches: highest · flops / (flops + half)."""

    highest: float
    half: float

    def of(self, flops: float) -> float:
        return self.highest * flops / (flops + self.half)


@dataclass(frozen=True)
class Cluster:
    """Equal hosts with equal devices, or hosts that differ only in how fast they compute.

    device            "cpu" or "cuda"
    memory_bytes      of one device
    flops_per_second  by dtype: the peak of one device
    memory_bandwidth  bytes per second of one device, as pointwise operations reach it
    host, network     tiers; network: None where there is one host
    launch_seconds    of one operation, at least
    reserve_bytes     of a rank: context, fragmentation
    overlap_slowdown  by what computing is slower while a collective is in flight
    offload_bandwidth  bytes per second between a device and its host's memory; infinite where devices are the host
    host_speeds        by host, where they differ: how fast its devices compute, relative to the numbers here
    prediction_error   the fraction by which predictions of its steps miss; 0: none was compared with a run there
    """

    name: str
    device: str
    devices_per_host: int
    hosts: int
    memory_bytes: float
    flops_per_second: Mapping[str, float]
    memory_bandwidth: float
    products: ProductEfficiency
    host: Tier
    network: Tier | None
    launch_seconds: float = 0.0
    reserve_bytes: float = 0.0
    overlap_slowdown: float = 1.0
    offload_bandwidth: float = math.inf
    host_speeds: tuple[float, ...] = ()
    prediction_error: float = 0.0

    @property
    def num_devices(self) -> int:
        return self.devices_per_host * self.hosts

    def resized(self, num_devices: int) -> Self:
        """As many devices of these hosts: whole hosts, or a part of one. Raises PlanError."""
        hosts = -(-num_devices // self.devices_per_host)
        got = f"{num_devices} devices on {hosts} hosts of {self.name}, with {self.devices_per_host} devices each"
        if num_devices < 1 or (hosts > 1 and num_devices % self.devices_per_host):
            below, above = (count * self.devices_per_host for count in (max(1, hosts - 1), max(1, hosts)))
            attempt = f"devices={below} or {above}" if below < above else f"devices={above}"
            raise PlanError(Problem(got, "whole hosts, or a part of one", attempt), where="the cluster")
        if hosts > 1 and self.network is None:
            attempt = f"a table [network] in its description, or devices={self.devices_per_host}"
            raise PlanError(Problem(got, "a network between its hosts", attempt), where="the cluster")
        if self.host_speeds and hosts > len(self.host_speeds):
            attempt = f"devices={self.num_devices}, or host_speeds of {hosts} hosts"
            raise PlanError(Problem(got, "the speed of each host", attempt), where="the cluster")
        devices_per_host, speeds = min(num_devices, self.devices_per_host), self.host_speeds[:hosts]
        return dataclasses.replace(self, hosts=hosts, devices_per_host=devices_per_host, host_speeds=speeds)


def topology_of(cluster: Cluster, num_ranks: int) -> Topology:
    """The hosts of so many ranks, a device each, hosts filled one after the other. Raises PlanError."""
    if not 1 <= num_ranks <= cluster.num_devices:
        got = f"{num_ranks} ranks on {cluster.num_devices} devices of {cluster.name}"
        raise PlanError(Problem(got, "a device for each rank", f"devices={num_ranks}"), where="the cluster")
    hosts = tuple(f"host {rank // cluster.devices_per_host}" for rank in range(num_ranks))
    return Topology(hosts, cluster.device)
