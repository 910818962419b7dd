"""Shared reads: one of the ranks of a host that need the same batches reads them, and the others map what it has read.

reader  the lowest of these ranks; it alone reads, transforms and collates
sharer  each of the others; it gets the batches of the reader, in the same memory
key     which batch: seed, epoch, and where it begins and ends in the epoch
by itself   how every rank reads batches that hold what only one process can hold, such as objects of a collate_fn
tree    the dicts, lists and tuples of a batch with its numbers and texts; a tensor stands there as its number
place   where a tensor lies in the memory of its batch, and in which shape and strides
Law: every rank gets the batches that it would read by itself, in types, values, shapes and dtypes, or the same error:
one for people says the same on all of them; of any other they say on which rank it was raised. A loop takes the batches
with its own keys, and leaves those that another loop has not taken.
"""

import itertools
import logging
import math
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import msgspec
import torch
from torch import Tensor

from fourfold.comm.communicator import Communicator
from fourfold.comm.shared_regions import open_host_memory
from fourfold.feed.sharing.channel import (
    ADDRESS_BYTES,
    IsOpen,
    Notice,
    Peers,
    ReaderEnd,
    SharerEnd,
    SlotViews,
    SlotWriter,
)
from fourfold.torch_kit import memory
from fourfold.torch_kit.tensor_tree import skeleton_of, tree_of
from fourfold.words.error_notes import error_line
from fourfold.words.errors import (
    CheckpointError,
    DamagedSample,
    DataError,
    FourfoldError,
    LaunchError,
    PeerError,
    Problem,
    SettingError,
    TaskError,
    WorkerDiedError,
)

# ---- a batch, laid end to end ----------------------------------------------------------------------------------------


ALIGNMENT_BYTES = 64
MAX_INT = 2**63
PLAIN_TYPES = (bool, int, float, str, bytes, type(None), dict, list, tuple)


class NotSharable(Exception):
    """A batch holds what only its own process can hold; the text says what."""


class TensorPlace(msgspec.Struct, frozen=True, array_like=True):
    """`start`: in bytes. A tensor of n elements takes n times its element size, whatever its strides."""

    dtype: str
    shape: list[int]
    strides: list[int]
    start: int


class LaidOut(NamedTuple):
    """`num_bytes`: of all tensors, with the gaps between them."""

    tree: Any
    places: list[TensorPlace]
    tensors: list[Tensor]
    num_bytes: int


def lay_out(batch: Any) -> LaidOut:
    """The skeleton of a batch, and where its tensors are to lie. Raises NotSharable."""
    tensors: list[Tensor] = []
    tree = skeleton_of(batch, tensors, _check)
    places, start = [], 0
    for tensor in tensors:
        # As a copy of the tensor would lie: dense, its dims in the same order.
        strides = torch.empty_like(tensor, device="meta", memory_format=torch.preserve_format).stride()
        dtype = str(tensor.dtype).removeprefix("torch.")
        places.append(TensorPlace(dtype, list(tensor.shape), list(strides), start))
        start += -(-tensor.numel() * tensor.element_size() // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return LaidOut(tree, places, [tensor.detach() for tensor in tensors], start)


def tensor_at(place: TensorPlace, content: Tensor) -> Tensor:
    """The tensor at a place of `content`, uint8 [bytes]."""
    dtype: torch.dtype = getattr(torch, place.dtype)
    num_elements = math.prod(place.shape)
    if num_elements == 0:
        return torch.empty_strided(place.shape, place.strides, dtype=dtype)
    flat = content[place.start : place.start + num_elements * dtype.itemsize].view(dtype)
    return flat.as_strided(place.shape, place.strides, flat.storage_offset())


def build_tree(tree: Any, places: Sequence[TensorPlace], content: Tensor) -> Any:
    """The batch of a skeleton, its tensors views of `content`."""
    return tree_of(tree, [tensor_at(place, content) for place in places])


def _check(value: Any) -> None:
    if isinstance(value, Tensor):
        if type(value) is not Tensor:
            raise NotSharable(f"a {type(value).__name__}")
        if value.layout is not torch.strided or value.is_quantized or value.device.type != "cpu":
            raise NotSharable(f"a {value.layout} tensor of {value.dtype} on {value.device}")
    elif type(value) not in PLAIN_TYPES or (type(value) is int and not -MAX_INT <= value < MAX_INT):
        raise NotSharable(f"a {type(value).__name__}")


# ---- an error of another rank ----------------------------------------------------------------------------------------


KINDS: dict[str, type[FourfoldError]] = {
    kind.__name__: kind for kind in (DataError, TaskError, SettingError, LaunchError, CheckpointError, PeerError)
}


class ToldError(msgspec.Struct, frozen=True, array_like=True):
    """`problems`: got, need, attempt. Of a damaged sample: its key and the reason."""

    kind: str
    problems: list[list[str]]
    where: str = ""


def tell(error: Exception, rank: int) -> ToldError:
    """An error that reading has raised on `rank`."""
    if type(error) is DamagedSample:
        return ToldError("DamagedSample", [[error.key, error.reason]], error.where)
    if type(error).__name__ in KINDS and isinstance(error, FourfoldError):
        return ToldError(type(error).__name__, [list(map(str, each)) for each in error.problems], error.where)
    place = f"on rank {rank}, which reads for this one too"
    if isinstance(error, WorkerDiedError):  # the fault is that rank's
        return ToldError("PeerError", [[f"{error.problems[0].got}, {place}"]])
    got = ", ".join([error_line(error), place, *getattr(error, "__notes__", ())])
    return ToldError("DataError", [[got, "a source that can be read", f"rank {rank} has the traceback"]], "the source")


def as_raised(told: ToldError) -> Exception:
    """The error to raise."""
    if told.kind == "DamagedSample":
        key, reason = told.problems[0]
        return DamagedSample(key, reason, where=told.where)
    problems: Any = [Problem(*each) for each in told.problems]
    return KINDS[told.kind](problems, where=told.where)


# ---- the reads -------------------------------------------------------------------------------------------------------


log = logging.getLogger("fourfold")
Item = TypeVar("Item")


class Key(NamedTuple):
    """`start` and `stop`: positions of an epoch, or of a stream the numbers of a batch. `of`: of which samples."""

    seed: int
    epoch: int
    start: int
    stop: int
    of: str


class Form(NamedTuple, Generic[Item]):
    """How an item of a loop becomes a tree of tensors and plain values, and is made of one."""

    to_tree: Callable[[Item], Any]
    of_tree: Callable[[Any], Item]


class Loop(NamedTuple, Generic[Item]):
    """What a loop is to give: an item for each key, which `read` makes; there may be fewer items than keys."""

    keys: Iterable[Key]
    read: Callable[[], Iterator[Item]]
    form: Form[Item]
    is_open: IsOpen


class Header(msgspec.Struct, frozen=True, array_like=True):
    """What lies in a slot: a batch, an error, the end of the loop (all None), or why each rank reads by itself."""

    key: list[Any]
    batch: Any = None
    places: list[TensorPlace] = []
    error: ToldError | None = None
    by_itself: str = ""


class Reads(Protocol):
    """How a rank comes to its batches."""

    @property
    def reads(self) -> bool:
        """Whether this rank reads from the source."""
        ...

    def items(self, loop: Loop[Item]) -> Iterator[Item]:
        """The items of a loop."""
        ...


class OwnReads:
    """A rank that shares its batches with no other, or reads by itself."""

    reads = True

    def items(self, loop: Loop[Item]) -> Iterator[Item]:
        return loop.read()


OWN_READS, UNOPENED_READS = OwnReads(), OwnReads()
"""The second one stands where `open_shared_reads` is still to be called."""


class ReaderReads:
    """The rank that reads, for itself and for the sharers."""

    reads = True

    def __init__(self, handle: int, end: ReaderEnd, rank: int) -> None:
        self._slots, self._views, self._end, self._rank = SlotWriter(handle), SlotViews(handle), end, rank
        self._lock, self._by_itself = threading.Lock(), False
        weakref.finalize(self, _close, handle, end).atexit = False

    def items(self, loop: Loop[Item]) -> Iterator[Item]:
        items = loop.read()
        for key in loop.keys:
            if self._by_itself:
                break
            try:
                item = next(items)
            except StopIteration:
                self._send(loop.is_open, Header(list(key)), ())
                return
            except Exception as error:
                self._send(loop.is_open, Header(list(key), error=tell(error, self._rank)), ())
                raise
            shared = self._share(key, item, loop)
            if shared is None:
                return
            yield shared
        yield from items

    def _share(self, key: Key, item: Item, loop: Loop[Item]) -> Item | None:
        """The item as all ranks see it; None if the loop has ended."""
        try:
            laid_out = lay_out(loop.form.to_tree(item))
        except NotSharable as error:
            self._by_itself = True
            log.warning(f"each rank reads its batches by itself: they hold {error}, which processes cannot share")
            self._send(loop.is_open, Header(list(key), by_itself=str(error)), ())
            return item
        header = Header(list(key), laid_out.tree, laid_out.places)
        content = self._send(loop.is_open, header, laid_out.tensors, laid_out.num_bytes)
        return None if content is None else loop.form.of_tree(build_tree(laid_out.tree, laid_out.places, content))

    def _send(self, is_open: IsOpen, header: Header, tensors: Sequence[Tensor], header_start: int = 0) -> Tensor | None:
        """Fill a slot and tell the sharers of it; this rank's view of it, or None if the loop has ended."""
        encoded = msgspec.msgpack.encode(header)
        num_bytes = header_start + len(encoded)
        with self._lock:  # the thread of a loop that was left may still be reading
            if not self._end.wait_for_sharers(is_open, self._give_back):
                return None
            self._give_back(self._views.take_released())
            slot, content = self._slots.take(num_bytes, 1 + self._end.num_sharers)
            for place, tensor in zip(header.places, tensors, strict=True):
                tensor_at(place, content).copy_(tensor)
            content[header_start:] = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
            own = self._views.view(slot, num_bytes)
            self._give_back(self._end.send(Notice(slot, num_bytes, header_start)))
        return own

    def _give_back(self, starts: Iterable[int]) -> None:
        for start in starts:
            self._slots.give_back(start)


class SharerReads:
    """A rank that gets the batches of the reader."""

    def __init__(self, handle: int, end: SharerEnd, rank: int) -> None:
        self._views, self._end, self._rank = SlotViews(handle), end, rank
        self._lock = threading.Lock()
        self.reads = False
        weakref.finalize(self, _close, handle, end).atexit = False

    def items(self, loop: Loop[Item]) -> Iterator[Item]:
        for number, key in enumerate(loop.keys):
            found = None if self.reads else self._receive(key, loop.is_open)
            if self.reads:
                yield from itertools.islice(loop.read(), number, None)
                return
            if found is None:
                return
            header, content = found
            if header.error is not None:
                raise as_raised(header.error)
            if header.batch is None:
                return
            yield loop.form.of_tree(build_tree(header.batch, header.places, content))

    def _receive(self, key: Key, is_open: IsOpen) -> tuple[Header, Tensor] | None:
        """The batch with this key; None if the loop has ended, or each rank reads by itself from now on."""
        with self._lock:
            while True:
                for start in self._views.take_released():
                    self._end.reply(start)
                notice = self._end.receive(is_open)
                if notice is None:
                    return None
                content = self._views.view(notice.slot, notice.num_bytes)
                header = msgspec.msgpack.decode(content[notice.header_start :].numpy().data, type=Header)
                if header.by_itself:
                    self.reads = True
                    return None
                if Key(*header.key) == key:
                    return header, content
                self._check(Key(*header.key), key)

    def _check(self, found: Key, key: Key) -> None:
        """Raise TaskError if the reader takes other samples than this rank needs at this place."""
        if found[:3] == key[:3]:
            got = f"samples {found.start} to {found.stop} of {found.of} on the rank that reads for rank {self._rank}"
            need = f"samples {key.start} to {key.stop} of {key.of}, as on rank {self._rank}"
            attempt = "the same source, batch size and order on every rank"
            raise TaskError(Problem(got, need, attempt), where="the feed")


def _close(handle: int, end: ReaderEnd | SharerEnd) -> None:
    end.close()
    memory.close_shared(handle)


def open_shared_reads(comm: Communicator, dp_index: int) -> Reads:
    """How this rank comes to the batches of its data index. Collective among the ranks of `comm`."""
    places = comm.all_gather_json([comm.host, dp_index])
    own = [rank for rank, place in enumerate(places) if place == [comm.host, dp_index]]
    if len({tuple(place) for place in places}) == len(places):
        return OWN_READS
    host_memory, reason = open_host_memory(lambda: memory.create_growing(ADDRESS_BYTES), comm, own)
    if host_memory is None:
        if comm.rank == 0:
            log.warning(f"each rank reads its batches by itself: {reason}")
        return OWN_READS
    peers, rank = Peers(comm.ranks[comm.rank], comm.check_peers), comm.ranks[comm.rank]
    sockets = {comm.ranks[own[index]]: each for index, each in host_memory.peer_sockets.items()}
    if len(own) == 1:
        memory.close_shared(host_memory.handle)
        return OWN_READS
    if comm.rank == own[0]:
        return ReaderReads(host_memory.handle, ReaderEnd(sockets, peers), rank)
    (reader, connection) = next(iter(sockets.items()))
    connection.settimeout(None)
    return SharerReads(host_memory.handle, SharerEnd(connection, reader, peers), rank)
