"""Comm: the only place that touches torch.distributed. Joins the ranks and connects them by a transport.

ranks      the processes of the job (`join`)
transport  how their buckets are summed: alone, shared memory, gloo, NCCL (`connect`)
Law: every rank decides for the same transport, from what all ranks said of themselves.
"""

import os
import platform
import secrets
import socket
import sys
from collections.abc import Sequence
from typing import NamedTuple

import torch

from fourfold.parts import memory
from fourfold.parts.codec import Codec
from fourfold.parts.comm.apart import Apart
from fourfold.parts.comm.coded import Coded, NoWire, Ways, Wire, places
from fourfold.parts.comm.group import BetweenHosts, Gatherer, GroupTransport, Use
from fourfold.parts.comm.ranks import Ranks, host_id, join, leave, present, world
from fourfold.parts.comm.shared import Shared, Slotting
from fourfold.parts.comm.transport import Alone, Part, Transport
from fourfold.plan.data import RESTS, Rest
from fourfold.words.errors import LaunchError, PlanError, Problem
from fourfold.words.layout import SPLIT

__all__ = [
    "Alone",
    "Apart",
    "Coded",
    "LaunchError",
    "Part",
    "Ranks",
    "Request",
    "Transport",
    "connect",
    "join",
    "leave",
    "present",
    "world",
]

CONNECT_SECONDS = 60.0


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
    weight_dtypes: tuple[torch.dtype, ...] | None = None

    @property
    def use(self) -> Use:
        return Use(self.rest, self.turns, self.purpose, self.coded)


class Connection(NamedTuple):
    """A transport, and what is to be said of the choice."""

    transport: Transport
    note: str


def connect(ranks: Ranks, request: Request, *, choice: str = "by-host", codecs: Sequence[Codec] = ()) -> Connection:
    """The transport among all ranks. Collective. `choice` is the plan's `transport`, `codecs` one for each bucket.

    Raises PlanError where a transport is asked for that cannot be had.
    """
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


def _share(ranks: Ranks, request: Request) -> tuple[Shared | None, str]:
    """Shared memory inside each host, gloo between hosts; or None and the reason."""
    machine = platform.machine()
    able = sys.platform == "linux" and machine == "x86_64"
    said = ranks.exchange(host_id() if able else "")
    if not all(said):
        return None, f"shared memory needs Linux on x86-64, rank {said.index('')} is not ({sys.platform}, {machine})"
    hosts = [[rank for rank, host in enumerate(said) if host == name] for name in dict.fromkeys(said)]
    here = next(host for host in hosts if ranks.rank in host)
    if len({len(host) for host in hosts}) > 1 or len(here) == 1:
        return None, f"{len(hosts)} hosts with {sorted({len(host) for host in hosts})} ranks each"
    weights = (request.weight_dtypes or request.dtypes) if request.rest.state == SPLIT else None
    slotting = Slotting(
        request.sizes, request.dtypes, num_scalars=request.num_scalars, turns=request.turns, weights=weights
    )
    opened = _open(slotting, ranks, here)
    problems = [problem for problem in (opened.problem, *ranks.exchange(opened.problem)) if problem]
    if problems:
        opened.close()
        return None, problems[0]
    try:
        handle, links = _meet(opened, ranks, here)
    except (OSError, IndexError) as error:
        problem = Problem(f"ranks {here} did not meet ({error or 'one of them has ended'})", "all of them to be alive")
        raise LaunchError(problem) from error
    between = None
    if len(hosts) > 1:
        columns = [BetweenHosts(ranks, [host[index] for host in hosts], request.use) for index in range(len(here))]
        between = columns[here.index(ranks.rank)]
    mapping = memory.map_shared(handle)
    index = here.index(ranks.rank)
    shared = Shared(
        mapping,
        slotting,
        index=index,
        size=len(here),
        rest=request.rest,
        ranks=here,
        links=links,
        between=between,
        coded=request.coded,
    )
    return shared, shared.name


class _Opened(NamedTuple):
    """A host's memory at its leader (the least rank), and the socket where the others ask for it."""

    handle: int = -1
    listener: socket.socket | None = None
    problem: str = ""

    def close(self) -> None:
        if self.listener is not None:
            self.listener.close()
            memory.close_shared(self.handle)


def _open(slotting: Slotting, ranks: Ranks, here: Sequence[int]) -> _Opened:
    if ranks.rank != here[0]:
        return _Opened()
    try:
        handle = memory.create_shared(slotting.total_bytes(len(here)))
    except memory.MemoryUnavailable as error:
        return _Opened(problem="; ".join(f"{p.got}, need {p.need}" for p in error.problems))
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.settimeout(CONNECT_SECONDS)
    # An abstract name: it belongs to the network namespace, like the host, and vanishes with the socket.
    listener.bind(f"\0fourfold-{secrets.token_hex(16)}")
    listener.listen(len(here))
    return _Opened(handle, listener)


def _meet(opened: _Opened, ranks: Ranks, here: Sequence[int]) -> tuple[int, dict[int, socket.socket]]:
    """The descriptor of the host's memory, and links by local index: a link whose end is gone tells of a death."""
    address = opened.listener.getsockname().decode("latin-1") if opened.listener else ""
    addresses = ranks.exchange(address)
    links: dict[int, socket.socket] = {}
    if opened.listener is None:
        link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        link.settimeout(CONNECT_SECONDS)
        link.connect(addresses[here[0]].encode("latin-1"))
        link.sendall(here.index(ranks.rank).to_bytes(4, "little"))
        _, handles, _, _ = socket.recv_fds(link, 1, 1)
        links[0] = link
        return handles[0], links
    while len(links) < len(here) - 1:
        link, _ = opened.listener.accept()
        if not _same_user(link):
            link.close()
            continue
        index = int.from_bytes(link.recv(4, socket.MSG_WAITALL), "little")
        socket.send_fds(link, [b"m"], [opened.handle])
        links[index] = link
    opened.listener.close()
    return opened.handle, links


def _same_user(link: socket.socket) -> bool:
    """Whether the other end runs as this user: abstract sockets have no file permissions."""
    credentials = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int.from_bytes(credentials[4:8], sys.byteorder) == os.getuid()
