"""Roofline prices: what the devices and links of a described cluster charge.

roofline   an operation takes as long as its arithmetic or its memory traffic, whichever is longer; at least a launch
product    reaches a fraction of the peak that grows with its size: each call costs `half` operations in addition
backward   of arithmetic, two operations as large as the forward; of memory traffic 1.5: a forward reads x and writes y,
           a backward reads dy and x or y, and writes dx
ring          (N − 1) steps, in each of which every rank sends 1/N of the tensor to its neighbour
hierarchical  an all-reduce of several hosts: reduce-scatter in each host, all-reduce of every rank's part with its
              counterparts along double binary trees (Sanders et al. 2009, as in NCCL), all-gather in each host
flat          all-gathers and reduce-scatters of several hosts go around one ring of all ranks, as in NCCL
Law: more samples, bytes, elements or ranks never cost less.
Law: more bytes or more hosts never take less, nor do more ranks of one host. Over several hosts, more ranks on each
send over more adapters, so an all-reduce may take less.

Sources: Williams et al., "Roofline" (2009); efficiency by size and tiers as in Calculon (Isaev et al. 2023).
"""

import math

from fourfold.plan.codec import CODECS, CodecSpec
from fourfold.plan.plan import Plan
from fourfold.plan.precision import COMPUTE_FORMATS
from fourfold.planner.predict.clusters import Cluster, Tier
from fourfold.planner.predict.facts import Collective, Operation, OperationKind, SegmentFacts
from fourfold.planner.predict.prices import GroupShape, SegmentSeconds
from fourfold.words.errors import PlanError, Problem
from fourfold.words.layout import Change
from fourfold.words.mesh import Axis

# ---- tier seconds --------------------------------------------------------------------------------------------------

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


# ---- roofline prices -----------------------------------------------------------------------------------------------


ARITHMETIC = (OperationKind.PRODUCT, OperationKind.ATTENTION, OperationKind.CONVOLUTION)
MEMORY_BACKWARD = 1.5


class RooflinePrices:
    """The prices of a described cluster. `dtype`: of the model, for plans that keep its precision."""

    def __init__(self, cluster: Cluster, *, dtype: str = "float32") -> None:
        self.cluster = cluster
        self._dtype = dtype

    # ---- computing ------------------------------------------------------------------------------------

    def segment(self, facts: SegmentFacts, plan: Plan, num_samples: float) -> SegmentSeconds:
        peak = self.peak(plan)
        forward = inputs = weights = recomputed = 0.0
        for operation in facts.operations:
            once = self._forward(operation, num_samples, peak)
            forward += once
            half_inputs, half_weights = _backward_halves(operation)
            inputs, weights = inputs + half_inputs * once, weights + half_weights * once
            recomputed += once if facts.name and _is_recomputed(operation, plan.recompute) else 0.0
        for collective in facts.collectives:
            once = self._collective_inside(collective, plan, num_samples)
            forward += collective.forward * once
            inputs += collective.backward * once
            recomputed += collective.repeats(plan.recompute) * once if facts.name else 0.0
        return SegmentSeconds(forward, inputs + recomputed, weights)

    def peak(self, plan: Plan) -> float:
        """Operations per second in the dtype in which the plan computes. Raises PlanError."""
        compute = COMPUTE_FORMATS.get(plan.precision)
        dtype = compute.dtype if compute else self._dtype
        peak = self.cluster.flops_per_second.get(dtype)
        if peak is None:
            known = self.cluster.flops_per_second
            names = {row.dtype: f'precision = "{name}"' for name, row in COMPUTE_FORMATS.items()}
            attempt = next((names[each] for each in known if each in names), "")
            got = f"{dtype} on {self.cluster.name}"
            raise PlanError(
                Problem(got, f"a dtype with a peak there: {', '.join(known)}", attempt), where="the cluster"
            )
        return peak

    def _forward(self, operation: Operation, num_samples: float, peak: float) -> float:
        moved = num_samples * operation.moved_bytes + operation.weight_bytes
        seconds = max(moved / self.cluster.memory_bandwidth, self.cluster.launch_seconds)
        if operation.kind not in ARITHMETIC or not operation.flops:
            return seconds
        products = self.cluster.products
        return max(seconds, (num_samples * operation.flops + products.half) / (peak * products.highest))

    def _collective_inside(self, collective: Collective, plan: Plan, num_samples: float) -> float:
        group = self.axis_group(collective.axis, plan)
        return self.collective(collective.change, num_samples * collective.whole_bytes, group)

    def axis_group(self, axis: Axis, plan: Plan) -> GroupShape:
        """How the peers along an axis are spread over hosts that are filled with consecutive ranks."""
        mesh, stride = (
            plan.mesh,
            {"tp": 1, "cp": plan.tp, "dp": plan.tp * plan.cp}.get(axis, plan.tp * plan.cp * plan.dp),
        )
        size = mesh.axis_size(axis)
        on_host = max(1, min(size, self.cluster.devices_per_host // stride))
        return GroupShape(on_host, -(-size // on_host))

    # ---- sending --------------------------------------------------------------------------------------

    def collective(self, change: Change, whole_bytes: float, group: GroupShape) -> float:
        return collective_seconds(self.cluster, change, whole_bytes, group)

    def edge(self, num_bytes: float, *, crosses_hosts: bool) -> float:
        tier = self.cluster.network if crosses_hosts else self.cluster.host
        assert tier is not None, "a cluster of several hosts has a network"
        return message_seconds(tier, num_bytes)

    # ---- memory traffic -------------------------------------------------------------------------------

    def update(self, optimizer: str, num_elements: float, num_bytes: float) -> float:
        """Everything is read, and all but the gradients is written: at most twice the bytes."""
        return self.memory_pass(2.0 * num_bytes)

    def memory_pass(self, num_bytes: float) -> float:
        return max(num_bytes / self.cluster.memory_bandwidth, self.cluster.launch_seconds)

    def codec(self, codec: CodecSpec, num_elements: float) -> float:
        """Passes over the bucket and its residual, in float32."""
        passes = 6 if CODECS[codec.kind].remembers else 2
        return self.memory_pass(4.0 * passes * num_elements)

    def offload(self, num_bytes: float) -> float:
        return num_bytes / self.cluster.offload_bandwidth

    # ---- around -------------------------------------------------------------------------------------

    def slowdown(self) -> float:
        return self.cluster.overlap_slowdown

    def waiting(self) -> float:
        return 1.0

    def between_actions(self) -> float:
        return self.cluster.launch_seconds

    def around_step(self) -> float:
        """Devices are kept busy across steps: the host prepares the next one meanwhile."""
        return 0.0


def _backward_halves(operation: Operation) -> tuple[float, float]:
    """What the gradients of inputs and those of weights cost, in forwards."""
    if operation.kind is OperationKind.LOOKUP:
        return 0.0, MEMORY_BACKWARD
    if operation.kind not in ARITHMETIC or not operation.flops:
        return MEMORY_BACKWARD, 0.0
    return (1.0, 1.0) if operation.has_weight else (2.0, 0.0)


def _is_recomputed(operation: Operation, recompute: str) -> bool:
    """Whether a block's backward runs an operation again. `selective` keeps products with weights, fused attention."""
    if recompute == "selective":
        kept = operation.kind is OperationKind.ATTENTION or (operation.has_weight and operation.kind in ARITHMETIC)
        return not kept
    return recompute == "full"
