"""Clusters: their machines and links; descriptions as TOML, those that come with Fourfold and a user's own.

field       a number of the description, named by its table and key: `network.bandwidth`
source      where a number is from: a text for each field, in the table [sources]
tier        how ranks reach each other: within a host, or between hosts
efficiency  the fraction of a peak that is reached; of a product it grows with its size
Law: every quantity has a unit in its text and a source, no rate is zero, and all problems of a file are told at once.

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

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple, Self

from fourfold.plan.codec import CODECS, CodecSpec
from fourfold.plan.decode import DecodeError, from_toml, read_toml
from fourfold.plan.plan import Plan
from fourfold.plan.precision import COMPUTE_FORMATS
from fourfold.plan.topology import Topology
from fourfold.planner.predict.facts import Operation, OperationKind, SegmentFacts
from fourfold.planner.predict.prices import GroupShape, SegmentSeconds
from fourfold.words.errors import PlanError, Problem, closest_match, os_error_text
from fourfold.words.field import Field
from fourfold.words.layout import Change
from fourfold.words.mesh import Axis
from fourfold.words.units import Dimension, read_quantity

# ---- clusters ------------------------------------------------------------------------------------------------------


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


# ---- files ---------------------------------------------------------------------------------------------------------


CLUSTERS = resources.files("fourfold") / "clusters"
SUFFIX = ".toml"
DEVICES = ("cpu", "cuda")
DTYPES = ("float64", "float32", "tf32", "bfloat16", "float16")
SOURCES, HOST_SPEEDS = "sources", "host_speeds"


FRACTION = Field(type=float, above=0, maximum=1, default=1.0, attempt="1.0")
LATENCY = Field(dimension=Dimension.SECONDS, minimum=0)
RATE = Field(dimension=Dimension.BYTES_PER_SECOND)
HOSTS = Field(type=int, minimum=1, attempt="8")
TIER_FIELDS = {"latency": LATENCY, "bandwidth": RATE, "efficiency": FRACTION}
FIELDS: dict[str, Field] = {
    "devices_per_host": HOSTS,
    "hosts": dataclasses.replace(HOSTS, default=1),
    "memory": Field(dimension=Dimension.BYTES),
    "memory_bandwidth": RATE,
    "memory_efficiency": FRACTION,
    "reserve": Field(dimension=Dimension.BYTES, minimum=0, default=0.0),
    "launch": dataclasses.replace(LATENCY, default=0.0),
    "offload_bandwidth": RATE,
    "prediction_error": dataclasses.replace(FRACTION, default=0.0),
    "overlap_slowdown": Field(type=float, minimum=1, maximum=10, default=1.0, attempt="1.0"),
    "products.highest": FRACTION,
    "products.half": Field(dimension=Dimension.OPERATIONS, minimum=0, default=0.0),
    **{f"host.{key}": field for key, field in TIER_FIELDS.items()},
    **{f"network.{key}": field for key, field in TIER_FIELDS.items()},
    "network.gather_efficiency": FRACTION,
}
PEAK = Field(dimension=Dimension.OPERATIONS_PER_SECOND)
TEXTS = ("name", "device")


def cluster_names() -> list[str]:
    """The clusters that come with Fourfold."""
    return sorted(file.name.removesuffix(SUFFIX) for file in CLUSTERS.iterdir() if file.name.endswith(SUFFIX))


def load_cluster(name_or_path: str | Path) -> Cluster:
    """A cluster that comes with Fourfold, by name, or that of a file. Raises PlanError with all its problems."""
    return read_cluster(read_table(name_or_path), where=str(name_or_path))


def read_table(name_or_path: str | Path) -> dict[str, Any]:
    """The description as the file has it. Raises PlanError."""
    text = str(name_or_path)
    try:
        if text in cluster_names():
            return from_toml((CLUSTERS / f"{text}{SUFFIX}").read_text(encoding="utf-8"))
        return read_toml(Path(text))
    except DecodeError as error:
        raise PlanError(Problem(str(error), "valid TOML"), where=text) from None
    except OSError as error:
        names = cluster_names()
        need = f"a file, or one of {', '.join(names)}"
        got = f"cluster = {text}: {os_error_text(error)}"
        raise PlanError(Problem(got, need, closest_match(text, names) or names[0]), where="the cluster") from None


def read_cluster(table: Mapping[str, Any], *, where: str = "the cluster") -> Cluster:
    """The cluster of a description. Raises PlanError with all problems."""
    values = _flatten({key: value for key, value in table.items() if key not in (SOURCES, HOST_SPEEDS)})
    sources = table.get(SOURCES, {})
    has_network = "network" in table or values.get("hosts", 1) != 1
    fields = {name: field for name, field in FIELDS.items() if has_network or not name.startswith("network.")}
    if values.get("device") == "cpu":
        del fields["offload_bandwidth"]
    fields |= {name: PEAK for name in values if name in _peaks()}
    numbers: dict[str, float] = {}
    problems = [*_text_problems(values), *_unknown_problems(values, fields), *_source_problems(sources)]
    problems += _speed_problems(table.get(HOST_SPEEDS, []), values.get("hosts", 1))
    for name, field in fields.items():
        if name not in values and field.default is dataclasses.MISSING:
            problems.append(_missing_problem(name, field))
            continue
        number = _read_number(name, values[name], field) if name in values else field.default
        if isinstance(number, Problem):
            problems.append(number)
        else:
            numbers[name] = number
    if not any(name in values for name in _peaks()):
        problems.append(Problem("no flops", f"the peak of a device for some of {', '.join(DTYPES)}", _PEAK_EXAMPLE))
    if problems:
        raise PlanError(problems, where=where)
    speeds = tuple(map(float, table.get(HOST_SPEEDS, [])))
    return dataclasses.replace(_make(values, numbers, has_network=has_network), host_speeds=speeds)


_PEAK_EXAMPLE = '[flops] bfloat16 = "312 TFLOP/s"'


def _peaks() -> list[str]:
    return [f"flops.{dtype}" for dtype in DTYPES]


def _flatten(table: Mapping[str, Any]) -> dict[str, Any]:
    """The values by field name; a table of a table stays, as the unknown field that it is."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat |= {f"{key}.{inner}": each for inner, each in value.items()} if isinstance(value, dict) else {key: value}
    return flat


def _text_problems(values: Mapping[str, Any]) -> Iterable[Problem]:
    if not isinstance(values.get("name"), str) or not values["name"].strip():
        yield Problem(f"name = {values.get('name')!r}", "a name", 'name = "my cluster"')
    if values.get("device") not in DEVICES:
        yield Problem(f"device = {values.get('device')!r}", f"one of {', '.join(DEVICES)}", 'device = "cuda"')


def _unknown_problems(values: Mapping[str, Any], fields: Mapping[str, Field]) -> Iterable[Problem]:
    known = [*TEXTS, *fields, *_peaks()]
    for name, value in values.items():
        if name not in known:
            yield Problem(
                f"{name} = {value!r}", "a field of a cluster", closest_match(name, known) or ", ".join(FIELDS)
            )


def _source_problems(sources: object) -> Iterable[Problem]:
    if not isinstance(sources, Mapping):
        yield Problem(f"sources = {sources!r}", "a table of texts", "[sources]")
        return
    known = [*FIELDS, *_peaks()]
    for name, text in _flatten(sources).items():
        if name not in known:
            yield Problem(f"sources: {name}", "the name of a field", closest_match(name, known) or "")
        elif not isinstance(text, str) or not text.strip():
            yield Problem(f"sources: {name} = {text!r}", "a text that says where the number is from")


def _speed_problems(speeds: object, hosts: object) -> Iterable[Problem]:
    """The speeds of unequal hosts: one for each."""
    got, attempt = f"{HOST_SPEEDS} = {speeds!r}", f"{HOST_SPEEDS} = [1.0, 0.5], with hosts = 2"
    if not isinstance(speeds, list) or not all(type(each) in (int, float) and 0 < each < math.inf for each in speeds):
        yield Problem(got, "a list of numbers above 0", attempt)
    elif speeds and len(speeds) != hosts:
        yield Problem(f"{got} with hosts = {hosts}", "a speed for each host", attempt)


def _read_number(name: str, value: object, field: Field) -> float | Problem:
    """A number in base units, or what is wrong with it."""
    if field.dimension is not None:
        return read_quantity(name, value, field.dimension, allows_zero=field.minimum == 0)
    if field.accepts(value):
        return float(value)  # type: ignore[arg-type]
    return Problem(f"{name} = {value!r}", field.requirement(), f"{name} = {field.attempt}")


def _missing_problem(name: str, field: Field) -> Problem:
    table, _, key = name.rpartition(".")
    example = f'"{field.dimension.value}"' if field.dimension else "8"
    line = f"{key} = {example}"
    return Problem(
        f"no {name}", f"{name}, with its unit" if field.dimension else name, f"[{table}] {line}" if table else line
    )


def _make(values: Mapping[str, Any], numbers: Mapping[str, float], *, has_network: bool) -> Cluster:
    tiers = {
        tier: Tier(**{key: numbers[f"{tier}.{key}"] for key in Tier._fields if f"{tier}.{key}" in numbers})
        for tier in ("host", "network")[: 1 + has_network]
    }
    return Cluster(
        name=values["name"],
        device=values["device"],
        devices_per_host=int(numbers["devices_per_host"]),
        hosts=int(numbers["hosts"]),
        memory_bytes=numbers["memory"],
        flops_per_second={dtype: numbers[f"flops.{dtype}"] for dtype in DTYPES if f"flops.{dtype}" in numbers},
        memory_bandwidth=numbers["memory_bandwidth"] * numbers["memory_efficiency"],
        products=ProductEfficiency(numbers["products.highest"], numbers["products.half"]),
        host=tiers["host"],
        network=tiers.get("network"),
        launch_seconds=numbers["launch"],
        reserve_bytes=numbers["reserve"],
        overlap_slowdown=numbers["overlap_slowdown"],
        offload_bandwidth=numbers.get("offload_bandwidth", math.inf),
        prediction_error=numbers["prediction_error"],
    )


# ---- Roofline prices: what the devices and links of a described cluster charge --------------------------------------

# ---- tier seconds --------------------------------------------------------------------------------------------------

RINGS = {Change.ALL_REDUCE: 2, Change.REDUCE_SCATTER: 1, Change.ALL_GATHER: 1}
"""How often a tensor goes around a ring."""


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
            group = self.axis_group(collective.axis, plan)
            once = self.collective(collective.change, num_samples * collective.whole_bytes, group)
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
        return tier.latency + num_bytes / (tier.bandwidth * tier.efficiency)

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
