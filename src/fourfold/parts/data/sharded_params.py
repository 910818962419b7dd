"""Sharded parameters: weights that rest split are all-gathered before use and resharded after it (ZeRO-3).

shard        this rank's part of a bucket, where it rests and is updated
buffer       memory that a whole bucket is gathered into; it is reused when no tensor in it is alive any more
unsharded    a bucket that is in a buffer: its parameters are views of it. Those of all other buckets are placeholders
placeholder  a NaN in the parameter's shape: an access that was missed gives NaN, not a plausible number
saved view   what autograd keeps of a weight instead of a tensor: bucket, offset, sizes, strides
Law: what a view shows never changes while a tensor refers to it, and every rank issues the same all-gathers.

`plan/unshard_order.py` decides which bucket is gathered when.
"""

import contextlib
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fourfold.parts import memory
from fourfold.parts.comm.reduce.protocol import BucketSlice, DataTransport
from fourfold.parts.data.param_access import ParamAccess, explain_transform_errors, outside_transforms
from fourfold.parts.dtypes import bucket_dtype
from fourfold.parts.torch_private import version_of
from fourfold.plan.data.buckets import Bucket
from fourfold.plan.unshard_order import MAX_UNSHARDED, MissingBucket, UnshardOrder
from fourfold.words.errors import Problem, TrainingError
from fourfold.words.noop import noop

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


class ShardedParams:
    """The weights of a step, at rest in shards."""

    def __init__(
        self, parameters: Sequence[Sequence[nn.Parameter]], buckets: Sequence[Bucket], transport: DataTransport
    ) -> None:
        """`parameters` are by bucket and slot. Their weights stay where they are until `shard_params`."""
        self._parameters, self._buckets, self._gatherer = parameters, buckets, transport.weights
        self._device = parameters[0][0].device
        ranges = [transport.grads.grad_shard(bucket.index) for bucket in buckets]
        # Not the parameters' dtypes: with a precision those are the user's until `shard_params`.
        dtypes = [bucket_dtype(bucket) for bucket in buckets]
        self.shards = [
            BucketSlice(start, stop, memory.allocate_private(stop - start, dtype, self._device))
            for (start, stop, _), dtype in zip(ranges, dtypes, strict=True)
        ]
        self._shard_ranges = {
            slot.name: (bucket.index, slot.start, max(shard.start, slot.start), min(shard.stop, slot.stop))
            for bucket, shard in zip(buckets, self.shards, strict=True)
            for slot in bucket.slots
        }
        self._placeholders = [torch.full((), float("nan"), dtype=dtype, device=self._device) for dtype in dtypes]
        self.buffer_pool = memory.BufferPool()
        self._unshard_orders: dict[str, UnshardOrder] = {}
        self._unshard_order: UnshardOrder | None = None
        self._pending: deque[_PendingUnshard] = deque()
        self._unsharded: OrderedDict[int, Tensor] = OrderedDict()
        self._bucket_of_address: dict[int, int] = {}  # of its buffer
        self.before_unshard: Callable[[int], None] = noop
        """Called before this rank's shard of a bucket is read."""
        self._param_access = ParamAccess(parameters, self._on_param_access)
        self._operation_index, self._needed_buckets = 0, set[int]()

    # ---- shards -------------------------------------------------------------------------------------

    @torch.no_grad()
    def shard_params(self, broadcast: Callable[[Tensor], None]) -> None:
        """Shard the parameters, a bucket at a time: copy each into its shard. `broadcast` may change a flat first."""
        self._param_access.is_enabled = False
        for bucket in self._buckets:
            flat = torch.zeros(bucket.size, dtype=self.shards[bucket.index].flat.dtype, device=self._device)
            for slot, parameter in zip(bucket.slots, self._parameters[bucket.index], strict=True):
                flat[slot.start : slot.stop] = parameter.data.flatten()
            broadcast(flat)
            start, stop, shard = self.shards[bucket.index]
            shard.copy_(flat[start:stop])
            self._use_placeholders(bucket.index)
        self._param_access.is_enabled = True

    @torch.no_grad()
    def load_weights(self, values: Mapping[str, Tensor]) -> None:
        """Replace this rank's shards of weights, given the full weights by name."""
        for name, value in values.items():
            _, slot_start, low, high = self._shard_ranges[name]
            if low < high:
                self.local_shard(name).copy_(value.detach().flatten()[low - slot_start : high - slot_start])

    def local_shard(self, name: str) -> Tensor:
        """This rank's shard of a parameter, no copy; may be empty."""
        bucket, _, low, high = self._shard_ranges[name]
        start, _, flat = self.shards[bucket]
        return flat[low - start : max(low, high) - start]

    @torch.no_grad()
    def pad_to_full(self, name: str, shard: Tensor, parameter: Tensor) -> Tensor:
        """A copy of a shard, padded with zeros to the full size [elements]: its sum over ranks is the parameter."""
        _, slot_start, low, high = self._shard_ranges[name]
        full = torch.zeros(parameter.numel(), dtype=shard.dtype, device=parameter.device)
        if low < high:
            full[low - slot_start : high - slot_start] = shard
        return full

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
            self._use_unsharded_views(bucket.index, buffer)
        self._param_access.is_enabled = False
        try:
            yield
        finally:
            for bucket in self._buckets:
                self._use_placeholders(bucket.index)
            self._param_access.is_enabled = True

    # ---- phases -------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def phase(self, kind: str) -> Iterator[None]:
        """Context manager: weights are unsharded when they are used. Collective: every rank has the same phases.

        `kind`: phases of one kind have one order of all-gathers.
        """
        self._unshard_order = self._unshard_orders.setdefault(kind, UnshardOrder())
        self._unshard_order.begin_phase()
        try:
            self._prefetch()
            with explain_transform_errors(), torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
                yield
            self._finish_phase()
        finally:
            self._unshard_order = None
            self._pending.clear()
            for bucket in list(self._unsharded):
                self.reshard(bucket)

    def _finish_phase(self) -> None:
        """Take part in the other ranks' all-gathers until no rank misses a bucket any more."""
        self._join_remaining_unshards()
        while self._exchange_missing(MissingBucket(NONE_MISSING, NONE_MISSING)):
            pass

    def _on_param_access(self, bucket: int) -> None:
        """An operation is about to read weights of the bucket. If it reads several, there is a call for each."""
        if self._unshard_order is None:
            got = "a weight used between steps: it rests split, and the parameter is a placeholder"
            attempt = "step.unsharded() to call the model, step.named_weights() to copy, step.edit() to change it"
            raise TrainingError(Problem(got, "the whole weight", attempt))
        if self._param_access.operation_index != self._operation_index:
            self._operation_index = self._param_access.operation_index
            self._needed_buckets = set()
        self._needed_buckets.add(bucket)
        self.ensure_unsharded(bucket)

    def ensure_unsharded(self, bucket: int) -> None:
        """Unshard a bucket and keep the others that the current operation needs."""
        assert self._unshard_order is not None
        missed = bucket not in self._unsharded
        if missed:
            with outside_transforms(self._device.type):  # transforms of torch.func refuse writes into other tensors
                self._unshard_missing(bucket)
        self._unsharded.move_to_end(bucket)
        self._unshard_order.mark_used(bucket)
        if missed:
            for other in [b for b in self._unsharded if b not in self._needed_buckets][
                : max(0, len(self._unsharded) - MAX_UNSHARDED)
            ]:
                self.reshard(other)
            with outside_transforms(self._device.type):
                self._prefetch()

    def reshard(self, bucket: int) -> None:
        """Replace the bucket's parameters by placeholders. Autograd or the user may keep tensors in its buffer."""
        buffer = self._unsharded.pop(bucket, None)
        if buffer is not None:
            del self._bucket_of_address[buffer.data_ptr()]
            self._use_placeholders(bucket)

    def _unshard_missing(self, bucket: int) -> None:
        order = self._unshard_order
        assert order is not None
        if any(pending.bucket == bucket for pending in self._pending) or order.is_pending(bucket):
            while bucket not in self._unsharded:
                if not self._pending:
                    self._pending.append(self._unshard_async(order.next_bucket()))
                self._wait_next()
            return
        self._join_remaining_unshards()
        while bucket not in self._unsharded:
            self._exchange_missing(order.missing_bucket(bucket), wanted=bucket)

    def _join_remaining_unshards(self) -> None:
        """Take part in the remaining all-gathers of the order, and keep no result."""
        order = self._unshard_order
        assert order is not None
        while self._pending or not order.has_ended:
            if not self._pending:
                self._pending.append(self._unshard_async(order.next_bucket()))
            self._pending.popleft().wait()

    def _exchange_missing(self, missing: MissingBucket, *, wanted: int = NONE_MISSING) -> bool:
        """Exchange miss reports, and take part in the all-gathers of all buckets that ranks miss; keep only `wanted`.

        Returns whether any rank missed a bucket. Collective.
        """
        assert self._unshard_order is not None
        reports = [MissingBucket(*row) for row in self._gatherer.all_gather_ints(missing)]
        missed = self._unshard_order.insert_missing([each for each in reports if each.bucket != NONE_MISSING])
        for bucket in missed:
            pending = self._unshard_async(bucket)
            pending.wait()
            if bucket == wanted:
                self._store_unsharded(pending)
        return bool(missed)

    def _prefetch(self) -> None:
        assert self._unshard_order is not None
        if not self._pending and not self._unshard_order.has_ended:
            self._pending.append(self._unshard_async(self._unshard_order.next_bucket()))

    def _unshard_async(self, bucket: int) -> _PendingUnshard:
        self.before_unshard(bucket)
        shard = self.shards[bucket].flat
        buffer = self.buffer_pool.acquire(self._buckets[bucket].size, shard.dtype, shard.device)
        return _PendingUnshard(bucket, buffer, self._gatherer.unshard_async(bucket, shard, buffer))

    def _wait_next(self) -> None:
        pending = self._pending.popleft()
        pending.wait()
        self._store_unsharded(pending)

    def _store_unsharded(self, pending: _PendingUnshard) -> None:
        self.reshard(pending.bucket)
        self._unsharded[pending.bucket] = pending.buffer
        self._bucket_of_address[pending.buffer.data_ptr()] = pending.bucket
        self._use_unsharded_views(pending.bucket, pending.buffer)

    def _use_unsharded_views(self, bucket: int, flat: Tensor) -> None:
        """Make the bucket's parameters views of a flat."""
        with outside_transforms(self._device.type):
            for slot, parameter in zip(self._buckets[bucket].slots, self._parameters[bucket], strict=True):
                parameter.data = flat[slot.start : slot.stop].view(parameter.shape)

    def _use_placeholders(self, bucket: int) -> None:
        """Make the bucket's parameters placeholders."""
        with outside_transforms(self._device.type):
            for parameter in self._parameters[bucket]:
                parameter.data = self._placeholders[bucket].expand(parameter.shape)

    # ---- what autograd saves ------------------------------------------------------------------------

    def _pack(self, tensor: Tensor) -> _SavedParamView | SavedTensor:
        bucket = (
            self._bucket_of_address.get(tensor.untyped_storage().data_ptr()) if tensor.layout is torch.strided else None
        )
        if bucket is None or tensor.dtype != self._unsharded[bucket].dtype or tensor.is_conj() or tensor.is_neg():
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
        if self._unshard_order is None:
            got = "a backward outside of a step, through weights that rest split"
            raise TrainingError(Problem(got, "backward inside the step, or weights that rest whole", "zero = 2"))
        with outside_transforms(self._device.type):
            self._needed_buckets = {saved.bucket}
            self.ensure_unsharded(saved.bucket)
            return self._unsharded[saved.bucket].as_strided(saved.size, saved.stride, saved.offset)

    def _weight_version(self, bucket: int) -> int:
        return version_of(self._parameters[bucket][0])
