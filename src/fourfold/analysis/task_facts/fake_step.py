"""Fake steps: forwards of a few samples on the meta device, observed segment by segment.

Law: counts of two fake steps that differ in their samples give the facts of one sample, and of a call.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fourfold.analysis.task_facts.data_dependence import NEED, StepNeedsValues
from fourfold.analysis.task_facts.fake_attention import FakeAttention
from fourfold.analysis.task_facts.fake_ranks import META
from fourfold.analysis.task_facts.laid_out_model import FakeBatch, LaidOutModel
from fourfold.analysis.task_facts.meta_calls import MetaCalls
from fourfold.analysis.task_facts.operations import Kernel, KernelRecorder
from fourfold.analysis.task_facts.segments import SegmentTracker
from fourfold.plan.plan import Plan
from fourfold.step.model_call import call_model, model_loss
from fourfold.step.pipeline.tied import replace_by_copy
from fourfold.step.sdpa_interception import AttentionCall, AttentionHandler, intercept_attention
from fourfold.step.transformers_attention import install_attention
from fourfold.words.errors import FourfoldError, Problem

Loss = Callable[[Any, Any], Any] | None


class FakeModel(NamedTuple):
    """What a fake step runs.

    blocks   names of the chain
    same_as  by block: the first one that is equal to it
    calls    of all fake models of a task
    copies   of weights that other stages own: see `step/pipeline/tied.py`
    """

    laid_out: LaidOutModel
    blocks: Sequence[str]
    loss: Loss
    batch: FakeBatch
    plan: Plan
    same_as: Sequence[int]
    calls: MetaCalls
    copies: Sequence[Tensor] = ()

    @property
    def model(self) -> nn.Module:
        return self.laid_out.model

    @property
    def weights(self) -> list[Tensor]:
        return [*self.model.parameters(), *self.copies]

    @property
    def tokens_of_rank(self) -> int | None:
        """Of a sample; None: samples are not split over sequence ranks."""
        return self.batch.tokens_of_rank(self.plan)

    def with_copies(self, ties: Mapping[str, Sequence[str]]) -> "FakeModel":
        """The same, with a copy of each of these weights under its other names."""
        copies = [replace_by_copy(self.model, names, self.model.get_parameter(name)) for name, names in ties.items()]
        return self._replace(copies=copies)

    def tracker(self, on_switch: Callable[[int], None] = lambda segment: None) -> SegmentTracker:
        return SegmentTracker([self.model.get_submodule(name) for name in self.blocks], self.same_as, on_switch)

    def samples(self, num_samples: int) -> tuple[Any, Any]:
        """Inputs and targets."""
        return self.batch.of(num_samples, self.plan)

    def forward(self, samples: tuple[Any, Any], tracker: SegmentTracker, attention: AttentionHandler) -> Tensor:
        """The loss of samples: a sum. Raises TaskError for a step that needs values."""
        try:
            with tracker.installed(), self.intercepted(attention):
                loss = self._loss(*samples)
        except FourfoldError:
            raise
        except (RuntimeError, NotImplementedError, ValueError, TypeError) as error:
            got = f"a step that cannot run on the meta device: {str(error).splitlines()[0][:160]}"
            raise StepNeedsValues(Problem(got, NEED)) from error
        total = _total(loss)
        del loss
        tracker.end()
        return total

    @contextlib.contextmanager
    def intercepted(self, attention: AttentionHandler) -> Iterator[None]:
        """Within, the model runs on the meta device, and its attention is `attention`."""
        with torch.device(META), install_attention(self.model), intercept_attention(attention):
            yield

    def loss_of(self, inputs: Any, targets: Any) -> Tensor:
        """The loss of samples: a sum."""
        return _total(self._loss(inputs, targets))

    def _loss(self, inputs: Any, targets: Any) -> Any:
        """The outputs are dropped when the loss has been made of them, as a step drops them."""
        if self.loss is None:
            return model_loss(call_model(self.model, inputs), inputs)
        return self.loss(call_model(self.model, inputs), targets)


def _total(loss: Any) -> Tensor:
    first = loss[0] if isinstance(loss, tuple) else loss
    return first.sum() if isinstance(first, Tensor) and first.dim() else first


class ForwardRecord(NamedTuple):
    """By segment: the kernels of a forward, and its calls of attention."""

    kernels: list[tuple[int, Kernel]]
    attention: list[tuple[int, AttentionCall]]
    tracker: SegmentTracker


def record_forward(fake: FakeModel, num_samples: int) -> ForwardRecord:
    """Count the kernels of a forward of so many samples."""
    tracker, calls = fake.tracker(), list[tuple[int, AttentionCall]]()
    recorder = KernelRecorder(tracker, fake.weights, fake.calls)
    handle = FakeAttention(fake.plan.sequence_spec, recorder)

    def attend(call: AttentionCall) -> Tensor:
        calls.append((tracker.current, AttentionCall(call.q.detach(), call.k.detach(), call.v.detach())))
        return handle(call)

    samples = fake.samples(num_samples)
    with recorder:
        fake.forward(samples, tracker, attend)
    return ForwardRecord(recorder.kernels, calls, tracker)
