"""Fake memory: what the segments of a model hold on the meta device, to the byte.

kept       bytes that are held when a segment's forward has ended, more than when it began: at the first operation
           behind it, when the model has let go of the segment's inputs. Not what the model's own forward holds of its
           beginning until it returns, such as embeddings of which only the sum is needed
moment     when an operation has returned; its bytes are those that are held beyond what is kept by then: in a backward,
           what segments behind this one have kept is freed
kind       what the caller names tensors that exist already (`track`); else TEMPORARY if made inside of a backward, and
           `forward_kind` outside of one: ACTIVATION, unless the caller changes it
storage    counted once, however many views it has, from when an operation returns it until its last tensor is gone
Law: bytes are affine in the samples at each moment; two fake steps that differ in their samples show how. The blocks
that are computed again are those of a step; every byte is counted.
Law: the kinds add up to the bytes of all live storages that have been seen.

Memory that an operation allocates and frees before it returns is not seen. Fake tensors have sizes but no memory, so
one process can count what a rank of any world would hold.
"""

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from fourfold.comm.meter import CommMeter
from fourfold.comm.tensor_group import MessageTensorGroup, TensorGroup
from fourfold.model.sdpa_interception import intercept_attention
from fourfold.planner.predict.facts import TemporaryPeak
from fourfold.planner.task_facts.fake_ranks import META, RecordedCollective
from fourfold.planner.task_facts.fake_step import FakeModel
from fourfold.planner.task_facts.operations import FakeAttention, MetaCalls
from fourfold.planner.task_facts.segments import FIRST
from fourfold.step.recomputed_blocks import Recompute
from fourfold.torch_kit.tensor_tree import tree_leaves
from fourfold.torch_kit.torch_private import TorchDispatchMode, is_in_backward

# ---- peak memory ----------------------------------------------------------------------------------------------------


ACTIVATION, TEMPORARY = "activations", "temporaries"


class PeakMemory(TorchDispatchMode):
    """Within: counts the results of every operation. `peak_bytes` and `bytes_by_kind` are those of the peak.

    `current_bytes`: what is held now.
    """

    forward_kind = ACTIVATION

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes, self.bytes_by_kind = 0, dict[str, int]()
        self._current_by_kind: dict[str, int] = {ACTIVATION: 0, TEMPORARY: 0}
        self.current_bytes = 0
        self._seen_storages = WeakIdKeyDictionary()

    def track(self, kind: str, tensors: Iterable[Tensor]) -> None:
        """Count tensors that exist already."""
        for tensor in tensors:
            self._count(tensor, kind)
        self.update_peak()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        kind = TEMPORARY if is_in_backward() else self.forward_kind
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._count(leaf, kind)
        self.update_peak()
        return result

    def current_bytes_of(self, kind: str) -> int:
        """What is held now, of one kind."""
        return self._current_by_kind.get(kind, 0)

    def _count(self, tensor: Tensor, kind: str) -> None:
        storage = tensor.untyped_storage()
        if storage in self._seen_storages:
            return
        size = storage.nbytes()
        self._seen_storages[storage] = None
        self._add(kind, size)
        weakref.finalize(storage, self._add, kind, -size)

    def _add(self, kind: str, size: int) -> None:
        self._current_by_kind[kind] = self._current_by_kind.get(kind, 0) + size
        self.current_bytes += size

    def update_peak(self) -> None:
        """An operation has returned."""
        if self.current_bytes > self.peak_bytes:
            self.peak_bytes, self.bytes_by_kind = self.current_bytes, dict(self._current_by_kind)


# ---- segments --------------------------------------------------------------------------------------------------------


class MemoryRecord(NamedTuple):
    """By segment: bytes kept, those of each moment, and the collectives along tp in forward and in backward."""

    kept: dict[int, int]
    moments: dict[int, list[int]]
    collectives: dict[int, Counter[RecordedCollective]]


def record_memory(fake: FakeModel, num_samples: int, recompute: str) -> MemoryRecord:
    """Count what a forward and backward of so many samples holds."""
    return _MemoryCount(fake, recompute).run(num_samples)


def recompute_of(fake: FakeModel, recompute: str, blocks: Sequence[str]) -> Recompute:
    """What a step installs for these blocks: see `_find_recomputed` in `step/assembly.py`."""
    group: TensorGroup = MessageTensorGroup(CommMeter(), META)
    if recompute == "full" and not fake.plan.sequence_parallel:
        group = fake.laid_out.group
    return Recompute(fake.model, blocks if recompute != "none" else (), group, selective=recompute == "selective")


def _drop_grad(parameter: Tensor) -> None:
    """As buckets do, which have copied it."""
    parameter.grad = None


OF_FIRST = "activations of the first segment"


class _Levels(PeakMemory):
    """Also: `levels`, what is held when each operation has returned. `before_next` is called before the next one."""

    def __init__(self, calls: MetaCalls) -> None:
        super().__init__()
        self._calls = calls
        self.levels: list[int] = []
        self.before_next: Callable[[], None] | None = None
        self.forward_kind = OF_FIRST

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.end()
        return super().__torch_dispatch__(lambda *a, **k: self._calls.call(func, a, k), types, args, kwargs)

    def end(self) -> None:
        """What an operation would call first."""
        if self.before_next is not None:
            before, self.before_next = self.before_next, None
            before()

    def update_peak(self) -> None:
        """An operation has returned."""
        super().update_peak()
        self.levels.append(self.current_bytes)


class _MemoryCount:
    """One forward and backward."""

    def __init__(self, fake: FakeModel, recompute: str) -> None:
        self._fake, self._memory = fake, _Levels(fake.calls)
        self._tracker = fake.tracker(self._forward_returned)
        self._ends = dict[int, int]()
        """By segment: what was held when its forward ended."""
        self._of_first = dict[int, int]()
        """By segment: what was held then of what the first one has made."""
        self._levels: dict[int, list[int]] = {}
        self._num_calls, self._current = len(fake.laid_out.group.calls), 0
        """`_current`: the segment that runs backward."""
        self._collectives: dict[int, Counter[RecordedCollective]] = {}
        self._recompute = recompute_of(fake, recompute, fake.blocks)

    def run(self, num_samples: int) -> MemoryRecord:
        model, memory, samples = self._fake.model, self._memory, self._fake.samples(num_samples)
        memory.track("weights and batch", [*self._fake.weights, *model.buffers(), *tree_leaves(list(samples))])
        begin = memory.current_bytes
        memory.levels.clear()
        handles = [p.register_post_accumulate_grad_hook(_drop_grad) for p in self._fake.weights if p.requires_grad]
        handles += [
            model.get_submodule(name).register_forward_hook(functools.partial(self._watch_backward, place + 1))
            for place, name in enumerate(self._fake.blocks)
        ]
        if self._fake.blocks:
            first_block = model.get_submodule(self._fake.blocks[0])
            handles.append(first_block.register_forward_pre_hook(self._watch_input, with_kwargs=True))
        try:
            with memory, self._recompute.installed():
                attention = FakeAttention(self._fake.plan.context_spec)
                loss = self._fake.forward(samples, self._tracker, attention)
                memory.end()
                self._current = self._tracker.last if self._fake.blocks else 0
                with intercept_attention(attention):  # of blocks that are computed again
                    loss.backward()
                self._end_of(self._current)
        finally:
            for handle in handles:
                handle.remove()
            if self._fake.laid_out.region is not None:
                self._fake.laid_out.region.end_tokens()
        moments = {
            segment: [level - self._ends[segment] for level in self._levels.get(segment, ())] for segment in self._ends
        }
        return MemoryRecord(self._kept(begin), moments, self._collectives)

    def _forward_returned(self, segment: int) -> None:
        self._memory.end()
        self._memory.before_next = functools.partial(self._forward_ended, segment)

    def _forward_ended(self, segment: int) -> None:
        self._ends[segment] = self._memory.current_bytes
        self._of_first[segment] = self._memory.current_bytes_of(OF_FIRST)
        self._memory.forward_kind = ACTIVATION
        self._end_of(segment)

    def _end_of(self, segment: int) -> None:
        """Of a forward or backward: its moments and its collectives are known."""
        self._levels.setdefault(segment, []).extend(self._memory.levels)
        self._memory.levels.clear()
        calls = self._fake.laid_out.group.calls
        self._collectives.setdefault(segment, Counter()).update(calls[self._num_calls :])
        self._num_calls = len(calls)

    def _watch_backward(self, segment: int, module: nn.Module, args: Any, output: Any) -> None:
        """The backward of a block begins when the gradient of its output is there."""
        if segment not in self._tracker.passed:
            self._begin_with_gradient(output, segment)

    def _watch_input(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._begin_with_gradient((args, kwargs), 0)

    def _begin_with_gradient(self, tensors: Any, segment: int) -> None:
        first = next((leaf for leaf in tree_leaves(tensors) if leaf.requires_grad), None)
        if first is not None and torch.is_grad_enabled():
            first.register_hook(lambda grad: self._begin_backward(segment))

    def _begin_backward(self, segment: int) -> None:
        self._end_of(self._current)
        self._current = segment

    def _kept(self, begin: int) -> dict[int, int]:
        found, before = dict[int, int](), begin
        for segment, level in self._ends.items():
            found[segment], before = level - before, level
        if self._fake.blocks:
            last = self._tracker.last
            freed_by_model = self._of_first[last - 1] - self._of_first[last]
            found[FIRST] -= freed_by_model
            found[last] += freed_by_model
        return found


# ---- from two fake steps to the bytes of a sample ------------------------------------------------------------------


class MemoryOfSegments(NamedTuple):
    """Two fake steps, of so many samples each."""

    few: MemoryRecord
    many: MemoryRecord
    num_few: int
    num_many: int

    def kept(self, segment: int) -> float:
        """What a sample keeps."""
        pair = (record.kept.get(segment, 0) for record in (self.few, self.many))
        return max(0.0, self._affine(*pair).sample_bytes)

    def peaks(self, segment: int) -> tuple[TemporaryPeak, ...]:
        """The moments that hold most, for some number of samples.

        Where more samples are more operations, as in a loss that is computed some rows at a time: one line.
        """
        few, many = (record.moments.get(segment, []) for record in (self.few, self.many))
        if len(few) != len(many):
            return (self._affine(max(few, default=0), max(many, default=0)),)
        return upper_envelope([self._affine(*pair) for pair in set(zip(few, many, strict=True))])

    def _affine(self, few: int, many: int) -> TemporaryPeak:
        slope = (many - few) / (self.num_many - self.num_few)
        return TemporaryPeak(few - slope * self.num_few, slope)


def upper_envelope(moments: Sequence[TemporaryPeak]) -> tuple[TemporaryPeak, ...]:
    """The moments of which each holds most for some number of samples from 1 on, by their slopes."""
    found, at = list[TemporaryPeak](), 1.0
    rest = list(moments)
    while rest:
        best = max(rest, key=lambda each: (each.call_bytes + each.sample_bytes * at, each.sample_bytes))
        found.append(best)
        rest = [each for each in rest if each.sample_bytes > best.sample_bytes]
        overtakes = [(best.call_bytes - each.call_bytes) / (each.sample_bytes - best.sample_bytes) for each in rest]
        at = min(overtakes, default=at)
    return tuple(found)
