"""Transports: which transport joins the data ranks: one rank alone, shared memory, gloo or NCCL.

choice  the plan's `transport`: "by-host" takes shared memory inside hosts where it can be had, else process groups
Law: every rank chooses the same transport, from what all ranks have said of themselves.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from fourfold.parts import memory
from fourfold.parts.codec.protocol import Codec
from fourfold.parts.comm.communicator import Communicator
from fourfold.parts.comm.host_shared_memory import open_host_memory
from fourfold.parts.comm.reduce.compressed import CompressedRoutes, CompressedTransport, message_indices
from fourfold.parts.comm.reduce.inter_host import GroupInterHostReducer
from fourfold.parts.comm.reduce.message_gatherer import GroupMessageGatherer, MessageGatherer, NullMessageGatherer
from fourfold.parts.comm.reduce.process_group import ProcessGroupTransport
from fourfold.parts.comm.reduce.protocol import GradsOfBucket, Transport
from fourfold.parts.comm.reduce.shared_memory.flags import HostRanks
from fourfold.parts.comm.reduce.shared_memory.layout import SharedMemoryLayout
from fourfold.parts.comm.reduce.shared_memory.transport import SharedMemoryTransport
from fourfold.parts.comm.reduce.single_rank import SingleRankTransport
from fourfold.parts.comm.reduce.transport_spec import TransportSpec
from fourfold.parts.comm.topology import gather_topology
from fourfold.plan.check import host_shard_problem, no_shared_memory_problem, transport_device_problems
from fourfold.plan.topology import num_host_shards
from fourfold.words.errors import PlanError
from fourfold.words.layout import SPLIT


class TransportChoice(NamedTuple):
    """A transport, and why it was chosen, in words."""

    transport: Transport
    description: str


def make_transport(
    comm: Communicator,
    spec: TransportSpec,
    *,
    choice: str = "by-host",
    codecs: Sequence[Codec] = (),
    unbucketed_grads: GradsOfBucket | None = None,
) -> TransportChoice:
    """The transport among all ranks. Collective.

    choice            the plan's `transport`
    codecs            one for each bucket, if gradients are compressed
    unbucketed_grads  a bucket's gradients, if there is one rank and they have no buffers

    Raises PlanError if the plan asks for a transport that cannot be had.
    """
    if unbucketed_grads is not None:
        check_transport_device(choice, comm.device.type)
        single = SingleRankTransport([], spec.buffer_indices, unbucketed_grads=unbucketed_grads)
        return TransportChoice(single, "one rank, nothing to exchange")
    if not codecs:
        return _make_uncompressed(comm, spec, choice)
    inner, description = _make_uncompressed(comm, spec._replace(is_prereduced=True), choice)
    stage_transports = []
    for stage, buckets in enumerate(message_indices(codecs)):
        lengths = [codecs[bucket].rounds[stage].num_bytes for bucket in buckets]
        dtypes = [codecs[bucket].message_dtype for bucket in buckets]
        sizes = [length // dtype.itemsize for length, dtype in zip(lengths, dtypes, strict=True)]
        messages = TransportSpec(tuple(sizes), tuple(dtypes), tuple(range(len(sizes))), purpose=f"round {stage}")
        stage_transports.append(_make_uncompressed(comm, messages, choice).transport)
    is_host_leader = not isinstance(inner, SharedMemoryTransport) or inner.index == 0
    routes = CompressedRoutes(inner, stage_transports, _make_gatherer(comm, inner), is_host_leader)
    return TransportChoice(CompressedTransport(routes, codecs), f"{description}, coded")


def _make_gatherer(comm: Communicator, inner: Transport) -> MessageGatherer:
    """All-gathers among one rank of each host if hosts share memory, else among all ranks. Collective."""
    if isinstance(inner, SingleRankTransport):
        return NullMessageGatherer()
    local_index = inner.index if isinstance(inner, SharedMemoryTransport) else 0
    indices = comm.all_gather_json(local_index)
    groups = [[rank for rank, other in enumerate(indices) if other == index] for index in sorted(set(indices))]
    gatherers = [GroupMessageGatherer(comm, group) for group in groups if len(group) > 1]
    return gatherers[local_index] if gatherers else NullMessageGatherer()


def _make_uncompressed(comm: Communicator, spec: TransportSpec, choice: str) -> TransportChoice:
    check_transport_device(choice, comm.device.type)
    if comm.size == 1:
        single = SingleRankTransport(_private_buffers(spec, comm.device), spec.buffer_indices)
        return TransportChoice(single, "one rank, nothing to exchange")
    reason = "as the plan asks"
    if comm.device.type == "cpu" and choice in ("by-host", "shared"):
        shared, reason = _make_shared_memory(comm, spec)
        if shared is not None:
            return TransportChoice(shared, shared.name)
        if choice == "shared":
            raise no_shared_memory(reason)
    transport = ProcessGroupTransport(_private_buffers(spec, comm.device), comm, range(comm.size), spec)
    return TransportChoice(transport, f"{transport.name} ({reason})" if transport.name == "gloo" else transport.name)


def no_shared_memory(reason: str) -> PlanError:
    """The error if the plan asks for shared memory that the ranks cannot have."""
    return PlanError(no_shared_memory_problem(reason), where="the plan")


def check_transport_device(choice: str, device: str) -> None:
    """Raise PlanError for a transport that this kind of device cannot have."""
    if problems := transport_device_problems(choice, device):
        raise PlanError(problems, where="the plan")


def _private_buffers(spec: TransportSpec, device: torch.device) -> list[torch.Tensor]:
    """Gradient buffers that only this process sees."""
    lengths = [size * dtype.itemsize for size, dtype in zip(spec.sizes, spec.dtypes, strict=True)]
    num_bytes: dict[int, int] = {}
    for index, length in zip(spec.buffer_indices, lengths, strict=True):
        num_bytes[index] = max(num_bytes.get(index, 0), length)
    flats = {index: memory.allocate_private(length, torch.uint8, device) for index, length in num_bytes.items()}
    return [
        flats[index][:length].view(dtype)
        for index, length, dtype in zip(spec.buffer_indices, lengths, spec.dtypes, strict=True)
    ]


def gather_hosts(comm: Communicator) -> tuple[list[str], str]:
    """The host of every rank, and the reason if they cannot share memory, else "". Collective."""
    topology = gather_topology(comm)
    return list(topology.hosts), topology.unshared_cause


def _make_shared_memory(comm: Communicator, spec: TransportSpec) -> tuple[SharedMemoryTransport | None, str]:
    """Shared memory inside each host, gloo between hosts; or None and the reason. Collective."""
    host_names, reason = gather_hosts(comm)
    if reason:
        return None, reason
    hosts = [[rank for rank, name in enumerate(host_names) if name == each] for each in dict.fromkeys(host_names)]
    host_ranks = next(host for host in hosts if comm.rank in host)
    size, index = len(host_ranks), host_ranks.index(comm.rank)
    if len({len(host) for host in hosts}) > 1 or size == 1:
        return None, f"{len(hosts)} hosts with {sorted({len(host) for host in hosts})} ranks each"
    num_host_shards = _num_host_shards(spec.num_shards or comm.size, size, len(hosts))
    layout = _shared_layout(spec, num_host_shards)
    host_memory, reason = open_host_memory(lambda: memory.create_shared(layout.total_bytes(size)), comm, host_ranks)
    if host_memory is None:
        return None, reason
    inter_host = None
    if len(hosts) > 1:
        host_spec = spec._replace(num_shards=num_host_shards)
        # Every rank makes the groups of all local indices, and uses those of its own.
        reducers = [GroupInterHostReducer(comm, [host[i] for host in hosts], host_spec) for i in range(size)]
        inter_host = reducers[index]
    shared = SharedMemoryTransport(
        memory.map_shared(host_memory.handle),
        layout,
        HostRanks(index, tuple(host_ranks), host_memory.peer_sockets),
        rest=spec.rest,
        inter_host=inter_host,
        is_prereduced=spec.is_prereduced,
    )
    return shared, shared.name


def _shared_layout(spec: TransportSpec, num_host_shards: int) -> SharedMemoryLayout:
    """Weights that rest split between hosts come through staging buffers; otherwise they exist once per host."""
    is_split_between_hosts = spec.rest.weight == SPLIT and num_host_shards > 1
    weight_dtypes = (spec.weight_dtypes or spec.dtypes) if spec.rest.state == SPLIT else ()
    return SharedMemoryLayout(
        spec.sizes,
        spec.dtypes,
        num_scalars=spec.num_scalars,
        buffer_indices=spec.buffer_indices,
        weight_dtypes=() if is_split_between_hosts else weight_dtypes,
        staging_dtypes=weight_dtypes if is_split_between_hosts else (),
    )


def _num_host_shards(num_shards: int, ranks_per_host: int, num_hosts: int) -> int:
    """How many hosts split what `num_shards` ranks split. Raises PlanError."""
    shards = num_host_shards(num_shards, ranks_per_host)
    if shards is None:
        raise PlanError(host_shard_problem(num_shards, num_hosts, ranks_per_host), where="the plan")
    return shards
