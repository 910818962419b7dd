"""Tier seconds: what messages and collectives take within a host and between hosts, by ring algorithms.

ring          (N − 1) steps, in each of which every rank sends 1/N of the tensor to its neighbour
hierarchical  an all-reduce of several hosts: reduce-scatter in each host, all-reduce of every rank's part with its
              counterparts along double binary trees (Sanders et al. 2009, as in NCCL), all-gather in each host
flat          all-gathers and reduce-scatters of several hosts go around one ring of all ranks, as in NCCL
Law: more bytes or more hosts never take less, nor do more ranks of one host. Over several hosts, more ranks on each
send over more adapters, so an all-reduce may take less.
"""

import math

from fourfold.plan.predict.cluster import Cluster, Tier
from fourfold.plan.predict.prices import GroupShape
from fourfold.words.layout import Change

RINGS = {Change.ALL_REDUCE: 2, Change.REDUCE_SCATTER: 1, Change.ALL_GATHER: 1}
"""How often a tensor goes around a ring."""


def message_seconds(tier: Tier, num_bytes: float) -> float:
    """One message from its send to its receipt."""
    return tier.latency + num_bytes / (tier.bandwidth * tier.efficiency)


def collective_seconds(cluster: Cluster, change: Change, whole_bytes: float, group: GroupShape) -> float:
    """One collective over a tensor of `whole_bytes`. What sends nothing takes no time."""
    if group.size == 1 or change not in (*RINGS, Change.ALL_TO_ALL):
        return 0.0
    if group.hosts == 1:
        return _one_tier(cluster.host, change, whole_bytes, group.size)
    network = cluster.network
    assert network is not None, "a cluster of several hosts has a network"
    if change is Change.ALL_TO_ALL:
        # What stays on the host is sent over its own tier at the same time.
        inside = _all_to_all(cluster.host, whole_bytes, group.size, others=group.ranks_per_host - 1)
        return max(inside, _all_to_all(network, whole_bytes, group.size, others=group.size - group.ranks_per_host))
    if change is Change.ALL_REDUCE:
        inside = _one_tier(cluster.host, change, whole_bytes, group.ranks_per_host)
        return inside + _trees(network, whole_bytes / group.ranks_per_host, group.hosts)
    # The ring's links within hosts and those between them are busy at the same time.
    inside = _ring(cluster.host, whole_bytes, group.size, efficiency=cluster.host.efficiency)
    return max(inside, _ring(network, whole_bytes, group.size, efficiency=network.gather_efficiency))


def _one_tier(tier: Tier, change: Change, whole_bytes: float, size: int) -> float:
    if size == 1:
        return 0.0
    if change is Change.ALL_TO_ALL:
        return _all_to_all(tier, whole_bytes, size, others=size - 1)
    return RINGS[change] * _ring(tier, whole_bytes, size, efficiency=tier.efficiency)


def _ring(tier: Tier, whole_bytes: float, size: int, *, efficiency: float) -> float:
    steps = size - 1
    return steps * tier.latency + whole_bytes * steps / size / (tier.bandwidth * efficiency)


def _trees(tier: Tier, whole_bytes: float, size: int) -> float:
    """Up and down two trees, each with half of the tensor: the bytes of a ring, and fewer steps from four ranks on."""
    steps = 2 * min(size - 1, math.ceil(math.log2(size)))
    return steps * tier.latency + 2 * whole_bytes * (size - 1) / size / (tier.bandwidth * tier.efficiency)


def _all_to_all(tier: Tier, whole_bytes: float, size: int, *, others: int) -> float:
    """Every rank has 1/size of the tensor, and sends 1/size of that to each of `others`."""
    rounds = math.ceil(math.log2(others + 1))
    return rounds * tier.latency + whole_bytes * others / size**2 / (tier.bandwidth * tier.efficiency)
