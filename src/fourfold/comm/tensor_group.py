"""Tensor groups: the collectives of the tensor axis, on activations and their gradients, in memory or by messages.

call      in words, such as "step 2"; a second line may have the optimizer's options. In a checked group what a rank
          begins: a collective on a tensor of some shape and dtype, or its last one, which ends the calls
digest    a number that goes with it, of a batch for example
block     one rank's tensor of a collective, in one of two areas of its region alternately; its call is the collective,
          the dtype and the bytes, equal on all ranks
publish   put the block there, unless it was computed there, and raise PUBLISHED: its count is that of collectives
slice     the part of every block that one rank adds for all others, if blocks are large: in place of its own part
Law: the ranks of a group call the same collectives in the same order, within a forward or a backward, and hold bitwise
equal results.
Law: between processes of one host sums are added in rank order; half precision is added in float32 and rounded once.
`out` may be one of two parts, else it shares no memory with them.
Law: the collective that compares calls is the same for all calls. So ranks in different calls meet in it, over shared
memory and over messages, and raise DivergenceError; those of a checked group raise CallMismatch, at the same call.
Law: all ranks get the same bits. A ring all-reduce, gloo's and NCCL's, finishes each segment on one rank and copies it
to the others. Where ranks add by themselves, they do so in rank order.

gloo rounds sums of half precision at each rank that it passes. So with more than two ranks they are exchanged and added
here, which sends the same bytes. Maxima are gathered: gloo's and NCCL's may lose a NaN.
Law: a block is written only while no other rank may read it.

Proof. A rank reads blocks of collective c only after all have published c, and it publishes c + 1 only after it has
read them: one collective ends before the next one begins. Block c + 2 lies where block c lay. A rank writes it, or
lends it (`buffer`), after its own collective c + 1 has ended, which waited until all had published c + 1; so all had
read the blocks of c. Of two areas for each rank one is thus always free, and no rank says what it has read. The sum of
a slice overwrites only the owner's own part of it, which no rank but the owner reads before REDUCED says that the sum
is there. That what lies before a flag is seen with the flag, `SharedRegions` explains.
"""

import zlib
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fourfold.comm.channel import Channel
from fourfold.comm.collectives import DTYPES, Group, Work
from fourfold.comm.communicator import Communicator
from fourfold.comm.meter import CommMeter
from fourfold.comm.reduce.scalars import divergence_error
from fourfold.comm.shared_regions import SharedRegions, choose_regions
from fourfold.words.errors import DivergenceError, Problem
from fourfold.words.layout import Change, collective_sent_bytes

# ---- what a tensor group does --------------------------------------------------------------------------------------


class TensorGroup(Protocol):
    """This rank's view of the group. All methods but `buffer` are collective, on tensors of the same shape and dtype.

    They wait, and their results are contiguous and carry no gradient. All raise PeerError if a rank has died; where
    ranks share memory, DivergenceError if they differ in the collective, the dtype or the number of bytes.
    """

    name: str
    size: int
    index: int
    meter: CommMeter
    """That of this rank: it counts and records what the group sends and waits for."""

    def meet(self, call: str) -> None:
        """Begin a call that one rank might make alone. Raises DivergenceError, on all ranks, if others begin another.

        Where ranks share memory, each collective compares; over messages, ranks in different ones would wait or die.
        """
        ...

    def buffer(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A contiguous tensor with undefined values, for the input of the next collective, which then copies nothing.

        Where ranks share memory, peers read it where it lies. It may be used until the next collective of the group.
        """
        ...

    def num_chunks(self, num_bytes: int) -> int:
        """Into how many chunks a product is best cut, so that the sum of one travels while the next one is computed.

        1 where sums do not travel beside computation, or where so few bytes would travel slower in chunks.
        """
        ...

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over the ranks; `tensor` may be overwritten, and may be the result."""
        ...

    def all_reduce_async(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Begin to sum over the ranks; the returned function waits, and returns the sum.

        Until then `tensor` may be neither read nor written, and the group does nothing else.
        """
        ...

    def all_reduce_max(self, tensor: Tensor) -> Tensor:
        """The elementwise maximum over the ranks, NaN where a rank has NaN; `tensor` may be overwritten or returned."""
        ...

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        """The tensors of all ranks, one behind the other along `dim`."""
        ...

    def reduce_scatter(self, tensor: Tensor, dim: int) -> Tensor:
        """This rank's equal slice along `dim` of the sum over the ranks. The size divides the dim."""
        ...


# ---- rank order ----------------------------------------------------------------------------------------------------

Combine = Callable[[Sequence[Tensor], Tensor], None]
HALF = (torch.bfloat16, torch.float16)


def add_parts(parts: Sequence[Tensor], out: Tensor) -> None:
    """Into `out`: the sum of two parts or more."""
    if len(parts) > 2 and out.dtype in HALF:
        total = parts[0].to(torch.float32)
        for part in parts[1:]:
            total.add_(part)
        out.copy_(total)
        return
    torch.add(parts[0], parts[1], out=out)  # of two halves: computed in float32, by torch
    for part in parts[2:]:
        out.add_(part)


def max_parts(parts: Sequence[Tensor], out: Tensor) -> None:
    """Into `out`: the elementwise maximum of two parts or more, NaN where one has NaN."""
    torch.maximum(parts[0], parts[1], out=out)
    for part in parts[2:]:
        torch.maximum(out, part, out=out)


# ---- over shared memory --------------------------------------------------------------------------------------------

PUBLISHED, REDUCED = range(2)  # flags
CALL_WORD = 1  # and 2: in the line of PUBLISHED, the calls of the blocks in both areas
ALL_REDUCE, ALL_REDUCE_MAX, ALL_GATHER, REDUCE_SCATTER = range(4)
CALL_NAMES = (Change.ALL_REDUCE, "all-reduce of maxima", Change.ALL_GATHER, Change.REDUCE_SCATTER)
MAX_CACHED_SHAPES = 64
# From here on each rank adds a slice for all. With two ranks that moves more bytes, whatever the size. Measured:
# `docs/measured-notes.md`, "Collectives of the tensor axis".
MIN_SLICED_BYTES = 2**21
MIN_SLICING_RANKS = 3
SLICE_ELEMENTS = 16  # slices begin at multiples: two ranks write no cache line in common


class _Blocks(NamedTuple):
    """The blocks of all ranks in one area, as tensors of one shape and dtype."""

    by_rank: list[Tensor]
    flat_by_rank: list[Tensor]
    dtype_and_bytes: int
    """The call without the collective."""


class MemoryTensorGroup:
    """See `TensorGroup`."""

    name = "shared memory"

    def __init__(self, regions: SharedRegions) -> None:
        self._regions, self.meter = regions, regions.meter
        self.index, self.size = regions.place.index, regions.place.size
        self._flag_words = [regions.word(index, PUBLISHED) for index in range(self.size)]
        self._peers = [index for index in range(self.size) if index != self.index]
        self._num_published = self._num_reduced = 0
        self._cached_blocks: dict[tuple[torch.Size, torch.dtype, int], _Blocks] = {}
        self._lent_address = 0
        """Of the buffer that was lent since the last collective, if one was."""
        self._is_busy = False

    def meet(self, call: str) -> None:
        pass  # `_wait_published` compares

    def buffer(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        assert not self._is_busy, "a collective has begun and not ended"
        own = self._blocks(torch.Size(shape), dtype).by_rank[self.index]
        self._lent_address = own.data_ptr()
        return own.detach()  # not the cached tensor: autograd may mark this one

    def num_chunks(self, num_bytes: int) -> int:
        return 1

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return self._reduce(self._publish(ALL_REDUCE, tensor), tensor, add_parts)

    def all_reduce_async(self, tensor: Tensor) -> Callable[[], Tensor]:
        blocks = self._publish(ALL_REDUCE, tensor)
        return lambda: self._reduce(blocks, tensor, add_parts)

    def all_reduce_max(self, tensor: Tensor) -> Tensor:
        return self._reduce(self._publish(ALL_REDUCE_MAX, tensor), tensor, max_parts)

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        blocks = self._publish(ALL_GATHER, tensor)
        self._wait_published(blocks)
        return self._end(torch.cat(blocks.by_rank, dim))

    def reduce_scatter(self, tensor: Tensor, dim: int) -> Tensor:
        length, rest = divmod(tensor.shape[dim], self.size)
        assert rest == 0, f"{self.size} ranks do not divide dim {dim} of {list(tensor.shape)}"
        blocks = self._publish(REDUCE_SCATTER, tensor)
        self._wait_published(blocks)
        slices = [block.narrow(dim, self.index * length, length) for block in blocks.by_rank]
        out = torch.empty(slices[0].shape, dtype=tensor.dtype)
        add_parts(slices, out)
        return self._end(out)

    # ---- blocks --------------------------------------------------------------------------------------

    def _publish(self, collective: int, tensor: Tensor) -> _Blocks:
        """Put this rank's block where all ranks read it; returns the blocks, which may not be read yet."""
        assert not self._is_busy, "a collective has begun and not ended"
        area, words, own = self._num_published % 2, self._regions.words, self._flag_words[self.index]
        blocks = self._blocks(tensor.shape, tensor.dtype)
        if tensor.numel() and not self._is_lent(tensor):
            blocks.by_rank[self.index].copy_(tensor.detach())
        self._lent_address, self._is_busy = 0, True
        words[own + CALL_WORD + area] = blocks.dtype_and_bytes * len(CALL_NAMES) + collective
        self._num_published += 1
        words[own] = self._num_published
        return blocks

    def _is_lent(self, tensor: Tensor) -> bool:
        """Whether a tensor is the buffer that this rank has been lent, and so is its block."""
        address = tensor.data_ptr()
        if address == self._lent_address:
            assert tensor.is_contiguous(), "the buffer that was lent, with other strides"
            return True
        assert not self._regions.contains(address), "a buffer that was lent before another collective, or a part of one"
        return False

    def _blocks(self, shape: torch.Size, dtype: torch.dtype) -> _Blocks:
        """The blocks of the next collective."""
        area = self._num_published % 2
        blocks = self._cached_blocks.get((shape, dtype, area))
        if blocks is None:
            if len(self._cached_blocks) >= MAX_CACHED_SHAPES:
                self._cached_blocks.clear()
            blocks = self._cached_blocks[shape, dtype, area] = self._view_blocks(shape, dtype, area)
        return blocks

    def _view_blocks(self, shape: torch.Size, dtype: torch.dtype, area: int) -> _Blocks:
        with torch.inference_mode(False):  # views made in it could not be written outside of it
            flat = [self._regions.view(index, area, shape.numel(), dtype) for index in range(self.size)]
            num_bytes = shape.numel() * dtype.itemsize
            return _Blocks([each.view(shape) for each in flat], flat, num_bytes * len(DTYPES) + DTYPES.index(dtype))

    def _wait_published(self, blocks: _Blocks) -> None:
        """Wait until all ranks have published. Raises DivergenceError if they did so for another call."""
        count, words = self._num_published, self._regions.words
        call_word = CALL_WORD + (count - 1) % 2
        call = words[self._flag_words[self.index] + call_word]
        for peer in self._peers:
            if words[self._flag_words[peer]] < count:
                self._regions.wait_flag(PUBLISHED, count, peer)
            other = words[self._flag_words[peer] + call_word]
            if other != call:
                self._raise_divergence(peer, other, call)

    def _raise_divergence(self, peer: int, other: int, call: int) -> None:
        ranks, self._is_busy = self._regions.place.ranks, False
        got = f"rank {ranks[peer]}: {_describe(other)}; rank {ranks[self.index]}: {_describe(call)}"
        need = "the same collectives, of the same sizes, in the same order, on all ranks of a tensor group"
        problem = Problem(got, need, "the same batch and the same code path on each")
        raise DivergenceError(problem, where="the tensor axis")

    def _end(self, out: Tensor) -> Tensor:
        self._is_busy = False
        return out

    # ---- sums ----------------------------------------------------------------------------------------

    def _reduce(self, blocks: _Blocks, tensor: Tensor, combine: Combine) -> Tensor:
        self._wait_published(blocks)
        is_private = tensor.is_contiguous() and not self._regions.contains(tensor.data_ptr())
        out = tensor.detach() if is_private else torch.empty(tensor.shape, dtype=tensor.dtype)
        if self.size >= MIN_SLICING_RANKS and tensor.nbytes >= MIN_SLICED_BYTES:
            self._reduce_slices(blocks.flat_by_rank, out.view(-1), combine)
        elif self.size == 2 and is_private:
            # Its own part lies in a nearer cache than its block, of which nothing has to be read then.
            combine([out if index == self.index else blocks.by_rank[index] for index in range(2)], out)
        else:
            combine(blocks.by_rank, out)
        return self._end(tensor if is_private else out)

    def _reduce_slices(self, blocks: Sequence[Tensor], out: Tensor, combine: Combine) -> None:
        """Combine this rank's slice of all blocks, then read the others' results."""
        length = -(-out.numel() // (self.size * SLICE_ELEMENTS)) * SLICE_ELEMENTS
        own = slice(self.index * length, (self.index + 1) * length)
        combine([block[own] for block in blocks], out[own])
        blocks[self.index][own] = out[own]
        self._num_reduced += 1
        self._regions.words[self._regions.word(self.index, REDUCED)] = self._num_reduced
        for hop in range(1, self.size):
            owner = (self.index + hop) % self.size
            self._regions.wait_flag(REDUCED, self._num_reduced, owner)
            theirs = slice(owner * length, (owner + 1) * length)
            out[theirs] = blocks[owner][theirs]


def _describe(call: int) -> str:
    dtype_and_bytes, collective = divmod(call, len(CALL_NAMES))
    num_bytes, dtype = divmod(dtype_and_bytes, len(DTYPES))
    return f"{CALL_NAMES[collective]} of {num_bytes} bytes ({DTYPES[dtype]})"


# ---- over messages -------------------------------------------------------------------------------------------------


# A chunk's latency must be small beside its transfer. Measured: `docs/measured-notes.md`, "Chunks of row products".
MIN_CHUNK_BYTES = 2**20
MAX_CHUNKS = 4


class MessageTensorGroup:
    """See `TensorGroup`. Made collectively by the ranks of `comm`, which are its ranks; without it, of one rank."""

    def __init__(
        self, meter: CommMeter, device: torch.device, comm: Communicator | None = None, purpose: str = ""
    ) -> None:
        self.meter, self._device, self._comm = meter, device, comm
        self.name, self.size, self.index = ("one rank", 1, 0) if comm is None else (comm.backend, comm.size, comm.rank)
        if comm is not None:
            self._group: Group = comm.get_group(range(comm.size), purpose)
        self._is_busy = False

    def meet(self, call: str) -> None:
        if self._comm is not None:
            compare_calls(self, self._comm, call)

    def buffer(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=self._device)

    def num_chunks(self, num_bytes: int) -> int:
        return 1 if self.size == 1 else max(1, min(MAX_CHUNKS, num_bytes // MIN_CHUNK_BYTES))

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return self.all_reduce_async(tensor)()

    def all_reduce_async(self, tensor: Tensor) -> Callable[[], Tensor]:
        if self.size == 1:
            return tensor.contiguous
        total = tensor.detach().contiguous()
        result = tensor if tensor.is_contiguous() else total
        if total.numel() == 0:
            return lambda: result
        flat = total.view(-1)
        if flat.dtype in HALF and self.size > 2 and flat.device.type == "cpu":
            return lambda: self._add_rounding_once(flat, result)
        wait = self._begin(Change.ALL_REDUCE, flat.nbytes, lambda: self._group.all_reduce(flat))

        def finish() -> Tensor:
            wait()
            return result

        return finish

    def all_reduce_max(self, tensor: Tensor) -> Tensor:
        if self.size == 1:
            return tensor.contiguous()
        parts = self._gather(tensor)
        out = torch.empty_like(parts[0])
        max_parts(parts.unbind(), out)
        return out

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        if self.size == 1:
            return tensor.contiguous()
        parts = self._gather(tensor)
        return torch.cat(list(parts.unbind()), dim) if dim % tensor.ndim else parts.flatten(0, 1)

    def reduce_scatter(self, tensor: Tensor, dim: int) -> Tensor:
        if self.size == 1:
            return tensor.contiguous()
        assert tensor.shape[dim] % self.size == 0, f"{self.size} ranks do not divide dim {dim} of {list(tensor.shape)}"
        parts = torch.stack(tensor.detach().chunk(self.size, dim))
        out = torch.empty_like(parts[0])
        self._reduce_scatter(parts.view(-1), out.view(-1))
        return out

    # ---- messages ------------------------------------------------------------------------------------

    def _gather(self, tensor: Tensor) -> Tensor:
        """[size, *tensor.shape]"""
        shard = tensor.detach().contiguous().view(-1)
        gathered = shard.new_empty(self.size * shard.numel())
        if shard.numel():
            self._begin(Change.ALL_GATHER, gathered.nbytes, lambda: self._group.all_gather(gathered, shard))()
        return gathered.view(self.size, *tensor.shape)

    def _reduce_scatter(self, flat: Tensor, out: Tensor) -> None:
        """Into `out`: this rank's part of the sum of `flat`."""
        if flat.numel() == 0:
            return
        if flat.device.type == "cuda":
            self._begin(Change.REDUCE_SCATTER, flat.nbytes, lambda: self._group.reduce_scatter(out, flat))()
            return
        received = torch.empty_like(flat)
        self._begin(Change.REDUCE_SCATTER, flat.nbytes, lambda: self._group.all_to_all(received, flat))()
        add_parts(received.view(self.size, -1).unbind(), out)

    def _add_rounding_once(self, flat: Tensor, result: Tensor) -> Tensor:
        length = -(-flat.numel() // self.size)
        padded = torch.nn.functional.pad(flat, (0, self.size * length - flat.numel()))
        own = flat.new_empty(length)
        self._reduce_scatter(padded, own)
        flat.copy_(self._gather(own).view(-1)[: flat.numel()])
        return result

    def _begin(self, collective: Change, whole_bytes: int, begin: Callable[[], Work]) -> Callable[[], None]:
        """Begin a collective; the returned function waits for it. `whole_bytes`: of a whole tensor, as in a layout."""
        assert not self._is_busy, "a collective has begun and not ended"
        self._is_busy = True
        self.meter.sent_bytes += collective_sent_bytes(collective, whole_bytes=whole_bytes, size=self.size)
        end_span = self.meter.recorder.sending(collective)
        work = begin()

        def wait() -> None:
            with self.meter.timed():
                work.wait()
            self._is_busy = False
            end_span()

        return wait


# ---- which one -----------------------------------------------------------------------------------------------------


def make_tensor_group(comm: Communicator, purpose: str, meter: CommMeter, *, choice: str = "auto") -> TensorGroup:
    """The group of all ranks of `comm`, which lie along the tensor axis. Collective.

    `choice` is the plan's transport. Raises PlanError if the plan asks for a transport that cannot be had.
    """
    regions = choose_regions(comm, [range(comm.size)], meter, choice=choice)
    if regions is not None:
        return MemoryTensorGroup(regions)
    return MessageTensorGroup(meter, comm.device, comm if comm.size > 1 else None, purpose)


# ---- checked -------------------------------------------------------------------------------------------------------

FINISHED, FAILED = -1, -2


class CallMismatch(Exception):
    """The ranks of a group are in different calls, or one of them has failed."""


class CheckedTensorGroup:
    """See `TensorGroup`: the same collectives, checked. `device`: where the ranks' calls are compared."""

    def __init__(self, group: TensorGroup, device: torch.device) -> None:
        self._group, self._device = group, device
        self.name, self.size, self.index, self.meter = group.name, group.size, group.index, group.meter
        self._is_over = False

    def meet(self, call: str) -> None:
        self.agree(call)

    def num_chunks(self, num_bytes: int) -> int:
        return self._group.num_chunks(num_bytes)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        self.agree(_call("all_reduce", tensor))
        return self._group.all_reduce(tensor)

    def buffer(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        # Of its own: comparing the calls is a collective that comes before the one that would read it.
        return torch.empty(tuple(shape), dtype=dtype, device=self._device)

    def all_reduce_async(self, tensor: Tensor) -> Callable[[], Tensor]:
        self.agree(_call("all_reduce", tensor))
        return self._group.all_reduce_async(tensor)

    def all_reduce_max(self, tensor: Tensor) -> Tensor:
        self.agree(_call("all_reduce_max", tensor))
        return self._group.all_reduce_max(tensor)

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        self.agree(_call(f"all_gather {dim}", tensor))
        return self._group.all_gather(tensor, dim)

    def reduce_scatter(self, tensor: Tensor, dim: int) -> Tensor:
        self.agree(_call(f"reduce_scatter {dim}", tensor))
        return self._group.reduce_scatter(tensor, dim)

    def agree(self, call: str) -> None:
        """Begin a call. Collective. Raises CallMismatch if another rank begins a different one."""
        self._compare(zlib.crc32(call.encode()))

    def finish(self, *, has_failed: bool) -> None:
        """End the calls of this rank, once. Collective. Raises CallMismatch if another rank is not at its end."""
        if not self._is_over:
            self._compare(FAILED if has_failed else FINISHED)
            self._is_over = True

    def _compare(self, code: int) -> None:
        if self._is_over:  # Other ranks have left: nobody would answer.
            raise CallMismatch
        codes = self._group.all_gather(torch.tensor([code], device=self._device), 0).tolist()
        if len(set(codes)) > 1:
            self._is_over = True
            raise CallMismatch


def _call(kind: str, tensor: Tensor) -> str:
    return f"{kind} {list(tensor.shape)} {tensor.dtype}"


# ---- call check ----------------------------------------------------------------------------------------------------

NO_DIGEST = 0

CALL_ROW = 2  # elements: of the call and of the batch


def compare_calls(group: TensorGroup, ranks: Communicator, call: str, digest: int = NO_DIGEST) -> list[int]:
    """The digests of all ranks. Collective. Raises DivergenceError if they are in different calls.

    ranks  those of the group
    """
    return _compare_rows(group.all_gather(_row(ranks, call, digest)[None], 0), ranks, call)


def compare_calls_of_stages(rows: Channel, ranks: Communicator, call: str, digest: int) -> list[int]:
    """The same of the ranks that have the stages of one model. `rows`: their exchange."""
    return _compare_rows(torch.stack(list(rows.all_gather_rows(_row(ranks, call, digest)))), ranks, call)


def _row(ranks: Communicator, call: str, digest: int) -> Tensor:
    """int64 [CALL_ROW]"""
    return torch.tensor([zlib.crc32(call.encode()), digest], device=ranks.device)


def _compare_rows(rows: Tensor, ranks: Communicator, call: str) -> list[int]:
    """The digests in the rows [rank, 2]. Raises DivergenceError, for which ranks in different calls tell these."""
    calls, digests = rows.T.tolist()
    if len(set(calls)) > 1:
        raise divergence_error(dict(zip(ranks.ranks, ranks.all_gather_json(call), strict=True)))
    return digests
