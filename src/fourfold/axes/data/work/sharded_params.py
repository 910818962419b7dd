"""Sharded parameters: weights that rest split are all-gathered before use and resharded after it (ZeRO-3).

shard        this rank's part of a bucket, where it rests and is updated
buffer       memory that a whole bucket is gathered into; it is reused when no tensor in it is alive any more
unsharded    a bucket that is in a buffer: its parameters are views of it. Those of all other buckets are placeholders
placeholder  a NaN in the parameter's shape: an access that was missed gives NaN, not a plausible number
saved view   what autograd keeps of a weight instead of a tensor: bucket, offset, sizes, strides
Law: what a view shows never changes while a tensor refers to it, and every rank issues the same all-gathers. A buffer
that a tensor of autograd or of the user uses is never written; resharding only lets go of it.

`axes/data/rules/unshard_order.py` decides which bucket is gathered when.
"""

import contextlib
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from fourfold.axes.data.rules.buckets import Bucket
from fourfold.axes.data.rules.unshard_order import MAX_UNSHARDED, MissingBucket, UnshardOrder
from fourfold.comm.rank_layout import RankLayout
from fourfold.comm.reduce.protocol import BucketSlice, WeightUnsharder
from fourfold.torch_kit import memory
from fourfold.torch_kit.mixed_precision import bucket_dtype
from fourfold.torch_kit.param_access import ParamAccess, explain_transform_errors, outside_transforms
from fourfold.torch_kit.torch_private import has_memory, version_of
from fourfold.words.errors import Problem, TrainingError

# ---- unsharded buckets ---------------------------------------------------------------------------------------------


class UnshardedBuckets:
    """The buffers of unsharded buckets, the bucket used longest ago first."""

    def __init__(self, parameters: Sequence[Sequence[nn.Parameter]], buckets: Sequence[Bucket]) -> None:
        """`parameters` are by bucket and slot; they are left alone until a bucket is stored or resharded."""
        self._parameters, self._buckets = parameters, buckets
        self.device = parameters[0][0].device if parameters else torch.device("cpu")
        # Not the parameters' dtypes: with a precision those are the user's until the parameters are sharded.
        dtypes = [bucket_dtype(bucket) for bucket in buckets]
        self._placeholders = [torch.full((), float("nan"), dtype=dtype, device=self.device) for dtype in dtypes]
        self.buffers: OrderedDict[int, Tensor] = OrderedDict()
        self._bucket_of_address: dict[int, int] = {}  # of its buffer

    def mark_used(self, bucket: int) -> None:
        """The bucket is the last one used."""
        self.buffers.move_to_end(bucket)

    def bucket_of(self, tensor: Tensor) -> int | None:
        """The bucket in whose buffer a tensor lies."""
        return self._bucket_of_address.get(tensor.untyped_storage().data_ptr()) if has_memory(tensor) else None

    def store(self, bucket: int, buffer: Tensor) -> None:
        """A bucket is whole in this buffer: make its parameters views of it."""
        self.reshard(bucket)
        self.buffers[bucket] = buffer
        self._bucket_of_address[buffer.data_ptr()] = bucket
        self.use_views(bucket, buffer)

    def reshard(self, bucket: int) -> None:
        """Replace the bucket's parameters by placeholders. Autograd or the user may keep tensors in its buffer."""
        buffer = self.buffers.pop(bucket, None)
        if buffer is not None:
            del self._bucket_of_address[buffer.data_ptr()]
            self.use_placeholders(bucket)

    def use_views(self, bucket: int, flat: Tensor) -> None:
        """Make the bucket's parameters views of a flat."""
        with outside_transforms(self.device.type):
            for slot, parameter in zip(self._buckets[bucket].slots, self._parameters[bucket], strict=True):
                parameter.data = flat[slot.start : slot.stop].view(parameter.shape)

    def use_placeholders(self, bucket: int) -> None:
        """Make the bucket's parameters placeholders."""
        with outside_transforms(self.device.type):
            for parameter in self._parameters[bucket]:
                parameter.data = self._placeholders[bucket].expand(parameter.shape)


# ---- sharded parameters --------------------------------------------------------------------------------------------


NONE_MISSING = -1


class _PendingUnshard(NamedTuple):
    """An all-gather that has begun; `wait` returns when it has ended."""

    bucket: int
    buffer: Tensor
    wait: Callable[[], None]


class _SavedParamView(NamedTuple):
    """A view of a bucket's buffer, in elements, and the version of its weights."""

    bucket: int
    offset: int
    size: torch.Size
    stride: tuple[int, ...]
    version: int


class SavedTensor(NamedTuple):
    """Any other tensor that autograd saves, and its version."""

    tensor: Tensor
    version: int


class UnshardSink(Protocol):
    """Called before this rank's shard of a bucket is read in a phase."""

    def before_unshard(self, bucket: int) -> None: ...


class _NoSink:
    def before_unshard(self, bucket: int) -> None:
        pass


NO_UNSHARD_SINK: UnshardSink = _NoSink()


@dataclass
class _Phase:
    """A phase, and this rank's place in it. `indices`: of the program's unshards that have not begun, by bucket."""

    order: UnshardOrder
    sink: UnshardSink
    indices: Mapping[int, deque[int]]
    pending: deque[_PendingUnshard] = field(default_factory=deque)

    def next_index(self, bucket: int) -> int | None:
        """The index of the bucket's next unshard in the program; None if the program has none."""
        return self.indices[bucket].popleft() if self.indices.get(bucket) else None


class ShardedParams:
    """The weights of a step, at rest in shards."""

    def __init__(
        self,
        parameters: Sequence[Sequence[nn.Parameter]],
        buckets: Sequence[Bucket],
        layout: RankLayout,
        gatherer: WeightUnsharder,
    ) -> None:
        """`parameters` are by bucket and slot. Their weights stay where they are until `shard_params`."""
        self._parameters, self._buckets = parameters, buckets
        self._gatherer = gatherer
        self._unsharded = UnshardedBuckets(parameters, buckets)
        self.shards = [
            BucketSlice(start, stop, memory.allocate_private(stop - start, bucket_dtype(bucket), self._device))
            for bucket, (start, stop) in zip(buckets, layout.bucket_ranges, strict=True)
        ]
        self.buffer_pool = memory.BufferPool()
        self.unshard_orders: dict[tuple[str, int], UnshardOrder] = {}
        """By kind of phase and stage: the all-gathers of its last phase."""
        self._planned: list[tuple[int, int]] = []
        """Bucket and index of the unshards that the program has for the next phase, in order."""
        self.num_out_of_turn = 0
        """How many unshards phases have made that the program did not have, where it had others."""
        self._phase: _Phase | None = None
        self._param_access = ParamAccess(parameters)
        self._operation_index, self._needed_buckets = 0, set[int]()

    @property
    def _device(self) -> torch.device:
        return self._unsharded.device

    # ---- shards -------------------------------------------------------------------------------------

    @torch.no_grad()
    def shard_params(self, broadcast: Callable[[Tensor], None]) -> None:
        """Shard the parameters, a bucket at a time: copy each into its shard. `broadcast` may change a flat first."""
        self._param_access.sink = None
        for bucket in self._buckets:
            flat = torch.zeros(bucket.size, dtype=self.shards[bucket.index].flat.dtype, device=self._device)
            for slot, parameter in zip(bucket.slots, self._parameters[bucket.index], strict=True):
                flat[slot.start : slot.stop] = parameter.data.flatten()
            broadcast(flat)
            start, stop, shard = self.shards[bucket.index]
            shard.copy_(flat[start:stop])
            self._unsharded.use_placeholders(bucket.index)
        self._param_access.sink = self

    def unsharded_buckets(self) -> Iterator[tuple[Bucket, Tensor]]:
        """Every bucket with all of its weights, one after the other. Collective: every rank iterates to the end."""
        for bucket in self._buckets:
            pending = self._unshard_async(bucket.index)
            pending.wait()
            yield bucket, pending.buffer

    @contextlib.contextmanager
    def all_unsharded(self) -> Iterator[None]:
        """Context manager: all parameters are whole, in this rank's memory. Collective.

        Changes are lost unless `shard_params` is called within.
        """
        for bucket, buffer in self.unsharded_buckets():
            self._unsharded.use_views(bucket.index, buffer)
        self._param_access.sink = None
        try:
            yield
        finally:
            for bucket in self._buckets:
                self._unsharded.use_placeholders(bucket.index)
            self._param_access.sink = self

    # ---- phases -------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def phase(self, kind: str, stage: int = 0, sink: UnshardSink = NO_UNSHARD_SINK) -> Iterator[None]:
        """Context manager: weights are unsharded when they are used. Collective: every rank has the same phases.

        Buckets are unsharded in the order that the program has planned, else as the stage's last phase of this `kind`.
        `sink` is called before this rank's shards are read.
        """
        self._phase = self._begin_phase(kind, stage, sink)
        try:
            self._prefetch(self._phase)
            with explain_transform_errors(), torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
                yield
            self._finish_phase(self._phase)
        finally:
            self._phase = None
            for bucket in list(self._unsharded.buffers):
                self._unsharded.reshard(bucket)

    def plan_unshard(self, bucket: int, index: int) -> None:
        """The next phase unshards this bucket, after those that are planned already. `index`: in the program."""
        self._planned.append((bucket, index))

    def _begin_phase(self, kind: str, stage: int, sink: UnshardSink) -> _Phase:
        order = self.unshard_orders.setdefault((kind, stage), UnshardOrder())
        indices: dict[int, deque[int]] = {}
        if self._planned:
            order.buckets = [bucket for bucket, _ in self._planned]
            for bucket, index in self._planned:
                indices.setdefault(bucket, deque()).append(index)
            self._planned = []
        order.begin_phase()
        return _Phase(order, sink, indices)

    def _finish_phase(self, phase: _Phase) -> None:
        """Take part in the other ranks' all-gathers until no rank misses a bucket any more."""
        self._join_remaining_unshards(phase)
        while self._exchange_missing(phase, MissingBucket(NONE_MISSING, NONE_MISSING)):
            pass

    def before_access(self, bucket: int) -> None:
        """An operation is about to read weights of the bucket. If it reads several, there is a call for each."""
        if self._phase is None:
            got = "a weight used between steps: it is stored split, and the parameter is a placeholder"
            attempt = "step.unsharded() to call the model, step.named_weights() to copy, step.edit() to change it"
            raise TrainingError(Problem(got, "the whole weight", attempt))
        if self._param_access.operation_index != self._operation_index:
            self._operation_index = self._param_access.operation_index
            self._needed_buckets = set()
        self._needed_buckets.add(bucket)
        self.ensure_unsharded(bucket)

    def ensure_unsharded(self, bucket: int) -> None:
        """Unshard a bucket and keep the others that the current operation needs."""
        phase = self._phase
        assert phase is not None
        missed = bucket not in self._unsharded.buffers
        if missed:
            with outside_transforms(self._device.type):  # transforms of torch.func refuse writes into other tensors
                self._unshard_missing(phase, bucket)
        self._unsharded.mark_used(bucket)
        phase.order.mark_used(bucket)
        if missed:
            for other in [b for b in self._unsharded.buffers if b not in self._needed_buckets][
                : max(0, len(self._unsharded.buffers) - MAX_UNSHARDED)
            ]:
                self._unsharded.reshard(other)
            with outside_transforms(self._device.type):
                self._prefetch(phase)

    def _unshard_missing(self, phase: _Phase, bucket: int) -> None:
        order, pending = phase.order, phase.pending
        if any(each.bucket == bucket for each in pending) or order.is_pending(bucket):
            while bucket not in self._unsharded.buffers:
                self._prefetch(phase)
                each = pending.popleft()
                each.wait()
                self._unsharded.store(each.bucket, each.buffer)
            return
        self._join_remaining_unshards(phase)
        while bucket not in self._unsharded.buffers:
            self._exchange_missing(phase, order.missing_bucket(bucket), wanted=bucket)

    def _join_remaining_unshards(self, phase: _Phase) -> None:
        """Take part in the remaining all-gathers of the order, and keep no result."""
        while phase.pending or not phase.order.has_ended:
            self._prefetch(phase)
            phase.pending.popleft().wait()

    def _exchange_missing(self, phase: _Phase, missing: MissingBucket, *, wanted: int = NONE_MISSING) -> bool:
        """Exchange miss reports, and take part in the all-gathers of all buckets that ranks miss; keep only `wanted`.

        Returns whether any rank missed a bucket. Collective.
        """
        reports = [MissingBucket(*row) for row in self._gatherer.all_gather_ints(missing)]
        missed = phase.order.insert_missing([each for each in reports if each.bucket != NONE_MISSING])
        for bucket in missed:
            phase.sink.before_unshard(bucket)
            pending = self._unshard_async(bucket)
            pending.wait()
            if bucket == wanted:
                self._unsharded.store(pending.bucket, pending.buffer)
        self.num_out_of_turn += len(missed) if phase.indices else 0
        return bool(missed)

    def _prefetch(self, phase: _Phase) -> None:
        """Begin the next all-gather of the order, if none is pending."""
        if phase.pending or phase.order.has_ended:
            return
        bucket = phase.order.next_bucket()
        phase.sink.before_unshard(bucket)
        phase.pending.append(self._unshard_async(bucket, phase.next_index(bucket)))

    def _unshard_async(self, bucket: int, index: int | None = None) -> _PendingUnshard:
        """`index`: in the program; None: of a gather that is not in it."""
        shard = self.shards[bucket].flat
        buffer = self.buffer_pool.acquire(self._buckets[bucket].size, shard.dtype, shard.device)
        return _PendingUnshard(bucket, buffer, self._gatherer.unshard_async(bucket, shard, buffer, index))

    # ---- what autograd saves ------------------------------------------------------------------------

    def _pack(self, tensor: Tensor) -> _SavedParamView | SavedTensor:
        bucket = self._unsharded.bucket_of(tensor)
        if (
            bucket is None
            or tensor.dtype != self._unsharded.buffers[bucket].dtype
            or tensor.is_conj()
            or tensor.is_neg()
        ):
            return SavedTensor(tensor, version_of(tensor))
        return _SavedParamView(
            bucket, int(tensor.storage_offset()), tensor.size(), tensor.stride(), self._weight_version(bucket)
        )

    def _unpack(self, saved: _SavedParamView | SavedTensor) -> Tensor:
        now = version_of(saved.tensor) if isinstance(saved, SavedTensor) else self._weight_version(saved.bucket)
        if now != saved.version:
            # Autograd checks this itself, but not for tensors that hooks have packed.
            what = "one of the tensors" if isinstance(saved, SavedTensor) else "a weight"
            got = (
                f"{what} that backward needs has changed since forward (version {saved.version} in forward, {now} now)"
            )
            raise TrainingError(Problem(got, "the values that forward computed with"), where="backward")
        if isinstance(saved, SavedTensor):
            return saved.tensor
        if self._phase is None:
            got = "a backward outside of a step, through weights that are stored split"
            raise TrainingError(Problem(got, "backward inside the step, or weights that are stored whole", "zero = 2"))
        with outside_transforms(self._device.type):
            self._needed_buckets = {saved.bucket}
            self.ensure_unsharded(saved.bucket)
            return self._unsharded.buffers[saved.bucket].as_strided(saved.size, saved.stride, saved.offset)

    def _weight_version(self, bucket: int) -> int:
        return version_of(self._parameters[bucket][0])
