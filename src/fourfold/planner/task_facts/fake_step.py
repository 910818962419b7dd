"""Fake steps: forwards of a few samples on the meta device, by a model as one rank of a plan has it, by segment.

cut     the model is, by the first tensor rank's shards, with fake peers (`fake_ranks.py`)
tokens  of a batch: the first context rank's, so many as each has
bounds  of a step whose operations depend on values, such as one that leaves early or chooses experts: the least and the
        most operations of a forward of one sample, among the first samples of the task's data
Law: shapes and dtypes are those of a run; nothing has values. Counts of two fake steps that differ in their samples
give the facts of one sample, and of a call. What depends on the data has no facts, and is refused with its bounds.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fourfold.axes.pipeline.work.tied import replace_by_copy
from fourfold.axes.tensor.attach.axis import model_layout, model_sequence_parallel
from fourfold.axes.tensor.rules.sequence_parallel import SequenceParallelLayout
from fourfold.axes.tensor.work.layers import cut_model
from fourfold.axes.tensor.work.sequence_parallel import split_tokens
from fourfold.axes.tensor.work.split_region import SplitRegion
from fourfold.feed.sample_rng import fetch_one
from fourfold.model.batch import POSITION_KEYS, has_token_dim, unpack_batch
from fourfold.model.model_call import call_model, model_loss
from fourfold.model.sdpa_interception import AttentionCall, AttentionHandler, intercept_attention
from fourfold.model.transformers_attention import install_attention
from fourfold.plan.plan import Plan
from fourfold.plan.precision import COMPUTE_FORMATS
from fourfold.planner.task_facts.fake_ranks import META, FakeTensorGroup, FakeTensorRanks
from fourfold.planner.task_facts.operations import FakeAttention, Kernel, KernelRecorder, MetaCalls
from fourfold.planner.task_facts.segments import SegmentTracker
from fourfold.step.initial_model import try_meta_model
from fourfold.torch_kit import mixed_precision
from fourfold.torch_kit.deferred_init import InitialModel
from fourfold.torch_kit.tensor_tree import tree_map
from fourfold.words.errors import FourfoldError, PlanError, Problem, TaskError
from fourfold.words.task import Source, Task
from fourfold.words.units import format_si

# ---- steps that depend on values -------------------------------------------------------------------------------------


NUM_SAMPLES = 8
NEED = "a model and a loss whose operations do not depend on the values of the data"


class StepNeedsValues(TaskError):
    """A step that cannot run without values."""


class Bounds(NamedTuple):
    """Operations of a forward of one sample."""

    least: float
    most: float


def forward_bounds(make_model: Callable[[], torch.nn.Module], source: Source) -> Bounds:
    """What forwards of the first samples compute. The model is made, with its weights."""
    model = make_model()
    counts = [_num_operations(model, source, number) for number in range(min(NUM_SAMPLES, len(source)))]
    return Bounds(min(counts), max(counts))


def _num_operations(model: torch.nn.Module, source: Source, number: int) -> float:
    inputs: Any = unpack_batch(fetch_one(source, number))[0]
    recorder = KernelRecorder(SegmentTracker([]), model.parameters(), MetaCalls())
    with torch.no_grad(), recorder:
        call_model(model, inputs)
    return sum(kernel.flops for _, kernel in recorder.kernels)


def with_bounds(error: StepNeedsValues, bounds: Bounds) -> TaskError:
    """The error that says what forwards compute in its place."""
    least, most = map(format_si, bounds)
    span = least if least == most else f"{least} to {most}"
    got = f"{error.problems[0].got}; {span} operations in a forward of a sample, by the first {NUM_SAMPLES}"
    return TaskError(Problem(got, NEED, "fourfold train: only running it shows what it costs"), where=error.where)


# ---- the model, and a batch ------------------------------------------------------------------------------------------


class LaidOutModel(NamedTuple):
    """`region`: of the tensor axis; None: the model is whole. `sequence_parallel`: where tokens are split."""

    model: nn.Module
    group: FakeTensorGroup
    region: SplitRegion | None
    sequence_parallel: SequenceParallelLayout = SequenceParallelLayout()


def lay_out(task: Task, plan: Plan) -> LaidOutModel:
    """The model for a plan's tp, sequence_parallel and precision. Raises PlanError or TaskError."""
    model = try_meta_model(task)
    if model is None or not all(p.is_meta for p in model.parameters()):
        got = "a model that cannot be made on the meta device"
        need = "a model whose constructor needs no values: what it costs is found without memory"
        raise TaskError(Problem(got, need, "shapes in the constructor, values in the initialization"))
    group = FakeTensorGroup(plan.tp)
    found = LaidOutModel(model, group, None)
    if plan.tp > 1:
        found = _cut(model, task.tensor, plan, group)
    if plan.precision != "keep":
        _cast(model, plan.precision)
    return found


def _cut(model: nn.Module, rules: Mapping[str, str], plan: Plan, group: FakeTensorGroup) -> LaidOutModel:
    layout = model_layout(model, rules, plan.tensor_spec)
    split = model_sequence_parallel(model, layout, plan.sequence_parallel)
    region = SplitRegion(group)
    cut_model(InitialModel(model), layout, region, FakeTensorRanks(), lambda name: True)
    split_tokens(model, split, region)
    return LaidOutModel(model, group, region, split)


def _cast(model: nn.Module, precision: str) -> None:
    dtype, excluded = getattr(torch, COMPUTE_FORMATS[precision].dtype), mixed_precision.full_precision_params(model)
    mixed_precision.cast_model(model, precision)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and name not in excluded and parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)


class FakeBatch(NamedTuple):
    """Of one sample, with a batch dim. `num_tokens`: of the whole sample, if its inputs have positions."""

    inputs: Any
    targets: Any
    num_tokens: int | None

    def of(self, num_samples: int, plan: Plan) -> tuple[Any, Any]:
        """Inputs and targets of so many samples, on the meta device, with the tokens of one context rank."""
        tokens = self.tokens_of_rank(plan)
        lengths = () if tokens is None or self.num_tokens is None else (self.num_tokens, tokens)
        expand = functools.partial(_on_meta, num_samples=num_samples, lengths=lengths)
        return tree_map(self.inputs, expand), tree_map(self.targets, expand)

    def tokens_of_rank(self, plan: Plan) -> int | None:
        """Of a sample; None: samples are not split over context ranks. Raises PlanError."""
        if plan.cp == 1:
            return None
        if self.num_tokens is None:
            need = f"inputs that are a dict with {' or '.join(POSITION_KEYS)}"
            raise PlanError(Problem(f"cp = {plan.cp} and inputs without positions", need, "cp = 1"), where="the plan")
        return plan.context_spec.padded_length(self.num_tokens) // plan.cp


def _on_meta(tensor: Tensor, *, num_samples: int, lengths: Sequence[int]) -> Tensor:
    shape = [num_samples, *tensor.shape[1:]]
    if lengths and has_token_dim(tensor, lengths[0]):
        shape[1] = lengths[1]
    return torch.empty(shape, dtype=tensor.dtype, device=META)


# ---- forwards --------------------------------------------------------------------------------------------------------


Loss = Callable[[Any, Any], Any] | None


class FakeModel(NamedTuple):
    """What a fake step runs.

    blocks   names of the chain
    same_as  by block: the first one that is equal to it
    calls    of all fake models of a task
    copies   of weights that other stages own: see `axes/pipeline/work/tied.py`
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
        """Of a sample; None: samples are not split over context ranks."""
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
                total = self.loss_of(*samples)
        except FourfoldError:
            raise
        except (RuntimeError, NotImplementedError, ValueError, TypeError) as error:
            got = f"a step that cannot run on the meta device: {str(error).splitlines()[0][:160]}"
            raise StepNeedsValues(Problem(got, NEED)) from error
        tracker.end()
        return total

    @contextlib.contextmanager
    def intercepted(self, attention: AttentionHandler) -> Iterator[None]:
        """Within, the model runs on the meta device, and its attention is `attention`."""
        with torch.device(META), install_attention(self.model), intercept_attention(attention):
            yield

    def loss_of(self, inputs: Any, targets: Any) -> Tensor:
        """The loss of samples: a sum. The outputs are dropped when it has been made of them, as a step drops them."""
        loss = self._loss(inputs, targets)
        first = loss[0] if isinstance(loss, tuple) else loss
        return first.sum() if isinstance(first, Tensor) and first.dim() else first

    def _loss(self, inputs: Any, targets: Any) -> Any:
        if self.loss is None:
            return model_loss(call_model(self.model, inputs), inputs)
        return self.loss(call_model(self.model, inputs), targets)


class ForwardRecord(NamedTuple):
    """By segment: the kernels of a forward, and its calls of attention."""

    kernels: list[tuple[int, Kernel]]
    attention: list[tuple[int, AttentionCall]]
    tracker: SegmentTracker


def record_forward(fake: FakeModel, num_samples: int) -> ForwardRecord:
    """Count the kernels of a forward of so many samples."""
    tracker, calls = fake.tracker(), list[tuple[int, AttentionCall]]()
    recorder = KernelRecorder(tracker, fake.weights, fake.calls)
    handle = FakeAttention(fake.plan.context_spec, recorder)

    def attend(call: AttentionCall) -> Tensor:
        calls.append((tracker.current, AttentionCall(call.q.detach(), call.k.detach(), call.v.detach())))
        return handle(call)

    samples = fake.samples(num_samples)
    with recorder:
        fake.forward(samples, tracker, attend)
    return ForwardRecord(recorder.kernels, calls, tracker)
