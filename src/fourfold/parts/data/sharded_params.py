"""Gathered: weights that rest split are brought together before use, and given back after it.

home     this rank's share of a bucket, where it rests and is updated
slot     memory a whole bucket is gathered into; who holds a view of it holds the slot
held     a bucket that is in a slot: its parameters are views of it. All others are placeholders
placeholder  a NaN in the parameter's shape: a use that nobody was told of is not silently right
record   what autograd keeps of a weight instead of a view: bucket, offset, sizes, strides
Law: what a view shows never changes while somebody holds it, and no rank gathers what the others do not.

Which bucket is gathered when is in `plan/unshard_order.py`.
"""

import contextlib
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fourfold.parts import memory
from fourfold.parts.comm.reduce.protocol import BucketSlice, Transport
from fourfold.parts.data.grad_buckets import bucket_dtype
from fourfold.parts.data.param_access import ParamAccess, explain_transform_errors, outside_transforms
from fourfold.parts.torch_private import version_of
from fourfold.plan.data.buckets import Bucket
from fourfold.plan.unshard_order import MAX_UNSHARDED, MissingBucket, UnshardOrder
from fourfold.words.errors import Problem, TrainingError

NONE_MISSING = -1


def noop(bucket: int) -> None:
    """For those who need not be told."""


class _PendingUnshard(NamedTuple):
    """A gather that has begun, and what waits for its end."""

    bucket: int
    buffer: Tensor
    wait: Callable[[], None]


class _SavedParamView(NamedTuple):
    """A view of a bucket's slot, in elements, and the version of its weights."""

    bucket: int
    offset: int
    size: torch.Size
    stride: tuple[int, ...]
    version: int


class SavedTensor(NamedTuple):
    """Any other tensor that autograd keeps, and its version."""

    tensor: Tensor
    version: int


class ShardedParams:
    """The weights of a step, at rest in homes."""

    def __init__(
        self, parameters: Sequence[Sequence[nn.Parameter]], buckets: Sequence[Bucket], transport: Transport
    ) -> None:
        """`parameters` are by bucket and slot. Their weights stay where they are until they `settle`."""
        self._parameters, self._buckets, self._transport = parameters, buckets, transport
        self._device = parameters[0][0].device
        owns = [transport.grad_shard(bucket.index) for bucket in buckets]
        # Not the parameters' own: with a precision they are as the user made them until they settle.
        dtypes = [bucket_dtype(bucket) for bucket in buckets]
        self.shards = [
            BucketSlice(start, stop, memory.allocate_private(stop - start, dtype, self._device))
            for (start, stop, _), dtype in zip(owns, dtypes, strict=True)
        ]
        self._shard_ranges = {
            slot.name: (bucket.index, slot.start, max(home.start, slot.start), min(home.stop, slot.stop))
            for bucket, home in zip(buckets, self.shards, strict=True)
            for slot in bucket.slots
        }
        self._placeholders = [torch.full((), float("nan"), dtype=dtype, device=self._device) for dtype in dtypes]
        self.buffer_pool = memory.BufferPool()
        self._unshard_orders: dict[str, UnshardOrder] = {}
        self._unshard_order: UnshardOrder | None = None
        self._pending: deque[_PendingUnshard] = deque()
        self._unsharded: OrderedDict[int, Tensor] = OrderedDict()
        self._bucket_of_address: dict[int, int] = {}  # by the address of its slot, the bucket
        self.before_unshard: Callable[[int], None] = noop
        """Called before this rank's share of a bucket is read."""
        self._param_access = ParamAccess(parameters, self._on_param_access)
        self._operation_index, self._needed_buckets = 0, set[int]()

    # ---- homes --------------------------------------------------------------------------------------

    @torch.no_grad()
    def shard_params(self, broadcast: Callable[[Tensor], None]) -> None:
        """What the parameters show comes home, a bucket at a time, and they rest. `spread` may change a flat before."""
        self._param_access.is_enabled = False
        for bucket in self._buckets:
            whole = torch.zeros(bucket.size, dtype=self.shards[bucket.index].flat.dtype, device=self._device)
            for slot, parameter in zip(bucket.slots, self._parameters[bucket.index], strict=True):
                whole[slot.start : slot.stop] = parameter.data.flatten()
            broadcast(whole)
            start, stop, home = self.shards[bucket.index]
            home.copy_(whole[start:stop])
            self._use_placeholders(bucket.index)
        self._param_access.is_enabled = True

    @torch.no_grad()
    def load_weights(self, values: Mapping[str, Tensor]) -> None:
        """Replace weights, by name, as far as they are this rank's."""
        for name, value in values.items():
            _, first, low, high = self._shard_ranges[name]
            if low < high:
                self.local_shard(name).copy_(value.detach().flatten()[low - first : high - first])

    def local_shard(self, name: str) -> Tensor:
        """This rank's share of a parameter, as it lies; may be empty."""
        bucket, _, low, high = self._shard_ranges[name]
        start, _, home = self.shards[bucket]
        return home[low - start : max(low, high) - start]

    @torch.no_grad()
    def pad_to_full(self, name: str, shard: Tensor, parameter: Tensor) -> Tensor:
        """A copy of a share at its place among zeros [elements]: summed over the ranks they are the parameter."""
        _, first, low, high = self._shard_ranges[name]
        whole = torch.zeros(parameter.numel(), dtype=shard.dtype, device=parameter.device)
        if low < high:
            whole[low - first : high - first] = shard
        return whole

    def unsharded_buckets(self) -> Iterator[tuple[Bucket, Tensor]]:
        """Every bucket and all of its weights, one after the other. Collective: every rank goes to the end."""
        for bucket in self._buckets:
            coming = self._unshard_async(bucket.index)
            coming.wait()
            yield bucket, coming.buffer

    @contextlib.contextmanager
    def all_unsharded(self) -> Iterator[None]:
        """Within: all parameters are whole, in this rank's own memory; what does not settle is lost. Collective."""
        for bucket, slot in self.unsharded_buckets():
            self._use_unsharded_views(bucket.index, slot)
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
        """Within: weights are gathered when they are used. Collective: every rank has the same phases."""
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
        """Until no rank misses anything any more."""
        self._join_remaining_unshards()
        while self._exchange_missing(MissingBucket(NONE_MISSING, NONE_MISSING)):
            pass

    def _on_param_access(self, bucket: int) -> None:
        """An operation is about to take weights of the bucket, and perhaps of others too: of these it is told next."""
        if self._unshard_order is None:
            got = "a weight used between steps, where weights rest split: there is a placeholder in its place"
            attempt = (
                "step.read() to call the model, step.weights() or step.state_dict() to copy, step.edit() to change it"
            )
            raise TrainingError(Problem(got, "the whole weight", attempt))
        if self._param_access.operation_index != self._operation_index:
            self._operation_index = self._param_access.operation_index
            self._needed_buckets = set()
        self._needed_buckets.add(bucket)
        self.ensure_unsharded(bucket)

    def ensure_unsharded(self, bucket: int) -> None:
        """Have a bucket held, beside those that the present operation needs."""
        assert self._unshard_order is not None
        missed = bucket not in self._unsharded
        if missed:
            with outside_transforms(self._device.type):  # a transform of torch.func refuses to write into other tensors
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
        """The bucket is held no more, at least not here: autograd or the user may still hold its slot."""
        slot = self._unsharded.pop(bucket, None)
        if slot is not None:
            del self._bucket_of_address[slot.data_ptr()]
            self._use_placeholders(bucket)

    def _unshard_missing(self, bucket: int) -> None:
        script = self._unshard_order
        assert script is not None
        if any(coming.bucket == bucket for coming in self._pending) or script.is_pending(bucket):
            while bucket not in self._unsharded:
                if not self._pending:
                    self._pending.append(self._unshard_async(script.next_bucket()))
                self._wait_next()
            return
        self._join_remaining_unshards()
        while bucket not in self._unsharded:
            self._exchange_missing(script.missing_bucket(bucket), wanted=bucket)

    def _join_remaining_unshards(self) -> None:
        """Take part in the gathers that are left, and keep nothing."""
        script = self._unshard_order
        assert script is not None
        while self._pending or not script.has_ended:
            if not self._pending:
                self._pending.append(self._unshard_async(script.next_bucket()))
            self._pending.popleft().wait()

    def _exchange_missing(self, missing: MissingBucket, *, wanted: int = NONE_MISSING) -> bool:
        """Hear what all ranks miss, and gather that; whether there was anything."""
        assert self._unshard_order is not None
        pleas = [MissingBucket(*row) for row in self._transport.all_gather_ints(missing)]
        missed = self._unshard_order.insert_missing([each for each in pleas if each.bucket != NONE_MISSING])
        for bucket in missed:
            coming = self._unshard_async(bucket)
            coming.wait()
            if bucket == wanted:
                self._store_unsharded(coming)
        return bool(missed)

    def _prefetch(self) -> None:
        assert self._unshard_order is not None
        if not self._pending and not self._unshard_order.has_ended:
            self._pending.append(self._unshard_async(self._unshard_order.next_bucket()))

    def _unshard_async(self, bucket: int) -> _PendingUnshard:
        self.before_unshard(bucket)
        home = self.shards[bucket].flat
        slot = self.buffer_pool.acquire(self._buckets[bucket].size, home.dtype, home.device)
        return _PendingUnshard(bucket, slot, self._transport.unshard_async(bucket, home, slot))

    def _wait_next(self) -> None:
        coming = self._pending.popleft()
        coming.wait()
        self._store_unsharded(coming)

    def _store_unsharded(self, pending: _PendingUnshard) -> None:
        self.reshard(pending.bucket)
        self._unsharded[pending.bucket] = pending.buffer
        self._bucket_of_address[pending.buffer.data_ptr()] = pending.bucket
        self._use_unsharded_views(pending.bucket, pending.buffer)

    def _use_unsharded_views(self, bucket: int, flat: Tensor) -> None:
        """The bucket's parameters become views of a flat."""
        with outside_transforms(self._device.type):
            for slot, parameter in zip(self._buckets[bucket].slots, self._parameters[bucket], strict=True):
                parameter.data = flat[slot.start : slot.stop].view(parameter.shape)

    def _use_placeholders(self, bucket: int) -> None:
        """The bucket's parameters become placeholders."""
        with outside_transforms(self._device.type):
            for parameter in self._parameters[bucket]:
                parameter.data = self._placeholders[bucket].expand(parameter.shape)

    # ---- what autograd keeps ------------------------------------------------------------------------

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
            # Autograd checks this itself, but not behind hooks.
            what = "one of the tensors" if isinstance(saved, SavedTensor) else "a weight"
            got = f"{what} that backward needs, changed since forward (version {now}, {saved.version} then)"
            raise TrainingError(Problem(got, "what forward has computed with"), where="backward")
        if isinstance(saved, SavedTensor):
            return saved.tensor
        if self._unshard_order is None:
            got = "a backward outside a step, of a graph with weights that rest split"
            raise TrainingError(Problem(got, "backward within the step, or weights that rest whole", "zero = 2"))
        with outside_transforms(self._device.type):
            self._needed_buckets = {saved.bucket}
            self.ensure_unsharded(saved.bucket)
            return self._unsharded[saved.bucket].as_strided(saved.size, saved.stride, saved.offset)

    def _weight_version(self, bucket: int) -> int:
        return version_of(self._parameters[bucket][0])
