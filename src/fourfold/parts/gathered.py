"""Gathered: weights that rest split are brought together before use, and given back after it.

home     this rank's share of a bucket, where it rests and is updated
slot     memory a whole bucket is gathered into; who holds a view of it holds the slot
held     a bucket that is in a slot: its parameters are views of it. All others are placeholders
placeholder  a NaN in the parameter's shape: a use that nobody was told of is not silently right
record   what autograd keeps of a weight instead of a view: bucket, offset, sizes, strides
Law: what a view shows never changes while somebody holds it, and no rank gathers what the others do not.

Which bucket is gathered when is in `plan/gathers.py`.
"""

import contextlib
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fourfold.parts import memory
from fourfold.parts.comm import BucketSlice, Transport
from fourfold.parts.data import bucket_dtype
from fourfold.parts.uses import Uses, naming_transforms, outside
from fourfold.plan.data import Bucket
from fourfold.plan.gathers import ROOM, Plea, Script
from fourfold.words.errors import Problem, TrainingError

NO_PLEA = -1


def nothing(bucket: int) -> None:
    """For those who need not be told."""


class _Coming(NamedTuple):
    """A gather that has begun, and what waits for its end."""

    bucket: int
    slot: Tensor
    land: Callable[[], None]


class _Record(NamedTuple):
    """A view of a bucket's slot, in elements, and the version of its weights."""

    bucket: int
    offset: int
    size: torch.Size
    stride: tuple[int, ...]
    version: int


class Saved(NamedTuple):
    """Any other tensor that autograd keeps, and its version."""

    tensor: Tensor
    version: int


class Gathered:
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
        self.homes = [
            BucketSlice(start, stop, memory.private(stop - start, dtype, self._device))
            for (start, stop, _), dtype in zip(owns, dtypes, strict=True)
        ]
        self._places = {
            slot.name: (bucket.index, slot.start, max(home.start, slot.start), min(home.stop, slot.stop))
            for bucket, home in zip(buckets, self.homes, strict=True)
            for slot in bucket.slots
        }
        self._nothing = [torch.full((), float("nan"), dtype=dtype, device=self._device) for dtype in dtypes]
        self.slots = memory.Slots()
        self._scripts: dict[str, Script] = {}
        self._script: Script | None = None
        self._coming: deque[_Coming] = deque()
        self._held: OrderedDict[int, Tensor] = OrderedDict()
        self._holders: dict[int, int] = {}  # by the address of its slot, the bucket
        self.before_gather: Callable[[int], None] = nothing
        """Called before this rank's share of a bucket is read."""
        self._uses = Uses(parameters, self._told)
        self._operation, self._needed = 0, set[int]()

    # ---- homes --------------------------------------------------------------------------------------

    @torch.no_grad()
    def settle(self, spread: Callable[[Tensor], None]) -> None:
        """What the parameters show comes home, a bucket at a time, and they rest. `spread` may change a flat before."""
        self._uses.listening = False
        for bucket in self._buckets:
            whole = torch.zeros(bucket.size, dtype=self.homes[bucket.index].flat.dtype, device=self._device)
            for slot, parameter in zip(bucket.slots, self._parameters[bucket.index], strict=True):
                whole[slot.start : slot.stop] = parameter.data.flatten()
            spread(whole)
            start, stop, home = self.homes[bucket.index]
            home.copy_(whole[start:stop])
            self._rest(bucket.index)
        self._uses.listening = True

    @torch.no_grad()
    def put(self, values: Mapping[str, Tensor]) -> None:
        """Replace weights, by name, as far as they are this rank's."""
        for name, value in values.items():
            _, first, low, high = self._places[name]
            if low < high:
                self.stretch(name).copy_(value.detach().flatten()[low - first : high - first])

    def stretch(self, name: str) -> Tensor:
        """This rank's share of a parameter, as it lies; may be empty."""
        bucket, _, low, high = self._places[name]
        start, _, home = self.homes[bucket]
        return home[low - start : max(low, high) - start]

    @torch.no_grad()
    def laid_out(self, name: str, share: Tensor, parameter: Tensor) -> Tensor:
        """A copy of a share at its place among zeros [elements]: summed over the ranks they are the parameter."""
        _, first, low, high = self._places[name]
        whole = torch.zeros(parameter.numel(), dtype=share.dtype, device=parameter.device)
        if low < high:
            whole[low - first : high - first] = share
        return whole

    def wholes(self) -> Iterator[tuple[Bucket, Tensor]]:
        """Every bucket and all of its weights, one after the other. Collective: every rank goes to the end."""
        for bucket in self._buckets:
            coming = self._begin(bucket.index)
            coming.land()
            yield bucket, coming.slot

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Within: all parameters are whole, in this rank's own memory; what does not settle is lost. Collective."""
        for bucket, slot in self.wholes():
            self._show(bucket.index, slot)
        self._uses.listening = False
        try:
            yield
        finally:
            for bucket in self._buckets:
                self._rest(bucket.index)
            self._uses.listening = True

    # ---- phases -------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def phase(self, kind: str) -> Iterator[None]:
        """Within: weights are gathered when they are used. Collective: every rank has the same phases."""
        self._script = self._scripts.setdefault(kind, Script())
        self._script.begin()
        try:
            self._prefetch()
            with naming_transforms(), torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
                yield
            self._end()
        finally:
            self._script = None
            self._coming.clear()
            for bucket in list(self._held):
                self.drop(bucket)

    def _end(self) -> None:
        """Until no rank misses anything any more."""
        self._take_part()
        while self._hear(Plea(NO_PLEA, NO_PLEA)):
            pass

    def _told(self, bucket: int) -> None:
        """An operation is about to take weights of the bucket, and perhaps of others too: of these it is told next."""
        if self._script is None:
            got = "a weight used between steps, where weights rest split: there is a placeholder in its place"
            attempt = (
                "step.read() to call the model, step.weights() or step.state_dict() to copy, step.edit() to change it"
            )
            raise TrainingError(Problem(got, "the whole weight", attempt))
        if self._uses.operation != self._operation:
            self._operation = self._uses.operation
            self._needed = set()
        self._needed.add(bucket)
        self.use(bucket)

    def use(self, bucket: int) -> None:
        """Have a bucket held, beside those that the present operation needs."""
        assert self._script is not None
        missed = bucket not in self._held
        if missed:
            with outside(self._device.type):  # a transform of torch.func refuses to write into other tensors
                self._miss(bucket)
        self._held.move_to_end(bucket)
        self._script.use(bucket)
        if missed:
            for other in [b for b in self._held if b not in self._needed][: max(0, len(self._held) - ROOM)]:
                self.drop(other)
            with outside(self._device.type):
                self._prefetch()

    def drop(self, bucket: int) -> None:
        """The bucket is held no more, at least not here: autograd or the user may still hold its slot."""
        slot = self._held.pop(bucket, None)
        if slot is not None:
            del self._holders[slot.data_ptr()]
            self._rest(bucket)

    def _miss(self, bucket: int) -> None:
        script = self._script
        assert script is not None
        if any(coming.bucket == bucket for coming in self._coming) or script.is_to_come(bucket):
            while bucket not in self._held:
                if not self._coming:
                    self._coming.append(self._begin(script.next()))
                self._land()
            return
        self._take_part()
        while bucket not in self._held:
            self._hear(script.plea(bucket), wanted=bucket)

    def _take_part(self) -> None:
        """Take part in the gathers that are left, and keep nothing."""
        script = self._script
        assert script is not None
        while self._coming or not script.has_ended:
            if not self._coming:
                self._coming.append(self._begin(script.next()))
            self._coming.popleft().land()

    def _hear(self, plea: Plea, *, wanted: int = NO_PLEA) -> bool:
        """Hear what all ranks miss, and gather that; whether there was anything."""
        assert self._script is not None
        pleas = [Plea(*row) for row in self._transport.all_gather_ints(plea)]
        missed = self._script.hear([each for each in pleas if each.bucket != NO_PLEA])
        for bucket in missed:
            coming = self._begin(bucket)
            coming.land()
            if bucket == wanted:
                self._hold(coming)
        return bool(missed)

    def _prefetch(self) -> None:
        assert self._script is not None
        if not self._coming and not self._script.has_ended:
            self._coming.append(self._begin(self._script.next()))

    def _begin(self, bucket: int) -> _Coming:
        self.before_gather(bucket)
        home = self.homes[bucket].flat
        slot = self.slots.lend(self._buckets[bucket].size, home.dtype, home.device)
        return _Coming(bucket, slot, self._transport.unshard_async(bucket, home, slot))

    def _land(self) -> None:
        coming = self._coming.popleft()
        coming.land()
        self._hold(coming)

    def _hold(self, coming: _Coming) -> None:
        self.drop(coming.bucket)
        self._held[coming.bucket] = coming.slot
        self._holders[coming.slot.data_ptr()] = coming.bucket
        self._show(coming.bucket, coming.slot)

    def _show(self, bucket: int, flat: Tensor) -> None:
        """The bucket's parameters become views of a flat."""
        with outside(self._device.type):
            for slot, parameter in zip(self._buckets[bucket].slots, self._parameters[bucket], strict=True):
                parameter.data = flat[slot.start : slot.stop].view(parameter.shape)

    def _rest(self, bucket: int) -> None:
        """The bucket's parameters become placeholders."""
        with outside(self._device.type):
            for parameter in self._parameters[bucket]:
                parameter.data = self._nothing[bucket].expand(parameter.shape)

    # ---- what autograd keeps ------------------------------------------------------------------------

    def _pack(self, tensor: Tensor) -> _Record | Saved:
        bucket = self._holders.get(tensor.untyped_storage().data_ptr()) if tensor.layout is torch.strided else None
        if bucket is None or tensor.dtype != self._held[bucket].dtype or tensor.is_conj() or tensor.is_neg():
            return Saved(tensor, tensor._version)
        return _Record(bucket, int(tensor.storage_offset()), tensor.size(), tensor.stride(), self._version(bucket))

    def _unpack(self, kept: _Record | Saved) -> Tensor:
        now = kept.tensor._version if isinstance(kept, Saved) else self._version(kept.bucket)
        if now != kept.version:
            # Autograd checks this itself, but not behind hooks.
            what = "one of the tensors" if isinstance(kept, Saved) else "a weight"
            got = f"{what} that backward needs, changed since forward (version {now}, {kept.version} then)"
            raise TrainingError(Problem(got, "what forward has computed with"), where="backward")
        if isinstance(kept, Saved):
            return kept.tensor
        if self._script is None:
            got = "a backward outside a step, of a graph with weights that rest split"
            raise TrainingError(Problem(got, "backward within the step, or weights that rest whole", "zero = 2"))
        with outside(self._device.type):
            self._needed = {kept.bucket}
            self.use(kept.bucket)
            return self._held[kept.bucket].as_strided(kept.size, kept.stride, kept.offset)

    def _version(self, bucket: int) -> int:
        return self._parameters[bucket][0]._version
