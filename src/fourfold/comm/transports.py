"""Transports: which transport joins the data ranks: one rank alone, shared memory, gloo or NCCL.

choice  the plan's `transport`: "auto" takes shared memory inside hosts where it can be had, else process groups
topology  of the ranks that are joined, by their indices in the communicator; exchanged once per job
Law: every rank chooses the same transport, from what all ranks have said of themselves.
"""

import functools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from fourfold.comm.codec.protocol import Codec
from fourfold.comm.communicator import Communicator
from fourfold.comm.meter import CommMeter
from fourfold.comm.reduce.compressed import CompressedReducer, CompressedRoutes, MessageGatherer, message_indices
from fourfold.comm.reduce.group import ShardedCollectives, WholeReducer, make_group_transport, single_rank_transport
from fourfold.comm.reduce.host import make_host_transport
from fourfold.comm.reduce.host_memory import HostMemory, SharedMemoryLayout
from fourfold.comm.reduce.protocol import DataTransport, GradsOfBucket, TransportSpec
from fourfold.comm.reduce.scalars import (
    BOARD_BYTES,
    NUM_LOSS_SCALARS,
    CallChecker,
    GroupSums,
    WorldChannel,
    world_channel,
)
from fourfold.comm.shared_regions import (
    GroupPlace,
    check_transport_device,
    no_shared_memory,
    open_host_memory,
    wants_shared_memory,
)
from fourfold.plan.check import host_shard_problem
from fourfold.plan.topology import Topology, group_hosts, num_host_shards
from fourfold.torch_kit import memory
from fourfold.words.errors import PlanError
from fourfold.words.layout import SPLIT, WHOLE


class _Host(NamedTuple):
    """The ranks of this host by their indices in a communicator, those of all hosts, and which of them this rank is.

    Each host has equally many.
    """

    ranks: Sequence[int]
    hosts: Sequence[Sequence[int]]
    rank_index: int

    @property
    def same_index(self) -> Sequence[int]:
        """The ranks that are on their hosts what this one is on its."""
        return [ranks[self.rank_index] for ranks in self.hosts]

    def open_memory(
        self, comm: Communicator, layout: SharedMemoryLayout, meter: CommMeter, calls: CallChecker | None = None
    ) -> tuple[HostMemory | None, str]:
        """Memory that the ranks of the host share; or None and the reason. Collective among the ranks of `comm`."""
        create = functools.partial(memory.create_shared, layout.total_bytes(len(self.ranks)))
        opened, reason = open_host_memory(create, comm, self.ranks)
        if opened is None:
            return None, reason
        mapping = memory.map_shared(opened.take_handle())
        place = GroupPlace(self.rank_index, tuple(comm.ranks[rank] for rank in self.ranks))  # messages name these
        host_memory = HostMemory(mapping, layout, place, meter, check_peers=comm.check_peers)
        if calls is not None:
            host_memory.check_calls = calls.check_begun
        return host_memory, ""

    def sums_between_hosts(self, comm: Communicator, purpose: str, meter: CommMeter) -> GroupSums | None:
        """Those of the ranks with this one's index; None if there is one host."""
        return GroupSums(comm, self.same_index, purpose, meter) if len(self.hosts) > 1 else None


class _Links(NamedTuple):
    """What joins some ranks."""

    comm: Communicator
    topology: Topology
    choice: str
    meter: CommMeter
    calls: CallChecker


def make_world_channel(world: Communicator, topology: Topology, choice: str, meter: CommMeter) -> WorldChannel:
    """What all ranks of the job do together. Collective. `choice` is the plan's `transport`."""
    if world.size == 1:
        return world_channel(None, None)
    if wants_shared_memory(world, choice):
        host, _ = _find_host(world, topology, choice)
        if host is not None:
            layout = SharedMemoryLayout(num_scalars=NUM_LOSS_SCALARS, board_bytes=BOARD_BYTES)
            host_memory, _ = host.open_memory(world, layout, meter)
            if host_memory is not None:
                # A group of its own: these sums begin when it is known that they may, in no order with those of other
                # scalars.
                return world_channel(host_memory, host.sums_between_hosts(world, "world scalars", meter))
    return world_channel(None, GroupSums(world, range(world.size), "scalars", meter))


def make_data_transport(
    data: Communicator,
    topology: Topology,
    spec: TransportSpec,
    *,
    meter: CommMeter,
    calls: CallChecker,
    choice: str = "auto",
    codecs: Sequence[Codec] = (),
    unbucketed_grads: GradsOfBucket | None = None,
) -> DataTransport:
    """The transport among the data ranks. Collective.

    calls             of the world: what waits in shared memory reports ranks that have diverged
    choice            the plan's `transport`
    codecs            one for each bucket, if gradients are compressed
    unbucketed_grads  a bucket's gradients, if there is one rank and they have no buffers

    Raises PlanError if the plan asks for a transport that cannot be had.
    """
    check_transport_device(choice, data.device.type)
    if unbucketed_grads is not None:
        single = WholeReducer([], spec.buffer_indices, meter, unbucketed_grads=unbucketed_grads)
        return single_rank_transport(single, spec.num_scalars)
    links = _Links(data, topology, choice, meter, calls)
    if not codecs:
        return _make_uncompressed(links, spec)[0]
    inner, host = _make_uncompressed(links, spec._replace(is_prereduced=True))
    stage_reducers = [
        _make_uncompressed(links, _message_spec(codecs, stage, buckets))[0].grads
        for stage, buckets in enumerate(message_indices(codecs))
    ]
    # Among one rank of each host if hosts share memory, else among all ranks.
    members = range(data.size) if host is None else sorted(host.same_index)
    messages = data.get_group(members, "messages") if len(members) > 1 else None
    routes = CompressedRoutes(
        inner.grads,
        stage_reducers,
        MessageGatherer(meter, messages, len(members)),
        is_host_leader=host is None or host.rank_index == 0,
        needs_factor=spec.rest.state == WHOLE,
    )
    grads = CompressedReducer(routes, codecs, meter)
    return inner._replace(grads=grads, description=f"{inner.description}, coded")


def _message_spec(codecs: Sequence[Codec], stage: int, buckets: Iterable[int]) -> TransportSpec:
    """What the messages of one stage need: sums over all ranks, one for each bucket."""
    lengths = [codecs[bucket].rounds[stage].num_bytes for bucket in buckets]
    dtypes = [codecs[bucket].message_dtype for bucket in buckets]
    sizes = [length // dtype.itemsize for length, dtype in zip(lengths, dtypes, strict=True)]
    return TransportSpec(tuple(sizes), tuple(dtypes), tuple(range(len(sizes))), num_scalars=0, purpose=f"round {stage}")


def _make_uncompressed(links: _Links, spec: TransportSpec) -> tuple[DataTransport, _Host | None]:
    """The transport, and the host if its ranks share memory."""
    comm, reason = links.comm, "as the plan asks"
    if comm.size == 1:
        single = WholeReducer(_private_buffers(spec, comm.device), spec.buffer_indices, links.meter)
        return single_rank_transport(single, spec.num_scalars), None
    if wants_shared_memory(comm, links.choice):
        host, reason = _find_host(comm, links.topology, links.choice)
        transport = None
        if host is not None:
            transport, reason = _make_shared_memory(links, spec, host)
        if transport is not None:
            return transport, host
        if links.choice == "shared":
            raise no_shared_memory(reason)
    buffers = _private_buffers(spec, comm.device)
    return make_group_transport(comm, buffers, spec, links.meter, reason=reason), None


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


def _find_host(comm: Communicator, topology: Topology, choice: str) -> tuple[_Host | None, str]:
    """The host of this rank; or None and the reason, if the ranks of hosts do not meet in shared memory."""
    hosts = group_hosts(topology, range(comm.size), transport=choice)
    if not hosts.shares_memory:
        return None, hosts.unshared_cause
    ranks = next(each for each in hosts.ranks_by_host if comm.rank in each)
    return _Host(ranks, hosts.ranks_by_host, ranks.index(comm.rank)), ""


def _make_shared_memory(links: _Links, spec: TransportSpec, host: _Host) -> tuple[DataTransport | None, str]:
    """Shared memory inside each host, gloo between hosts; or None and the reason. Collective."""
    comm, meter, size = links.comm, links.meter, len(host.ranks)
    num_host_shards = _num_host_shards(spec.num_shards or comm.size, size, len(host.hosts))
    layout = _shared_layout(spec, num_host_shards)
    mapped, reason = host.open_memory(comm, layout, meter, links.calls)
    if mapped is None:
        return None, reason
    between_hosts = scalars_between_hosts = None
    if len(host.hosts) > 1:
        host_spec = spec._replace(num_shards=num_host_shards)
        between_hosts = ShardedCollectives(comm, host.same_index, host_spec, meter, joins_hosts=True)
        if spec.num_scalars:
            scalars_between_hosts = host.sums_between_hosts(comm, spec.group_name("data scalars"), meter)
    transport = make_host_transport(
        mapped,
        rest=spec.rest,
        between_hosts=between_hosts,
        scalars_between_hosts=scalars_between_hosts,
        is_prereduced=spec.is_prereduced,
    )
    return transport, ""


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
