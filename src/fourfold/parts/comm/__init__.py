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
from fourfold.parts.codec import Codec
from fourfold.parts.comm.apart import Apart
from fourfold.parts.comm.calls import diverged, with_options
from fourfold.parts.comm.coded import Coded, NoWire, Ways, Wire, places
from fourfold.parts.comm.group import NUM_LOSS_SCALARS, BetweenHosts, Gatherer, GroupTransport, Use
from fourfold.parts.comm.links import Link, Messages, NoLink
from fourfold.parts.comm.neighbours import Neighbours, Place, total_bytes
from fourfold.parts.comm.ranks import Ranks, join, present, world
from fourfold.parts.comm.same_host import meet
from fourfold.parts.comm.shared import Shared
from fourfold.parts.comm.slotting import Slotting
from fourfold.parts.comm.transport import Alone, Held, Part, Transport
from fourfold.parts.comm.wire import GroupWire
from fourfold.plan.data import RESTS, Rest
from fourfold.words.errors import LaunchError, PlanError, Problem
from fourfold.words.layout import SPLIT

__all__ = [
    "NUM_LOSS_SCALARS",
    "Alone",
    "Apart",
    "Coded",
    "LaunchError",
    "Link",
    "Part",
    "Ranks",
    "Request",
    "Transport",
    "connect",
    "diverged",
    "join",
    "link",
    "present",
    "with_options",
    "world",
]


class Request(NamedTuple):
    """What the buckets need of a transport: sizes, dtypes, the slots they use by turns, rests, and room for scalars.

    `dtypes` are those of the slots; `weight_dtypes` those of the weights, where they are others.
    """

    sizes: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    turns: tuple[int, ...]
    rest: Rest = RESTS[0]
    num_scalars: int = 8
    purpose: str = ""
    """Transports of one purpose share their process groups, and so the order of what they begin."""
    coded: bool = False
    shard: int | None = None
    """Among how many neighbouring ranks that which rests split is split; None: all."""
    weight_dtypes: tuple[torch.dtype, ...] | None = None

    @property
    def use(self) -> Use:
        return Use(self.rest, self.turns, self.purpose, self.coded, self.shard)


class Connection(NamedTuple):
    """A transport, and what is to be said of the choice."""

    transport: Transport
    note: str


def connect(
    ranks: Ranks,
    request: Request,
    *,
    choice: str = "by-host",
    codecs: Sequence[Codec] = (),
    held: Held | None = None,
) -> Connection:
    """The transport among all ranks. Collective. `choice` is the plan's `transport`, `codecs` one for each bucket.

    `held`: one rank's gradients by bucket, where they have no slots. Raises PlanError where a transport is asked for
    that cannot be had.
    """
    if held is not None:
        refuse_impossible(choice, ranks.device.type)
        return Connection(Alone([], request.turns, held=held), "one rank, nothing to exchange")
    if not codecs:
        return _connect(ranks, request, choice)
    inner, note = _connect(ranks, request._replace(coded=True), choice)
    sums = []
    for number, those in enumerate(places(codecs)):
        lengths = [codecs[bucket].rounds[number].num_bytes for bucket in those]
        dtypes = [codecs[bucket].message_dtype for bucket in those]
        sizes = [length // dtype.itemsize for length, dtype in zip(lengths, dtypes, strict=True)]
        messages = Request(tuple(sizes), tuple(dtypes), tuple(range(len(sizes))), purpose=f"round {number}")
        sums.append(_connect(ranks, messages, choice).transport)
    tells = not isinstance(inner, Shared) or inner.index == 0
    coded = Coded(Ways(inner, sums, _wire(ranks, inner), tells), codecs)
    return Connection(coded, f"{note}, coded")


def _wire(ranks: Ranks, inner: Transport) -> Wire:
    """The ranks that gather each other's messages. Collective."""
    if isinstance(inner, Alone):
        return NoWire()
    # Between hosts with shared memory, the ranks of one local index; else all.
    column = inner.index if isinstance(inner, Shared) else 0
    said = ranks.exchange(column)
    wires = [[rank for rank, other in enumerate(said) if other == each] for each in sorted(set(said))]
    gatherers = [Gatherer(ranks, members) for members in wires if len(members) > 1]
    return gatherers[column] if gatherers else NoWire()


def _connect(ranks: Ranks, request: Request, choice: str) -> Connection:
    refuse_impossible(choice, ranks.device.type)
    if ranks.size == 1:
        alone = Alone(_private(request, ranks.device), request.turns)
        return Connection(alone, "one rank, nothing to exchange")
    members = tuple(range(ranks.size))
    reason = "as the plan asks"
    if ranks.device.type == "cpu" and choice in ("by-host", "shared"):
        shared, reason = _share(ranks, request)
        if shared is not None:
            return Connection(shared, shared.name)
        if choice == "shared":
            problem = Problem(f'transport = "shared", but {reason}', "ranks that share memory", 'transport = "by-host"')
            raise PlanError(problem, where="the plan")
    slots = _private(request, ranks.device)
    transport = GroupTransport(slots, ranks, members, request.use)
    return Connection(transport, f"{transport.name} ({reason})" if transport.name == "gloo" else transport.name)


def refuse_impossible(choice: str, device: str) -> None:
    """Raise PlanError for a transport that this kind of device cannot have."""
    wrong = {"nccl": "cpu", "shared": "cuda", "gloo": "cuda"}.get(choice)
    if wrong == device:
        need = "GPUs" if wrong == "cpu" else "CPU ranks"
        problem = Problem(f'transport = "{choice}" on {wrong}', need, 'transport = "by-host"')
        raise PlanError(problem, where="the plan")


def _private(request: Request, device: torch.device) -> list[torch.Tensor]:
    """Slots of this process's own."""
    lengths = [size * dtype.itemsize for size, dtype in zip(request.sizes, request.dtypes, strict=True)]
    room: dict[int, int] = {}
    for turn, length in zip(request.turns, lengths, strict=True):
        room[turn] = max(room.get(turn, 0), length)
    flats = {turn: memory.private(length, torch.uint8, device) for turn, length in room.items()}
    return [
        flats[turn][:length].view(dtype)
        for turn, length, dtype in zip(request.turns, lengths, request.dtypes, strict=True)
    ]


def _hosts(ranks: Ranks) -> tuple[list[str], str]:
    """The host of every rank, or the reason why they cannot share memory. Collective."""
    machine = platform.machine()
    able = sys.platform == "linux" and machine == "x86_64"
    said = ranks.exchange(ranks.host if able else "")
    if all(said):
        return said, ""
    return said, f"shared memory needs Linux on x86-64, rank {said.index('')} is not ({sys.platform}, {machine})"


def _share(ranks: Ranks, request: Request) -> tuple[Shared | None, str]:
    """Shared memory inside each host, gloo between hosts; or None and the reason."""
    said, reason = _hosts(ranks)
    if reason:
        return None, reason
    hosts = [[rank for rank, host in enumerate(said) if host == name] for name in dict.fromkeys(said)]
    here = next(host for host in hosts if ranks.rank in host)
    if len({len(host) for host in hosts}) > 1 or len(here) == 1:
        return None, f"{len(hosts)} hosts with {sorted({len(host) for host in hosts})} ranks each"
    sharing = _hosts_sharing(request.shard or ranks.size, len(here), len(hosts))
    between_hosts = request.rest.weight == SPLIT and sharing > 1
    weights = (request.weight_dtypes or request.dtypes) if request.rest.state == SPLIT else ()
    slotting = Slotting(
        request.sizes,
        request.dtypes,
        num_scalars=request.num_scalars,
        turns=request.turns,
        weights=() if between_hosts else weights,
        stages=weights if between_hosts else (),
    )
    met, problem = meet(lambda: memory.create_shared(slotting.total_bytes(len(here))), ranks, here)
    if met is None:
        return None, problem
    between = None
    if len(hosts) > 1:
        use = request.use._replace(shard=sharing)
        columns = [BetweenHosts(ranks, [host[index] for host in hosts], use) for index in range(len(here))]
        between = columns[here.index(ranks.rank)]
    mapping = memory.map_shared(met.handle)
    index = here.index(ranks.rank)
    shared = Shared(
        mapping,
        slotting,
        index=index,
        size=len(here),
        rest=request.rest,
        ranks=here,
        links=met.links,
        between=between,
        coded=request.coded,
    )
    return shared, shared.name


def _hosts_sharing(shard: int, each: int, hosts: int) -> int:
    """Among how many hosts of `each` ranks that is split which `shard` ranks share. Raises PlanError.

    Ranks that have memory in common need no second copy there: within a host all of them share.
    """
    if each % shard == 0:
        return 1
    if shard % each == 0:
        return shard // each
    sizes = [size * each for size in range(1, hosts + 1) if hosts % size == 0]
    need = "whole hosts, or a part of one: a host's ranks share its memory"
    attempt = f'shard = {", ".join(map(str, sizes))}, or transport = "gloo"'
    raise PlanError(Problem(f"shard = {shard} on {hosts} hosts of {each} ranks", need, attempt), where="the plan")


def link(ranks: Ranks, groups: Sequence[Sequence[int]], purpose: str, *, choice: str = "by-host") -> Link:
    """The link among the ranks of this rank's group. Collective; `groups` partition the ranks, alike on every rank.

    Raises PlanError where a transport is asked for that cannot be had.
    """
    refuse_impossible(choice, ranks.device.type)
    mine = next(group for group in groups if ranks.rank in group)
    if all(len(group) == 1 for group in groups):
        return NoLink()
    if ranks.device.type == "cpu" and choice in ("by-host", "shared"):
        neighbours, reason = _neighbours(ranks, groups, mine)
        if neighbours is not None:
            return neighbours
        if choice == "shared":
            problem = Problem(f'transport = "shared", but {reason}', "ranks that share memory", 'transport = "by-host"')
            raise PlanError(problem, where="the plan")
    wires = [GroupWire(ranks, group, purpose) for group in groups]
    return Messages(next(wire for wire, group in zip(wires, groups, strict=True) if group is mine))


def _neighbours(ranks: Ranks, groups: Sequence[Sequence[int]], mine: Sequence[int]) -> tuple[Neighbours | None, str]:
    """The link of a group inside a host, if every group is; or None and the reason."""
    said, reason = _hosts(ranks)
    apart = [group for group in groups if len({said[rank] for rank in group}) > 1]
    if reason or apart:
        return None, reason or f"ranks {list(apart[0])} are on several hosts"
    met, problem = meet(lambda: memory.create_growing(total_bytes(len(mine))), ranks, mine)
    if met is None:
        return None, problem
    for socket in met.links.values():
        socket.close()
    return Neighbours(met.handle, Place(list(mine).index(ranks.rank), tuple(mine)), look=ranks.look), ""
