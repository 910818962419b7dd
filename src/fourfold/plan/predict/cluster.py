"""Clusters: the machines that a plan is made for, as plain data.

tier        how ranks reach each other: within a host, or between hosts
efficiency  the fraction of a peak that is reached; of a product it grows with its size
Law: a description has units and sources, and no rate is zero.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple


class Tier(NamedTuple):
    """How the ranks of a host, or of several hosts, reach each other.

    latency    seconds of one message
    bandwidth  bytes per second that a rank sends while it receives as many
    efficiency of collectives: the fraction of the bandwidth that they reach
    """

    latency: float
    bandwidth: float
    efficiency: float = 1.0


class ProductEfficiency(NamedTuple):
    """The fraction of the peak that a product reaches: highest · flops / (flops + half)."""

    highest: float
    half: float

    def of(self, flops: float) -> float:
        return self.highest * flops / (flops + self.half)


@dataclass(frozen=True)
class Cluster:
    """Equal hosts with equal devices.

    device            "cpu" or "cuda"
    memory_bytes      of one device
    flops_per_second  by dtype: the peak of one device
    memory_bandwidth  bytes per second of one device, as pointwise operations reach it
    host, network     tiers; network: None where there is one host
    launch_seconds    of one operation, at least
    reserve_bytes     of a rank: context, fragmentation
    overlap_slowdown  by what computing is slower while a collective is in flight
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

    @property
    def num_devices(self) -> int:
        return self.devices_per_host * self.hosts
