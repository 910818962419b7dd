"""Objective: the loss that is trained, as a sum and a count that add up over microbatches and ranks.

scalar loss  a loss given as one number. It is a mean: over the elements that torch's loss functions counted, else over
             the samples
call         one call of a torch loss function, observed while the loss is computed
Law: the sums and counts of the parts of a batch add up to those of the whole batch, or the loss is refused.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from fourfold.parts.torch_private import is_compiled
from fourfold.step.batch import Microbatch
from fourfold.step.dry_run.fixed_random import without_randomness
from fourfold.step.dry_run.loss_divisors import LossDivisors
from fourfold.step.dry_run.loss_graph import final_nodes
from fourfold.step.dry_run.loss_kinks import find_kinks
from fourfold.step.loss_call_sites import OutputIndex, signature
from fourfold.step.loss_function import LossFunction
from fourfold.step.loss_sum import Loss, sum_loss
from fourfold.step.model_call import call_model
from fourfold.step.tensor_tree import tree_leaves, tree_map
from fourfold.step.torch_losses import Count, LossCall, observing
from fourfold.step.uneven_means import actual_divisor, squared_ratio


class StageOutput(NamedTuple):
    """What the forward of a microbatch gives, and the calls of torch loss functions within it."""

    outputs: Any
    calls: Sequence[LossCall]


class ForwardResult(NamedTuple):
    """What forward and loss of a microbatch give."""

    outputs: Any
    raw_loss: Any
    """The value that the loss function returned."""
    calls: Sequence[LossCall]
    loss: Loss
    kinks: Sequence[str] = ()
    """In a dry run: the functions with a kink through which a mean over the batch passes."""


class ConsistencyCounts(Protocol):
    """What is summed besides the count of a scalar loss, to find parts of a batch whose losses do not add up."""

    def __call__(self, value: Tensor, means: Sequence[LossCall], count: Count, outputs: Any) -> list[Count]:
        """Values that are proportional to `count` only if all parts have the same divisors and the same means."""
        ...


class WholeBatch:
    """The batch is not split: it is its only part."""

    def __call__(self, value: Tensor, means: Sequence[LossCall], count: Count, outputs: Any) -> list[Count]:
        return []


class SplitBatch:
    """The batch is split."""

    def __init__(self, loss: LossFunction, divisors: LossDivisors) -> None:
        self._loss, self._divisors = loss, divisors

    def __call__(self, value: Tensor, means: Sequence[LossCall], count: Count, outputs: Any) -> list[Count]:
        counts = self._divisors.proportional_counts(value, count)
        if means:
            index = OutputIndex(self._loss.leaves(outputs))
            origins = [(each.name, each.call_site, index.index_of(each.value)) for each in means]
            counts.append(signature(*origins) * count)
        return counts


class Objective:
    """The loss of a training step. The first batches show how it must be weighted."""

    def __init__(self, loss: LossFunction, *, is_batch_split: bool) -> None:
        """`is_batch_split`: the parts of a batch must add up."""
        self._loss = loss
        self._around_loss: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
        self.is_shape_1_scalar: bool | None = None
        """Whether a loss of shape [1] is a scalar loss; None: not known yet."""
        self.is_manual_mean = False
        """Whether a scalar loss is the sum of a torch loss, which the user divides by its count."""
        self.is_mixed = False
        """Whether a scalar loss has other parts than torch's means, which differ from sample to sample."""
        self.divided_by: float | None = None
        """For a manual mean: the user's divisor as a multiple of the count; None: the loss is not a manual mean."""
        self.uses_counts = False
        """Whether a scalar loss is weighted by the elements that torch's loss functions count."""
        self.observes_forward = True
        """Whether calls are observed in the model's forward too."""
        self._has_calls_in_forward = False
        self.divisors = LossDivisors()
        self._consistency: ConsistencyCounts = SplitBatch(loss, self.divisors) if is_batch_split else WholeBatch()
        self._is_unused_call: list[bool] = []
        """Which calls do not change the scalar loss, such as metrics that are only printed; empty: not known."""
        self._is_trained_call: list[bool] = []
        self._loss_names: Sequence[str] = []
        self.dummy_batch: Microbatch | None = None
        """A sample for the forward of a rank without samples, if forward changes buffers; else None."""

    def loss_modules(self, model: nn.Module) -> nn.ModuleList:
        """The modules that the loss function is, or holds as a method, a partial or a closure; not the model's."""
        return self._loss.modules(model)

    @property
    def loss_names(self) -> str:
        """The loss functions that the last scalar loss was made of."""
        return ", ".join(dict.fromkeys(self._loss_names)) or "a hand-written mean"

    @property
    def is_model_loss(self) -> bool:
        return self._loss.is_of_model

    @property
    def is_compiled(self) -> bool:
        """Whether the loss function is compiled. It is then not observed: under a mode it would run uncompiled."""
        return self._loss.is_compiled

    def forward(self, model: nn.Module, part: Microbatch) -> StageOutput:
        """The model's outputs for a microbatch that is not empty."""
        if not self.observes_forward or is_compiled(model):
            return StageOutput(call_model(model, part.inputs, part.real_tokens), [])
        with observing() as calls:
            outputs = call_model(model, part.inputs, part.real_tokens)
        self._has_calls_in_forward |= bool(calls)
        return StageOutput(outputs, calls)

    def loss(self, output: StageOutput, part: Microbatch) -> ForwardResult:
        """The loss of a microbatch's outputs. Raises TaskError if there is no loss."""
        with contextlib.nullcontext([]) if self.is_compiled else observing() as calls:
            value = self._compute_loss_with_graph(output.outputs, part)
        return self._make_result(output.outputs, value, [*output.calls, *calls], part)

    def __call__(self, model: nn.Module, part: Microbatch) -> ForwardResult:
        """Forward and loss of a microbatch that is not empty. Raises TaskError if it returns no loss."""
        return self.loss(self.forward(model, part), part)

    def dry_run(self, model: nn.Module, part: Microbatch) -> ForwardResult:
        """The same without keeping the graph; records which calls the loss depends on, and its kinks and divisors."""
        with observing() as calls:
            outputs = call_model(model, part.inputs, part.real_tokens)
            if is_compiled(model):
                calls.clear()  # a dry run runs uncompiled; in a step these calls are not observed
            self._has_calls_in_forward |= bool(calls)
            # As in a step, a loss may differentiate outputs with respect to each other.
            if not torch.is_grad_enabled():
                outputs = self._loss.with_new_graph(outputs)
            with torch.enable_grad():
                value = self.raw_loss(outputs, part)
        kinks = self._find_kinks(outputs, value, calls, part.num_samples)
        derivatives = _derivatives(value, calls)
        if self.is_scalar(value, part.num_samples):
            self.divisors.record(value, part.num_samples)
        calls = [
            dataclasses.replace(c, value=c.value.detach(), derivative=d)
            for c, d in zip(calls, derivatives, strict=True)
        ]
        is_unused = [each.derivative is None for each in self._trained_calls(calls)]
        self._is_unused_call = [] if all(is_unused) else is_unused
        outputs, value = (tree_map(tree, Tensor.detach) for tree in (outputs, value))  # the graph is not kept
        return self._make_result(outputs, value, calls, part)._replace(kinks=kinks)

    def _find_kinks(self, outputs: Any, value: Any, calls: Sequence[LossCall], samples: int) -> Sequence[str]:
        if not isinstance(value, Tensor) or value.numel() != 1:
            return []
        rows = [t for t in self._loss.leaves(outputs) if t.dim() and len(t) == samples]
        return find_kinks(value, calls, rows)

    def raw_loss(self, outputs: Any, part: Microbatch) -> Any:
        """What the loss function returns."""
        with self._around_loss():
            return self._loss(outputs, part)

    @contextlib.contextmanager
    def calling_loss_within(self, around: Callable[[], contextlib.AbstractContextManager[None]]) -> Iterator[None]:
        """Within, each call of the loss function runs within such a context."""
        before, self._around_loss = self._around_loss, around
        try:
            yield
        finally:
            self._around_loss = before

    def force_eager(self, model: nn.Module) -> contextlib.AbstractContextManager[Any]:
        """Inside, compiled code runs uncompiled: a few forwards are not worth a compilation."""
        compiled = self.is_compiled or any(map(is_compiled, model.modules()))
        # Only if something is compiled: set_stance imports the compiler, which takes 1.25 s.
        return torch.compiler.set_stance("force_eager") if compiled else contextlib.nullcontext()

    def dummy_forward(self, model: nn.Module) -> None:
        """The forward of a rank without samples: it changes buffers as the other ranks' forwards do."""
        if self.dummy_batch is not None:
            with without_randomness(next(tree_leaves(self.dummy_batch.inputs)).device):
                call_model(model, self.dummy_batch.inputs)

    def dummy_loss(self, model: nn.Module) -> Tensor | None:
        """Forward and loss of a rank without samples, whose values are not used; None without a sample for it."""
        if self.dummy_batch is None:
            return None
        with without_randomness(next(tree_leaves(self.dummy_batch.inputs)).device):
            value = self._loss(call_model(model, self.dummy_batch.inputs), self.dummy_batch)
        return sum_loss(value, self.dummy_batch.num_samples).total

    def _make_result(self, outputs: Any, value: Any, calls: Sequence[LossCall], part: Microbatch) -> ForwardResult:
        trained = self._contributing_calls(value, self._trained_calls(calls))
        return ForwardResult(outputs, value, trained, self.sum_loss(value, trained, part.num_samples, outputs))

    def _trained_calls(self, calls: Sequence[LossCall]) -> Sequence[LossCall]:
        """The calls that require gradients; with autograd off, those that did when it was last on."""
        flags = [each.is_trained for each in calls]
        if any(flag is not None for flag in flags):  # then a call within no_grad, whose flag is None, is not trained
            self._is_trained_call = flags = [bool(flag) for flag in flags]
        elif len(self._is_trained_call) == len(calls):
            flags = list(self._is_trained_call)
        if any(flags):
            calls = [each for each, flag in zip(calls, flags, strict=True) if flag is not False]
        return calls

    def _contributing_calls(self, value: Any, calls: Sequence[LossCall]) -> Sequence[LossCall]:
        """The calls without those on which the loss did not depend in the dry run, unless it does now."""
        if len(self._is_unused_call) != len(calls) or not any(self._is_unused_call):
            return calls
        now = [node for node, _ in final_nodes(value.grad_fn)] if isinstance(value, Tensor) else []
        return [
            each
            for each, is_unused in zip(calls, self._is_unused_call, strict=True)
            if not is_unused or each.value.grad_fn in now
        ]

    def finish_first_step(self) -> None:
        """After the first training step: stop observing forward if it calls no loss function."""
        self.observes_forward = self._has_calls_in_forward

    def _compute_loss_with_graph(self, outputs: Any, part: Microbatch) -> Any:
        """The loss, with its graph where the divisors are read from it, in an evaluation too."""
        if torch.is_grad_enabled() or not self.divisors.has_divisors:
            return self.raw_loss(outputs, part)
        with torch.enable_grad():
            return self.raw_loss(self._loss.with_new_graph(outputs), part)

    def is_scalar(self, value: Any, num_samples: int) -> bool:
        """Whether this is a scalar loss. Shape [1] is one too, unless it is the unreduced value of one sample."""
        if not isinstance(value, Tensor) or value.numel() != 1:
            return False
        if value.dim() == 0:
            return True
        if num_samples > 1:
            self.is_shape_1_scalar = True
        return bool(self.is_shape_1_scalar)

    def sum_loss(self, value: Any, calls: Sequence[LossCall], num_samples: int, outputs: Any) -> Loss:
        """The loss as a sum and a count. `calls`: those it was made of, and `outputs` those of the model."""
        if not self.is_scalar(value, num_samples):
            return sum_loss(value, num_samples)
        means = [each for each in calls if each.is_mean]
        counts = [each.count for each in means]
        dtype = torch.promote_types(value.dtype, torch.float32)
        if not counts and self.is_manual_mean and calls:
            if not isinstance(calls[0].count, Tensor) and not calls[0].count:
                return Loss(calls[0].value.to(dtype), 0.0)  # not `value`: the user's division of 0 by 0 is NaN
            counts = [each.count for each in calls]
        self.uses_counts |= bool(counts)
        # Where means are counted, a part without a mean has no elements: `if mask.any(): … else: 0 * outputs.sum()`.
        count, *others = counts or [0.0 if self.uses_counts else float(num_samples)]
        total = value.reshape(()).to(dtype) * (count.to(dtype) if isinstance(count, Tensor) else count)
        if self.is_mixed and (counts or self.uses_counts):
            others.append(float(num_samples))
        if (
            self.divided_by is not None
            and calls
            and (self.is_manual_mean or len(calls) == 1)
            and not any(c.is_mean for c in calls)
        ):
            self._loss_names = [calls[0].name]
            divisor = actual_divisor(value.detach().reshape(()), calls[0].value, self.divided_by * count)
            return Loss(total, count, divisor, squared_ratio(divisor, count))
        self._loss_names = [each.name for each in means]
        others += self._consistency(value, means, count, outputs)
        if not others:
            return Loss(total, count)
        # Factors with no small integer relation between them: differences cannot cancel out.
        other = sum(math.sqrt(2 + index) * each for index, each in enumerate(others))
        return Loss(total, count, other, squared_ratio(other, count))


def _derivatives(value: Any, calls: Sequence[LossCall]) -> list[float | None]:
    """The derivative of a scalar loss with respect to each call; None: it does not depend on it, or it is not known."""
    tensors = [each.value for each in calls if each.value.requires_grad]
    if not (isinstance(value, Tensor) and value.numel() == 1 and value.requires_grad and tensors):
        return [None] * len(calls)
    if value.is_complex():
        return [None] * len(calls)
    with torch.enable_grad():
        grads = iter(torch.autograd.grad(value.sum(), tensors, retain_graph=True, allow_unused=True))
    derivatives = [next(grads) if each.value.requires_grad else None for each in calls]
    return [None if each is None else float(each) for each in derivatives]
