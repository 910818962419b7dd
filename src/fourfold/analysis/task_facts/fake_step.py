"""Fake steps: forwards and backwards of a few samples on the meta device, observed segment by segment.

kept       bytes that are held when a segment's forward ends, more than when it began
temporary  the most that a segment holds beyond what is kept when its forward ends, in its forward or backward
Law: counts of two fake steps that differ in their samples give the facts of one sample, and of a call.
"""

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fourfold.analysis.task_facts.fake_attention import FakeAttention, attention_collectives
from fourfold.analysis.task_facts.fake_ranks import META, RecordedCollective
from fourfold.analysis.task_facts.laid_out_model import FakeBatch, LaidOutModel
from fourfold.analysis.task_facts.operations import Kernel, KernelRecorder
from fourfold.analysis.task_facts.segments import SegmentTracker
from fourfold.parts.comm.meter import CommMeter
from fourfold.parts.comm.tensor.single_rank import SingleRankTensorGroup
from fourfold.plan.plan import Plan
from fourfold.plan.predict.facts import Collective
from fourfold.step.model_call import call_model, model_loss
from fourfold.step.peak_memory import PeakMemory
from fourfold.step.recompute import Recompute
from fourfold.step.sequence.sdpa_interception import AttentionCall, AttentionHandler, intercept_attention
from fourfold.step.sequence.transformers import install_attention
from fourfold.step.tensor_tree import tree_leaves
from fourfold.words.errors import FourfoldError, Problem, TaskError

Loss = Callable[[Any, Any], Any] | None


class FakeModel(NamedTuple):
    """What a fake step runs. `blocks`: names of the chain."""

    laid_out: LaidOutModel
    blocks: Sequence[str]
    loss: Loss
    batch: FakeBatch
    plan: Plan

    @property
    def model(self) -> nn.Module:
        return self.laid_out.model

    def tracker(self, on_switch: Callable[[int], None] = lambda segment: None) -> SegmentTracker:
        return SegmentTracker([self.model.get_submodule(name) for name in self.blocks], on_switch)

    def samples(self, num_samples: int) -> tuple[Any, Any]:
        """Inputs and targets."""
        return self.batch.of(num_samples, self.plan)

    def forward(self, samples: tuple[Any, Any], tracker: SegmentTracker, attention: AttentionHandler) -> Tensor:
        """The loss of samples: a sum. Raises TaskError for a step that needs values."""
        try:
            with (
                torch.device(META),
                tracker.installed(),
                install_attention(self.model),
                intercept_attention(attention),
            ):
                loss = self._loss(*samples)
        except FourfoldError:
            raise
        except (RuntimeError, NotImplementedError, ValueError, TypeError) as error:
            got = f"a step that cannot run on the meta device: {str(error).splitlines()[0][:160]}"
            need = "a model and a loss whose operations do not depend on the values of the data"
            raise TaskError(Problem(got, need, "fourfold train: only running it shows what it costs")) from error
        total = _total(loss)
        del loss
        tracker.end()
        return total

    def _loss(self, inputs: Any, targets: Any) -> Any:
        """The outputs are dropped when the loss has been made of them, as a step drops them."""
        if self.loss is None:
            return model_loss(call_model(self.model, inputs), inputs)
        return self.loss(call_model(self.model, inputs), targets)


def _total(loss: Any) -> Tensor:
    first = loss[0] if isinstance(loss, tuple) else loss
    return first.sum() if isinstance(first, Tensor) and first.dim() else first


# ---- kernels and collectives ---------------------------------------------------------------------------------------


class ForwardRecord(NamedTuple):
    """By segment: the kernels of a forward, and what attention sends for one of its samples."""

    kernels: list[tuple[int, Kernel]]
    sent_by_attention: list[tuple[int, Collective]]
    tracker: SegmentTracker


def record_forward(fake: FakeModel, num_samples: int) -> ForwardRecord:
    """Count the kernels of a forward of so many samples."""
    tracker, sent = fake.tracker(), list[tuple[int, Collective]]()
    recorder = KernelRecorder(tracker, fake.model.parameters())
    spec = fake.plan.sequence_spec
    handle = FakeAttention(spec, recorder)

    def attend(call: AttentionCall) -> Tensor:
        if spec.size > 1:
            sent.extend((tracker.current, each) for each in attention_collectives(call, spec, num_samples))
        return handle(call)

    samples = fake.samples(num_samples)
    with recorder:
        fake.forward(samples, tracker, attend)
    return ForwardRecord(recorder.kernels, sent, tracker)


# ---- memory ---------------------------------------------------------------------------------------------------------


class SegmentBytes(NamedTuple):
    kept: int
    temporary: int


class MemoryRecord(NamedTuple):
    """By segment: bytes, and the collectives along tp in forward and in backward."""

    segments: dict[int, SegmentBytes]
    collectives: dict[int, Counter[RecordedCollective]]


def record_memory(fake: FakeModel, num_samples: int, recompute: str) -> MemoryRecord:
    """Count what a forward and backward of so many samples holds."""
    return _MemoryCount(fake, recompute).run(num_samples)


class _MemoryCount:
    """One forward and backward."""

    def __init__(self, fake: FakeModel, recompute: str) -> None:
        self._fake, self._memory = fake, PeakMemory()
        self._tracker = fake.tracker(self._forward_ended)
        self._levels = dict[int, int]()
        """By segment: what was held when its forward ended."""
        self._peaks = Counter[int]()
        self._begin_level, self._num_calls = 0, len(fake.laid_out.group.calls)
        self._current = 0
        """The segment that runs backward."""
        self._collectives: dict[int, Counter[RecordedCollective]] = {}
        blocks = fake.blocks if recompute != "none" else ()
        # Whether ranks have the same inputs is a question of values: `source.py` divides what is kept of them.
        alone = SingleRankTensorGroup(CommMeter(), META)
        self._recompute = Recompute(fake.model, blocks, alone, selective=recompute == "selective")

    def run(self, num_samples: int) -> MemoryRecord:
        model, memory, samples = self._fake.model, self._memory, self._fake.samples(num_samples)
        memory.track("weights and batch", [*model.parameters(), *model.buffers(), *tree_leaves(list(samples))])
        self._begin_level = memory.current_bytes
        handles = [p.register_post_accumulate_grad_hook(_drop_grad) for p in model.parameters() if p.requires_grad]
        handles += [
            model.get_submodule(name).register_forward_hook(functools.partial(self._watch_backward, place + 1))
            for place, name in enumerate(self._fake.blocks)
        ]
        if self._fake.blocks:
            first_block = model.get_submodule(self._fake.blocks[0])
            handles.append(first_block.register_forward_pre_hook(self._watch_input, with_kwargs=True))
        try:
            with memory, self._recompute.installed():
                attention = FakeAttention(self._fake.plan.sequence_spec)
                loss = self._fake.forward(samples, self._tracker, attention)
                self._current = self._tracker.last if self._fake.blocks else 0
                with intercept_attention(attention):  # of blocks that are computed again
                    loss.backward()
                self._end_of(self._current)
        finally:
            for handle in handles:
                handle.remove()
            if self._fake.laid_out.region is not None:
                self._fake.laid_out.region.end_tokens()
        return MemoryRecord(self._segments(), self._collectives)

    def _forward_ended(self, segment: int) -> None:
        self._levels[segment] = self._memory.current_bytes
        self._end_of(segment)

    def _end_of(self, segment: int) -> None:
        """Of a forward or backward: its peak and its collectives are known."""
        self._peaks[segment] = max(self._peaks[segment], self._memory.restart_peak())
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

    def _segments(self) -> dict[int, SegmentBytes]:
        found, before = dict[int, SegmentBytes](), self._begin_level
        for segment, level in self._levels.items():
            found[segment] = SegmentBytes(level - before, max(0, self._peaks[segment] - level))
            before = level
        return found


def _drop_grad(parameter: Tensor) -> None:
    """As buckets do, which have copied it."""
    parameter.grad = None
