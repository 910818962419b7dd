"""Fake memory: what the segments of a model, and one rank of a pipeline, hold on the meta device, to the byte.

kept       bytes that are held when a segment's forward has ended, more than when it began: at the first operation
           behind it, when the model has let go of the segment's inputs. Not what the model's own forward holds of its
           beginning until it returns, such as embeddings of which only the sum is needed
moment     when an operation has returned; its bytes are those that are held beyond what is kept by then: in a backward,
           what segments behind this one have kept is freed
fake rank  runs the list of its place with tensors without memory
kind       what the caller names tensors that exist already (`track`); else TEMPORARY if made inside of a backward, and
           `forward_kind` outside of one: ACTIVATION, unless the caller changes it
storage    counted once, however many views it has, from when an operation returns it until its last tensor is gone
resting    weights, gradients and optimizer states, which a rank holds all the time; here they rest whole
Law: bytes are affine in the samples at each moment; two fake steps that differ in their samples show how. The stages,
the gates, the blocks that are computed again and the halves of backwards are those of a step; every byte is counted.
Law: the kinds add up to the bytes of all live storages that have been seen.

Memory that an operation allocates and frees before it returns is not seen. Fake tensors have sizes but no memory, so
one process can count what a rank of any world would hold.
"""

import contextlib
import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from fourfold.axes.pipeline.work.chain import StageMap
from fourfold.axes.pipeline.work.gates import Carried, Gates, SplitTokens, StageEnd
from fourfold.axes.pipeline.work.knowledge import Knowledge
from fourfold.axes.pipeline.work.recording import Recorder, Recording
from fourfold.axes.pipeline.work.stand_in import OUTPUT, Source, StandInUsed
from fourfold.axes.tensor.work.split_region import SplitRegion
from fourfold.comm.meter import CommMeter
from fourfold.comm.tensor_group import MessageTensorGroup, TensorGroup
from fourfold.model.model_call import call_model
from fourfold.model.sdpa_interception import intercept_attention
from fourfold.planner.predict.facts import TemporaryPeak
from fourfold.planner.task_facts.fake_ranks import META, RecordedCollective
from fourfold.planner.task_facts.fake_step import FakeModel
from fourfold.planner.task_facts.operations import FakeAttention, MetaCalls
from fourfold.planner.task_facts.segments import FIRST
from fourfold.step.recomputed_blocks import Recompute
from fourfold.torch_kit.deferred_grads import BackwardHalves, DeferredGrads, PendingGrads, WholeBackward
from fourfold.torch_kit.grad_hooks import GradHooks
from fourfold.torch_kit.tensor_tree import tree_leaves
from fourfold.torch_kit.torch_private import TorchDispatchMode, is_in_backward
from fourfold.words.errors import Problem, TaskError
from fourfold.words.program import Action, Verb

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


def _recompute_of(fake: FakeModel, recompute: str, blocks: Sequence[str]) -> Recompute:
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
        self._recompute = _recompute_of(fake, recompute, fake.blocks)

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


# ---- one rank of a pipeline ------------------------------------------------------------------------------------------


WEIGHTS, GRADIENTS, STATES, BATCH = "weights", "gradients", "optimizer states", "batch"


class RankBytes(NamedTuple):
    """What a rank holds at its peak, by kind. See `PeakMemory`."""

    by_kind: dict[str, int]

    @property
    def total(self) -> int:
        """Without the batch, which is on no device before its microbatch is."""
        return sum(size for kind, size in self.by_kind.items() if kind != BATCH)


class FakeRank:
    """The rank at a place of the pipeline axis. It takes over the fake model, and leaves it changed.

    states_per_weight  of the optimizer
    num_samples        of a microbatch
    """

    def __init__(
        self, fake: FakeModel, stages: StageMap, place: int, *, num_samples: int, states_per_weight: int
    ) -> None:
        self._fake, self._known, self._place = fake, Knowledge(stages), place
        self._states_per_weight = states_per_weight
        self._samples = fake.samples(num_samples)
        self._attention = FakeAttention(fake.plan.context_spec)
        self._recorded = self._record() if stages.num_stages > 1 else Recording()
        fake = fake.with_copies(stages.ties if place == stages.num_places - 1 else {})
        self._copies = fake.copies
        self._weights = [each for name, each in fake.model.named_parameters() if stages.place_of(name) == place]
        trained = [each for each in self._weights if each.requires_grad]
        self._hooks = GradHooks(trained)
        self._sink = _DropGrads(trained)
        self._halves: BackwardHalves = DeferredGrads(trained) if fake.plan.divides_backward else WholeBackward()
        self._received, self._outputs = dict[Any, list[Tensor]](), dict[Any, list[Tensor]]()
        self._pending: dict[Any, PendingGrads] = {}

    def run(self, actions: Sequence[Action]) -> RankBytes:
        """Run a list of forwards and backwards."""
        memory = PeakMemory()
        held = self._rest(memory)
        verbs = {
            Verb.FORWARD: self._forward,
            Verb.BACKWARD: self._backward,
            Verb.BACKWARD_INPUT: self._backward_input,
            Verb.BACKWARD_WEIGHT: self._backward_weight,
        }
        with torch.device(META), memory:
            for action in actions:
                verbs[action.verb](action.stage, (action.stage, action.index))
        del held
        return RankBytes(memory.bytes_by_kind)

    def _rest(self, memory: PeakMemory) -> list[Tensor]:
        """What rests on the rank; returns what else than the model must hold it."""
        trained = [each for each in (*self._weights, *self._copies) if each.requires_grad]
        gradients = [torch.empty_like(each) for each in trained]
        own = [each for each in self._weights if each.requires_grad]
        states = [torch.empty_like(each) for each in own for _ in range(self._states_per_weight)]
        if self._fake.plan.precision != "keep":  # states are in float32, and master weights are among them
            states = [torch.empty_like(each, dtype=torch.float32) for each in (*own, *states)]
        memory.track(WEIGHTS, [*self._weights, *self._copies, *self._fake.model.buffers()])
        memory.track(GRADIENTS, gradients)
        memory.track(STATES, states)
        memory.track(BATCH, tree_leaves(list(self._samples)))
        return [*gradients, *states]

    # ---- the model -------------------------------------------------------------------------------------------------

    def _record(self) -> Recording:
        """What modules return for a microbatch."""
        recorder = Recorder(self._fake.model, self._known, set())
        with (
            torch.device(META),
            torch.no_grad(),
            self._fake.intercepted(self._attention),
            recorder.recording() as recording,
        ):
            call_model(self._fake.model, self._samples[0])
        self._end_tokens()
        return recording

    def _gates(self, stage: int) -> Gates:
        laid_out = self._fake.laid_out
        region = laid_out.region or SplitRegion(laid_out.group)
        split_tokens = SplitTokens(laid_out.sequence_parallel.entries, region)
        gates = Gates(self._fake.model, self._known, stage, split_tokens, torch.device(META))
        gates.set_metadata(self._recorded.described)
        return gates

    def _blocks(self, stage: int) -> Sequence[str]:
        if self._known.stages.num_stages == 1:
            return self._fake.blocks
        return [self._known.stages.chain.blocks[index] for index in self._known.stages.blocks[stage]]

    # ---- actions ---------------------------------------------------------------------------------------------------

    def _forward(self, stage: int, key: tuple[int, int]) -> None:
        while True:
            try:
                return self._forward_with_needs(stage, key)
            except StandInUsed as used:
                if (refused := self._known.note_needs(stage, used.sources)) is not None:
                    problem = Problem(f"stage {stage} needs {refused}", "values that earlier stages can send")
                    raise TaskError(problem, where="the pipeline") from None

    def _forward_with_needs(self, stage: int, key: tuple[int, int]) -> None:
        recompute = _recompute_of(self._fake, self._fake.plan.recompute, self._blocks(stage))
        received, closed = list[Tensor](), contextlib.nullcontext()
        if self._known.stages.num_stages > 1:
            gates, carried = self._gates(stage), Carried(self._known.received_by(stage))
            received = self._receive(stage, gates, carried)
            closed = gates.closed([*received, torch.empty(0, dtype=torch.uint8)], carried)
        self._received[key] = received
        try:
            with recompute.installed(), self._halves.in_forward(), closed, self._fake.intercepted(self._attention):
                self._outputs[key] = [self._fake.loss_of(*self._samples)]
        except StageEnd as end:
            self._outputs[key] = list(end.message[:-1])

    def _receive(self, stage: int, gates: Gates, carried: Carried) -> list[Tensor]:
        if stage == 0:
            return []
        sources = {Source(OUTPUT, self._known.stages.boundaries()[stage - 1]), *carried.received}
        received = [
            torch.empty_like(leaf)
            for source, described in self._recorded.described.items()
            if source in sources
            for leaf, is_sent in zip(
                self._recorded.leaves[source], gates.travels(source, described, sources), strict=True
            )
            if is_sent
        ]
        return [each.requires_grad_(each.is_floating_point()) for each in received]

    def _differentiate(self, key: tuple[int, int]) -> None:
        outputs = [each for each in self._outputs.pop(key) if each.requires_grad]
        upstream = [torch.empty_like(each) for each in outputs]
        with intercept_attention(self._attention):  # of blocks that are computed again
            torch.autograd.backward(outputs, upstream)
        self._end_tokens()

    def _backward(self, stage: int, key: tuple[int, int]) -> None:
        with self._hooks.calling(self._sink):
            self._differentiate(key)
        self._send_back(key)

    def _backward_input(self, stage: int, key: tuple[int, int]) -> None:
        with self._halves.first_half(self._hooks) as self._pending[key]:
            self._differentiate(key)
        self._send_back(key)

    def _backward_weight(self, stage: int, key: tuple[int, int]) -> None:
        self._halves.second_half(self._pending.pop(key), self._sink)

    def _send_back(self, key: tuple[int, int]) -> None:
        """The gradients of what was received have left."""
        del self._received[key]
        for copy in self._copies:
            copy.grad = None

    def _end_tokens(self) -> None:
        if self._fake.laid_out.region is not None:
            self._fake.laid_out.region.end_tokens()


class _DropGrads:
    """Takes gradients as buckets do, which have copied them."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters

    def on_grad(self, param_index: int) -> None:
        self._parameters[param_index].grad = None
