"""Host memory: what the ranks of one host map together: where things lie in it, its flags, and waits for these.

region   one rank's part of the mapping: its flags, calls, scalars and gradient buffers, as far as they are asked for
flag     an int64 that only grows and that only its owner writes, in a cache line of its own
count    a flag's value: how many times its owner has done what the flag stands for
buffer   room for a bucket's gradients; buckets with the same buffer index share one
staging  buffers through which split weights come from other hosts
Law: every rank raises a flag for the same events in the same order, so equal counts mean the same event.
Law: no wait outlasts the rank it waits for: it raises PeerError if that rank dies, DivergenceError if it is in
another call.

Plain stores of a flag become visible after the data written before it on x86-64 (total store order). Elsewhere this
transport is not used.
"""

import mmap
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fourfold.axes.data.rules.unshard_order import NUM_STAGING_BUFFERS
from fourfold.comm.meter import CommMeter
from fourfold.comm.polling import wait_until
from fourfold.comm.shared_regions import ALIGNMENT_BYTES, FLAG_STRIDE, TIME_LIMIT_SECONDS, GroupPlace
from fourfold.words.errors import PeerError

# ---- where things lie ----------------------------------------------------------------------------------------------

(
    GRADS_READY,
    REDUCED,
    SCALED,
    BACKWARD_DONE,
    WEIGHTS_READY,
    STEP_ENDED,
    CALL_BEGUN,
    STAGED,
    COPIED,
    SCALARS_READY,
) = range(10)
NUM_SCALAR_KINDS = 5  # room for those of `words.program`
NUM_FLAGS = SCALARS_READY + NUM_SCALAR_KINDS


class SharedMemoryLayout:
    """A region per rank: flags, calls, scalars, gradient buffers; behind all regions weights or staging buffers.

    board_bytes     where ranks compare their calls: what they take
    weight_dtypes   dtypes of the buckets' weights if they exist once per host, else empty
    staging_dtypes  dtypes of the buckets' weights if they rest split between hosts, else empty
    """

    def __init__(
        self,
        sizes: Sequence[int] = (),
        dtypes: Sequence[torch.dtype] = (),
        *,
        num_scalars: int = 0,
        board_bytes: int = 0,
        buffer_indices: Sequence[int] | None = None,
        weight_dtypes: Sequence[torch.dtype] = (),
        staging_dtypes: Sequence[torch.dtype] = (),
    ) -> None:
        self.sizes, self.dtypes, self.num_scalars = tuple(sizes), tuple(dtypes), num_scalars
        self.weight_dtypes = tuple(weight_dtypes)
        self.buffer_indices = tuple(buffer_indices if buffer_indices is not None else range(len(sizes)))
        self.board_offset = 8 * FLAG_STRIDE * NUM_FLAGS
        self.scalars_offset = _align(self.board_offset + board_bytes)
        # Two copies of the scalars, used alternately: no rank is ever two all-reduces ahead of another.
        offset = self.scalars_offset + _align(8 * num_scalars * NUM_SCALAR_KINDS * 2)
        lengths = _aligned_bytes(self.sizes, self.dtypes)
        starts = {}
        for index in dict.fromkeys(self.buffer_indices):
            starts[index] = offset
            offset += max(length for length, each in zip(lengths, self.buffer_indices, strict=True) if each == index)
        self.buffer_offsets = [starts[index] for index in self.buffer_indices]
        self.region_bytes = offset
        lengths = _aligned_bytes(self.sizes, self.weight_dtypes) if weight_dtypes else []
        self.weights_bytes = sum(lengths)
        self.weight_offsets = [sum(lengths[:bucket]) for bucket in range(len(lengths))]
        self.staging_bytes = max(_aligned_bytes(self.sizes, staging_dtypes)) if staging_dtypes else 0

    def total_bytes(self, size: int) -> int:
        """Bytes of the mapping for `size` ranks."""
        return size * self.region_bytes + self.weights_bytes + NUM_STAGING_BUFFERS * self.staging_bytes


def _aligned_bytes(sizes: Sequence[int], dtypes: Sequence[torch.dtype]) -> list[int]:
    return [_align(size * dtype.itemsize) for size, dtype in zip(sizes, dtypes, strict=True)]


def _align(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


# ---- the memory, as one rank sees it -------------------------------------------------------------------------------


class HostMemory:
    """This rank's flags and waits, and tensors in the mapping.

    check_peers                  called now and then while this rank waits: raises PeerError if a rank has died
    check_calls(seconds waited)  as often: raises DivergenceError if ranks are known to
                                 be in different calls; None: whatever late ranks may still begin
    """

    def __init__(
        self,
        mapping: mmap.mmap,
        layout: SharedMemoryLayout,
        place: GroupPlace,
        meter: CommMeter,
        *,
        check_peers: Callable[[], None],
        check_calls: Callable[[float | None], None] = lambda _: None,
        time_limit_seconds: float = TIME_LIMIT_SECONDS,
    ) -> None:
        self.mapping, self.layout, self.meter = mapping, layout, meter
        self.index, self.ranks, self.size = place.index, place.ranks, place.size
        self.check_calls, self._check_peers, self._time_limit_seconds = check_calls, check_peers, time_limit_seconds
        self._words = memoryview(mapping).cast("B").cast("q")
        region_words = layout.region_bytes // 8
        self._starts = range(0, self.size * region_words, region_words)
        """By rank: the first word of its region."""
        self.counts = [0] * NUM_FLAGS
        """This rank's own counts."""

    # ---- flags ---------------------------------------------------------------------------------------

    def increment(self, flag: int) -> None:
        """Raise this rank's flag by one: what the flag stands for is done."""
        self.counts[flag] += 1
        self._words[self._starts[self.index] + flag * FLAG_STRIDE] = self.counts[flag]

    def read_all(self, flag: int) -> list[int]:
        """The flag's counts, one per rank of the host."""
        words, offset = self._words, flag * FLAG_STRIDE
        return [words[start + offset] for start in self._starts]

    def min(self, flag: int) -> int:
        """How far the slowest rank is."""
        words, offset = self._words, flag * FLAG_STRIDE
        return min([words[start + offset] for start in self._starts])

    def wait(self, flag: int, count: int) -> None:
        """Wait until every rank's flag has reached `count`."""

        def check(waited_seconds: float) -> None:
            self._check(flag, count, waited_seconds)

        wait_until(lambda: self.min(flag) >= count, check, self.meter)

    def wait_own(self, flag: int) -> None:
        """Wait until every rank has raised the flag as often as this one."""
        self.wait(flag, self.counts[flag])

    def _check(self, flag: int, count: int, waited_seconds: float) -> None:
        self.check_calls(waited_seconds)
        try:
            self._check_peers()
            if waited_seconds > self._time_limit_seconds:
                reached = zip(self.ranks, self.read_all(flag), strict=True)
                late = ", ".join(str(rank) for rank, value in reached if value < count)
                raise PeerError(f"rank {late} did not arrive within {self._time_limit_seconds:.0f} s")
        except PeerError:
            self.check_calls(None)  # The peer may have died because ranks diverged: then report the divergence.
            raise

    # ---- tensors -------------------------------------------------------------------------------------

    def grad_buffers(self, region: int) -> list[Tensor]:
        """A rank's gradient buffer of each bucket."""
        layout = self.layout
        return self._views(layout.dtypes, layout.buffer_offsets, region * layout.region_bytes)

    def weights(self) -> list[Tensor]:
        """The weights of each bucket."""
        return self._views(self.layout.weight_dtypes, self.layout.weight_offsets, self._behind_regions)

    def staging_buffers(self) -> list[Tensor]:
        """The bytes of each staging buffer."""
        length, start = self.layout.staging_bytes, self._behind_regions
        starts = [start + number * length for number in range(NUM_STAGING_BUFFERS)]
        return [torch.frombuffer(self.mapping, dtype=torch.uint8, count=length, offset=each) for each in starts]

    def scalars(self, region: int) -> Tensor:
        """A rank's scalars: float64 [kind, parity, scalar]"""
        shape = torch.Size((NUM_SCALAR_KINDS, 2, self.layout.num_scalars))
        offset = region * self.layout.region_bytes + self.layout.scalars_offset
        flat = torch.frombuffer(self.mapping, dtype=torch.float64, count=shape.numel(), offset=offset)
        return flat.view(shape)

    @property
    def _behind_regions(self) -> int:
        return self.size * self.layout.region_bytes

    def _views(self, dtypes: Sequence[torch.dtype], offsets: Sequence[int], start: int) -> list[Tensor]:
        return [
            torch.frombuffer(self.mapping, dtype=dtype, count=size, offset=start + offset)
            for size, dtype, offset in zip(self.layout.sizes, dtypes, offsets, strict=True)
        ]
