"""Comm: the only place that touches torch.distributed. Joins the ranks and connects them by a transport.

ranks      the processes of the job (`join`)
transport  how their buckets are summed: alone, shared memory, gloo, NCCL (`connect`)
Law: every rank decides for the same transport, from what all ranks said of themselves.
"""

import platform
import sys
from collections.abc import Sequence
from typing import NamedTuple

import torch

from fourfold.parts import memory
from fourfold.parts.codec.protocol import Codec
from fourfold.parts.comm.communicator import Communicator
from fourfold.parts.comm.host_shared_memory import open_host_memory
from fourfold.parts.comm.init import existing_world, init_communicator, world
from fourfold.parts.comm.reduce.compressed import CompressedRoutes, CompressedTransport, message_indices
from fourfold.parts.comm.reduce.divergence_report import divergence_error, with_options
from fourfold.parts.comm.reduce.fingerprint_check import NUM_LOSS_SCALARS
from fourfold.parts.comm.reduce.inter_host import GroupInterHostReducer
from fourfold.parts.comm.reduce.local_sgd import LocalSGDTransport
from fourfold.parts.comm.reduce.message_gatherer import GroupMessageGatherer, MessageGatherer, NullMessageGatherer
from fourfold.parts.comm.reduce.process_group import ProcessGroupTransport
from fourfold.parts.comm.reduce.protocol import BucketSlice, GradsOfBucket, Transport
from fourfold.parts.comm.reduce.shared_memory.flags import HostRanks
from fourfold.parts.comm.reduce.shared_memory.layout import SharedMemoryLayout
from fourfold.parts.comm.reduce.shared_memory.transport import SharedMemoryTransport
from fourfold.parts.comm.reduce.single_rank import SingleRankTransport
from fourfold.parts.comm.reduce.transport_spec import TransportSpec
from fourfold.parts.comm.ring.protocol import RingGroup
from fourfold.words.errors import LaunchError, PlanError, Problem
from fourfold.words.layout import SPLIT

__all__ = [
    "NUM_LOSS_SCALARS",
    "BucketSlice",
    "Communicator",
    "CompressedTransport",
    "LaunchError",
    "LocalSGDTransport",
    "RingGroup",
    "SingleRankTransport",
    "Transport",
    "TransportSpec",
    "divergence_error",
    "existing_world",
    "init_communicator",
    "make_transport",
    "with_options",
    "world",
]


class TransportChoice(NamedTuple):
    """A transport, and what is to be said of the choice."""

    transport: Transport
    description: str


def make_transport(
    ranks: Communicator,
    spec: TransportSpec,
    *,
    choice: str = "by-host",
    codecs: Sequence[Codec] = (),
    unbucketed_grads: GradsOfBucket | None = None,
) -> TransportChoice:
    """The transport among all ranks. Collective. `choice` is the plan's `transport`, `codecs` one for each bucket.

    `held`: one rank's gradients by bucket, where they have no slots. Raises PlanError where a transport is asked for
    that cannot be had.
    """
    if unbucketed_grads is not None:
        check_transport_device(choice, ranks.device.type)
        return TransportChoice(
            SingleRankTransport([], spec.buffer_indices, unbucketed_grads=unbucketed_grads),
            "one rank, nothing to exchange",
        )
    if not codecs:
        return _make_uncompressed(ranks, spec, choice)
    inner, note = _make_uncompressed(ranks, spec._replace(is_prereduced=True), choice)
    sums = []
    for number, those in enumerate(message_indices(codecs)):
        lengths = [codecs[bucket].rounds[number].num_bytes for bucket in those]
        dtypes = [codecs[bucket].message_dtype for bucket in those]
        sizes = [length // dtype.itemsize for length, dtype in zip(lengths, dtypes, strict=True)]
        messages = TransportSpec(tuple(sizes), tuple(dtypes), tuple(range(len(sizes))), purpose=f"round {number}")
        sums.append(_make_uncompressed(ranks, messages, choice).transport)
    tells = not isinstance(inner, SharedMemoryTransport) or inner.index == 0
    coded = CompressedTransport(CompressedRoutes(inner, sums, _make_gatherer(ranks, inner), tells), codecs)
    return TransportChoice(coded, f"{note}, coded")


def _make_gatherer(ranks: Communicator, inner: Transport) -> MessageGatherer:
    """The ranks that gather each other's messages. Collective."""
    if isinstance(inner, SingleRankTransport):
        return NullMessageGatherer()
    # Between hosts with shared memory, the ranks of one local index; else all.
    column = inner.index if isinstance(inner, SharedMemoryTransport) else 0
    said = ranks.all_gather_json(column)
    wires = [[rank for rank, other in enumerate(said) if other == each] for each in sorted(set(said))]
    gatherers = [GroupMessageGatherer(ranks, members) for members in wires if len(members) > 1]
    return gatherers[column] if gatherers else NullMessageGatherer()


def _make_uncompressed(ranks: Communicator, spec: TransportSpec, choice: str) -> TransportChoice:
    check_transport_device(choice, ranks.device.type)
    if ranks.size == 1:
        alone = SingleRankTransport(_private_buffers(spec, ranks.device), spec.buffer_indices)
        return TransportChoice(alone, "one rank, nothing to exchange")
    members = tuple(range(ranks.size))
    reason = "as the plan asks"
    if ranks.device.type == "cpu" and choice in ("by-host", "shared"):
        shared, reason = _make_shared_memory(ranks, spec)
        if shared is not None:
            return TransportChoice(shared, shared.name)
        if choice == "shared":
            problem = Problem(f'transport = "shared", but {reason}', "ranks that share memory", 'transport = "by-host"')
            raise PlanError(problem, where="the plan")
    slots = _private_buffers(spec, ranks.device)
    transport = ProcessGroupTransport(slots, ranks, members, spec)
    return TransportChoice(transport, f"{transport.name} ({reason})" if transport.name == "gloo" else transport.name)


def check_transport_device(choice: str, device: str) -> None:
    """Raise PlanError for a transport that this kind of device cannot have."""
    wrong = {"nccl": "cpu", "shared": "cuda", "gloo": "cuda"}.get(choice)
    if wrong == device:
        need = "GPUs" if wrong == "cpu" else "CPU ranks"
        problem = Problem(f'transport = "{choice}" on {wrong}', need, 'transport = "by-host"')
        raise PlanError(problem, where="the plan")


def _private_buffers(spec: TransportSpec, device: torch.device) -> list[torch.Tensor]:
    """Slots of this process's own."""
    lengths = [size * dtype.itemsize for size, dtype in zip(spec.sizes, spec.dtypes, strict=True)]
    room: dict[int, int] = {}
    for turn, length in zip(spec.buffer_indices, lengths, strict=True):
        room[turn] = max(room.get(turn, 0), length)
    flats = {turn: memory.allocate_private(length, torch.uint8, device) for turn, length in room.items()}
    return [
        flats[turn][:length].view(dtype)
        for turn, length, dtype in zip(spec.buffer_indices, lengths, spec.dtypes, strict=True)
    ]


def gather_hosts(ranks: Communicator) -> tuple[list[str], str]:
    """The host of every rank, or the reason why they cannot share memory. Collective."""
    machine = platform.machine()
    able = sys.platform == "linux" and machine == "x86_64"
    said = ranks.all_gather_json(ranks.host if able else "")
    if all(said):
        return said, ""
    return said, f"shared memory needs Linux on x86-64, rank {said.index('')} is not ({sys.platform}, {machine})"


def _make_shared_memory(ranks: Communicator, spec: TransportSpec) -> tuple[SharedMemoryTransport | None, str]:
    """Shared memory inside each host, gloo between hosts; or None and the reason."""
    said, reason = gather_hosts(ranks)
    if reason:
        return None, reason
    hosts = [[rank for rank, host in enumerate(said) if host == name] for name in dict.fromkeys(said)]
    here = next(host for host in hosts if ranks.rank in host)
    if len({len(host) for host in hosts}) > 1 or len(here) == 1:
        return None, f"{len(hosts)} hosts with {sorted({len(host) for host in hosts})} ranks each"
    sharing = _num_host_shards(spec.num_shards or ranks.size, len(here), len(hosts))
    between_hosts = spec.rest.weight == SPLIT and sharing > 1
    weights = (spec.weight_dtypes or spec.dtypes) if spec.rest.state == SPLIT else ()
    slotting = SharedMemoryLayout(
        spec.sizes,
        spec.dtypes,
        num_scalars=spec.num_scalars,
        buffer_indices=spec.buffer_indices,
        weight_dtypes=() if between_hosts else weights,
        staging_dtypes=weights if between_hosts else (),
    )
    met, problem = open_host_memory(lambda: memory.create_shared(slotting.total_bytes(len(here))), ranks, here)
    if met is None:
        return None, problem
    between = None
    if len(hosts) > 1:
        use = spec._replace(num_shards=sharing)
        columns = [GroupInterHostReducer(ranks, [host[index] for host in hosts], use) for index in range(len(here))]
        between = columns[here.index(ranks.rank)]
    mapping = memory.map_shared(met.handle)
    index = here.index(ranks.rank)
    shared = SharedMemoryTransport(
        mapping,
        slotting,
        HostRanks(index, tuple(here), met.peer_sockets),
        rest=spec.rest,
        inter_host=between,
        is_prereduced=spec.is_prereduced,
    )
    return shared, shared.name


def _num_host_shards(num_shards: int, ranks_per_host: int, num_hosts: int) -> int:
    """Among how many hosts of `each` ranks that is split which `shard` ranks share. Raises PlanError.

    Ranks that have memory in common need no second copy there: within a host all of them share.
    """
    if ranks_per_host % num_shards == 0:
        return 1
    if num_shards % ranks_per_host == 0:
        return num_shards // ranks_per_host
    sizes = [size * ranks_per_host for size in range(1, num_hosts + 1) if num_hosts % size == 0]
    need = "whole hosts, or a part of one: a host's ranks share its memory"
    attempt = f'shard = {", ".join(map(str, sizes))}, or transport = "gloo"'
    raise PlanError(
        Problem(f"shard = {num_shards} on {num_hosts} hosts of {ranks_per_host} ranks", need, attempt), where="the plan"
    )
