"""Objective: what is trained, as a sum and a count that add up over microbatches and ranks.

loss     of (outputs, targets); or None: the loss that the model returns itself
number   a loss given as one number: a mean over the elements that torch's loss functions were seen to count, else
         over the samples
Law: the sums and counts of the parts of a batch add up to those of the whole, or the loss is refused.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fourfold.step.batch import Loss, Microbatch, call_model, sum_loss, tree_leaves, tree_map
from fourfold.step.dry_run.fixed_random import without_randomness
from fourfold.step.dry_run.loss_divisors import LossDivisors
from fourfold.step.dry_run.loss_graph import final_nodes
from fourfold.step.dry_run.loss_kinks import find_kinks
from fourfold.step.loss_call_sites import OutputIndex, signature
from fourfold.step.torch_losses import Count, LossCall, observing
from fourfold.words.errors import Problem, TaskError


class ForwardResult(NamedTuple):
    """What a model made of a microbatch."""

    outputs: Any
    raw_loss: Any
    """As the loss function returned it."""
    calls: Sequence[LossCall]
    loss: Loss
    kinks: Sequence[str] = ()
    """Of a dry run: the functions with a kink that a mean over the batch goes through."""


class Objective:
    """The loss of one training step; learns from the first batches how it is to be weighted."""

    def __init__(self, loss: Callable[[Any, Any], Any] | None) -> None:
        self._loss = loss
        self.is_shape_1_scalar: bool | None = None
        """Whether a loss of shape [1] is a number; None: not known yet."""
        self.is_manual_mean = False
        """Whether a number is a sum of torch's that was divided by its count by hand."""
        self.is_mixed = False
        """Whether a number has, beside torch's means, other parts that differ from sample to sample."""
        self.divided_by: float | None = None
        """Where a number is a sum of torch's, divided by hand: by how many times its weight. None: it is not."""
        self.uses_counts = False
        """Whether a number is weighted by what torch's loss functions count."""
        self.observes_forward = True
        """Whether loss functions are observed in the model's forward too."""
        self._has_calls_in_forward = False
        self.divisors = LossDivisors()
        self._output_index = OutputIndex([])
        self._is_unused_call: list[bool] = []
        """Which calls do not change the number, as figures for people do not; empty: not known."""
        self._is_trained_call: list[bool] = []
        self.is_batch_split = True
        """Whether a batch is cut, so that its parts must add up."""
        self._loss_names: Sequence[str] = []
        self.dummy_batch: Microbatch | None = None
        """A sample for forwards of a rank that has none, where these must leave its buffers as they are elsewhere."""

    def loss_modules(self, model: nn.Module) -> nn.ModuleList:
        """The modules that the loss function is or holds, as a partial, a method or a closure; not the model."""
        loss: Any = self._loss
        held = [loss, getattr(loss, "__self__", None), getattr(loss, "func", None), *getattr(loss, "args", ())]
        held += [*(getattr(loss, "keywords", None) or {}).values()]
        held += [cell.cell_contents for cell in getattr(loss, "__closure__", None) or () if _is_cell_filled(cell)]
        own = set(model.modules())
        return nn.ModuleList(
            each for each in dict.fromkeys(map(_as_module, held)) if each is not None and each not in own
        )

    @property
    def loss_names(self) -> str:
        """What the last number was made of."""
        return ", ".join(dict.fromkeys(self._loss_names)) or "a mean made by hand"

    @property
    def is_model_loss(self) -> bool:
        return self._loss is None

    @property
    def is_compiled(self) -> bool:
        """Whether the loss function is compiled: under a mode that observes it, it would run as it was written."""
        return hasattr(self._loss, "_torchdynamo_orig_callable")

    def __call__(self, model: nn.Module, part: Microbatch) -> ForwardResult:
        """The loss of a microbatch that is not empty. Raises TaskError for what is no loss."""
        if self.observes_forward and not is_compiled(model):
            with observing() as calls:
                outputs = call_model(model, part.inputs, part.real_tokens)
                self._has_calls_in_forward |= bool(calls)
                value = self._compute_loss_with_graph(outputs, part)
        else:
            outputs = call_model(model, part.inputs, part.real_tokens)
            with contextlib.nullcontext([]) if self.is_compiled else observing() as calls:
                value = self._compute_loss_with_graph(outputs, part)
        return self._make_result(outputs, value, calls, part)

    def dry_run(self, model: nn.Module, part: Microbatch) -> ForwardResult:
        """The same in a dry run: no graph is kept; still it is seen which loss functions are trained."""
        with observing() as calls:
            outputs = call_model(model, part.inputs, part.real_tokens)
            if is_compiled(model):
                calls.clear()  # a dry run is not compiled: in a step they will not be seen
            self._has_calls_in_forward |= bool(calls)
            # As in a step, a loss may differentiate outputs by one another.
            if self._loss is not None and not torch.is_grad_enabled():
                outputs = tree_map(outputs, _require_grad)
            with torch.enable_grad():
                value = self._compute_loss(outputs, part)
        found = self._find_kinks(outputs, value, calls, part.num_samples)
        slopes = _derivatives(value, calls)
        if self.is_scalar(value, part.num_samples):
            self.divisors.record(value, part.num_samples)
        calls = [
            dataclasses.replace(c, value=c.value.detach(), derivative=s) for c, s in zip(calls, slopes, strict=True)
        ]
        slopes = [each.derivative for each in self._trained_calls(calls)]
        self._is_unused_call = [slope is None for slope in slopes] if any(slope is not None for slope in slopes) else []
        outputs, value = (tree_map(tree, Tensor.detach) for tree in (outputs, value))  # the graph is not kept
        return self._make_result(outputs, value, calls, part)._replace(kinks=found)

    def _find_kinks(self, outputs: Any, value: Any, calls: Sequence[LossCall], samples: int) -> Sequence[str]:
        if not isinstance(value, Tensor) or value.numel() != 1:
            return []
        rows = [] if self._loss is None else tree_leaves(outputs)
        return find_kinks(value, [each.value for each in calls], [t for t in rows if t.dim() and len(t) == samples])

    def force_eager(self, model: nn.Module) -> contextlib.AbstractContextManager[Any]:
        """Within, what is compiled runs as it was written: a few forwards are not worth a compilation."""
        compiled = self.is_compiled or any(map(is_compiled, model.modules()))
        # Only then: otherwise it would import the compiler, which takes 1.25 s.
        return torch.compiler.set_stance("force_eager") if compiled else contextlib.nullcontext()

    def dummy_forward(self, model: nn.Module) -> None:
        """A forward on a rank without samples: it leaves the buffers as the other ranks' forwards leave theirs."""
        if self.dummy_batch is not None:
            with without_randomness(next(tree_leaves(self.dummy_batch.inputs)).device):
                call_model(model, self.dummy_batch.inputs)

    def _make_result(self, outputs: Any, value: Any, calls: Sequence[LossCall], part: Microbatch) -> ForwardResult:
        trained = self._contributing_calls(value, self._trained_calls(calls))
        sources = list(tree_leaves(outputs)) if trained and self.is_batch_split and self._loss is not None else []
        self._output_index = OutputIndex(sources)
        try:
            loss = self.sum_loss(value, trained, part.num_samples)
        finally:
            self._output_index = OutputIndex([])  # what autograd has recorded is not kept
        return ForwardResult(outputs, value, trained, loss)

    def _trained_calls(self, calls: Sequence[LossCall]) -> Sequence[LossCall]:
        """The calls that are trained; where autograd is off, those which were the last time that it was on."""
        told = [each.is_trained for each in calls]
        if any(flag is not None for flag in told):  # beside these, what is called within no_grad is a figure too
            self._is_trained_call = told = [bool(flag) for flag in told]
        elif len(self._is_trained_call) == len(calls):
            told = list(self._is_trained_call)
        if any(told):
            calls = [each for each, flag in zip(calls, told, strict=True) if flag is not False]
        return calls

    def _contributing_calls(self, value: Any, calls: Sequence[LossCall]) -> Sequence[LossCall]:
        """The calls without those that did not change the number in the dry run, unless they do now."""
        if len(self._is_unused_call) != len(calls) or not any(self._is_unused_call):
            return calls
        now = [node for node, _ in final_nodes(value.grad_fn)] if isinstance(value, Tensor) else []
        return [
            each
            for each, idle in zip(calls, self._is_unused_call, strict=True)
            if not idle or each.value.grad_fn in now
        ]

    def finish_first_step(self) -> None:
        """After a first training step: forwards that call no loss function are not watched any more."""
        self.observes_forward = self._has_calls_in_forward

    def _compute_loss_with_graph(self, outputs: Any, part: Microbatch) -> Any:
        """The loss, with the steps of autograd that made it where its divisors are asked for in an evaluation too."""
        if self._loss is None or torch.is_grad_enabled() or not self.divisors.has_divisors:
            return self._compute_loss(outputs, part)
        with torch.enable_grad():
            return self._compute_loss(tree_map(outputs, _require_grad), part)

    def _compute_loss(self, outputs: Any, part: Microbatch) -> Any:
        if self._loss is None:
            if part.targets is not None:
                got = "a batch (inputs, targets), and loss = None"
                need = "inputs only, as a dict, the labels among them: the loss is the model's own"
                raise TaskError(
                    Problem(got, need, "samples that are dicts, or loss(outputs, targets)"), where="the batch"
                )
            return model_loss(outputs, part.inputs)
        if part.targets is None:
            got = f"a batch of {_input_names(part.inputs)} without targets, and a loss(outputs, targets)"
            attempt = "loss=None, which trains the loss that the model returns, or samples (inputs, targets)"
            raise TaskError(Problem(got, "targets for the loss", attempt), where="the batch")
        return self._loss(outputs, part.targets)

    def is_scalar(self, value: Any, num_samples: int) -> bool:
        """Whether a loss is one number, as one of shape [1] is, unless it is the value of one sample."""
        if not isinstance(value, Tensor) or value.numel() != 1:
            return False
        if value.dim() == 0:
            return True
        if num_samples > 1:
            self.is_shape_1_scalar = True
        return bool(self.is_shape_1_scalar)

    def sum_loss(self, value: Any, calls: Sequence[LossCall], num_samples: int) -> Loss:
        """The loss as a sum and a count. `calls`: of torch's loss functions, while it was made."""
        if not self.is_scalar(value, num_samples):
            return sum_loss(value, num_samples)
        means = [each for each in calls if each.is_mean]
        counts = [each.count for each in means]
        dtype = torch.promote_types(value.dtype, torch.float32)
        if not counts and self.is_manual_mean and calls:
            if not isinstance(calls[0].count, Tensor) and not calls[0].count:
                return Loss(calls[0].value.to(dtype), 0.0)  # The user's own division of 0 by 0 is no number.
            counts = [each.count for each in calls]
        self.uses_counts |= bool(counts)
        # Where means are counted, a part that takes none has no elements: `if mask.any(): … else: 0 * outputs.sum()`.
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
            divisor = _actual_divisor(value.detach().reshape(()), calls[0].value, self.divided_by * count)
            return Loss(total, count, divisor, _squared_ratio(divisor, count))
        self._loss_names = [each.name for each in means]
        if self.is_batch_split:
            others += self._consistency_counts(value, means, count)
        if not others:
            return Loss(total, count)
        # Factors of which no small sum is a multiple of another: what differs cannot cancel out.
        other = sum(math.sqrt(2 + index) * each for index, each in enumerate(others))
        return Loss(total, count, other, _squared_ratio(other, count))

    def _consistency_counts(self, value: Tensor, means: Sequence[LossCall], count: Count) -> list[Count]:
        """What is in proportion to `count` only where all parts are divided, and made of means, alike."""
        others = self.divisors.proportional_counts(value, count)
        if means:
            others.append(
                signature(*[(each.name, each.call_site, self._output_index.index_of(each.value)) for each in means])
                * count
            )
        return others


def _require_grad(tensor: Tensor) -> Tensor:
    """A tensor that autograd follows from here on."""
    return tensor.detach().requires_grad_() if tensor.is_floating_point() else tensor


def _as_module(held: Any) -> nn.Module | None:
    return held if isinstance(held, nn.Module) else None


def _is_cell_filled(cell: Any) -> bool:
    """Whether a variable of a closure has a value yet."""
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def is_compiled(model: nn.Module) -> bool:
    """Whether the whole of a model is compiled: then nobody sees which functions its forward calls."""
    in_place = getattr(model, "_compiled_call_impl", None) is not None
    return in_place or isinstance(model, torch.jit.ScriptModule) or hasattr(model, "_orig_mod")


def model_loss(outputs: Any, inputs: Any) -> Any:
    """The loss among a model's outputs: `.loss`, ["loss"], or the only number of a tuple. Raises TaskError."""
    if isinstance(outputs, Tensor):
        return outputs
    found = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if found is None and isinstance(outputs, tuple | list):
        tensors = [each for each in outputs if isinstance(each, Tensor)]
        numbers = [each for each in tensors if each.dim() == 0 and each.is_floating_point()]
        found = numbers[0] if len(numbers) == 1 else None
    if isinstance(found, Tensor):
        return found
    got = f"loss = None, and outputs ({type(outputs).__name__}) without a loss, of inputs {_input_names(inputs)}"
    need = 'outputs with .loss, ["loss"], or one number in a tuple'
    raise TaskError(Problem(got, need, '"labels" in each sample, or loss(outputs, targets)'), where="the loss")


def uneven_problem(names: str) -> Problem:
    """What is wrong with a number made of means over counts that are not proportional from part to part."""
    what = f"means over different elements ({names})" if names else "means over different elements"
    got = f"a loss that is one number, made of {what}, whose counts are not proportional from part to part of the batch"
    need = "one weight for each part, so that parts add up to the batch"
    return Problem(got, need, "unreduced values, or a pair (sum, count)")


def is_uneven(count: float, other_count: float, other_square: float) -> bool:
    """Whether the counts of several means were not proportional from part to part.

    count   of the first mean
    other   of the others, added up with fixed factors
    square  other² / count of each part
    Each added up over all parts: then other² = count · square if and only if they were (Cauchy and Schwarz).
    """
    return (
        bool(other_count) and not count * other_square - other_count * other_count <= 1e-10 * other_count * other_count
    )


def _derivatives(value: Any, calls: Sequence[LossCall]) -> list[float | None]:
    """How much a number changes with each of the calls that it was made of; None: it does not, or nobody knows."""
    followed = [each.value for each in calls if each.value.requires_grad]
    if not (isinstance(value, Tensor) and value.numel() == 1 and value.requires_grad and followed):
        return [None] * len(calls)
    if value.is_complex():
        return [None] * len(calls)
    with torch.enable_grad():
        found = iter(torch.autograd.grad(value.sum(), followed, retain_graph=True, allow_unused=True))
    slopes = [next(found) if each.value.requires_grad else None for each in calls]
    return [None if slope is None else float(slope) for slope in slopes]


def _actual_divisor(value: Tensor, total: Tensor, expected: Count) -> Count:
    """What a sum was divided by: the expected number, unless it is further off than rounding brings it."""
    close = 1e-5 if min(value.dtype.itemsize, total.dtype.itemsize) >= 4 else 2e-2
    value, total = value.double(), total.detach().double()
    wanted = torch.as_tensor(expected, dtype=torch.float64, device=value.device)
    is_off = (value * wanted - total).abs() > close * total.abs()  # not where either is no number
    divisor = (total / value).where(is_off & (value != 0), wanted)
    return float(divisor) if divisor.device.type == "cpu" else divisor


def _squared_ratio(other: Count, count: Count) -> Count:
    """other² / count; 0 where both are 0."""
    if isinstance(other, Tensor) or isinstance(count, Tensor):
        other = torch.as_tensor(other, dtype=torch.float64, device=count.device if isinstance(count, Tensor) else None)
        return torch.where(other == 0, 0.0, other * other / count)
    if count == 0:
        return math.inf if other else 0.0
    return other * other / count


def _input_names(inputs: Any) -> str:
    return ", ".join(map(str, inputs)) if isinstance(inputs, Mapping) else type(inputs).__name__
