"""Objective: the loss that is trained, as a sum and a count that add up over microbatches and ranks.

scalar loss  a loss given as one number. It is a mean: over the elements that torch's loss functions counted, else over
             the samples
call         one call of a torch loss function that took a mean, observed while the loss is computed
Law: the sums and counts of the parts of a batch add up to those of the whole batch, or the loss is refused.
Law: a loss gets the batch that it is for, or the batch is refused.
"""

import contextlib
import dataclasses
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fourfold.axes.tensor.work.split_logits import whole_logits
from fourfold.model.batch import Microbatch, input_names
from fourfold.model.fixed_random import without_randomness
from fourfold.model.loss_sum import Loss, other_form_problem, sum_loss, with_others
from fourfold.model.model_call import call_model, model_loss
from fourfold.model.torch_losses import RESHAPING_NODES, LossCall, observing
from fourfold.torch_kit.tensor_tree import tree_leaves, tree_map
from fourfold.torch_kit.torch_private import is_compiled, is_compiled_function
from fourfold.words.error_notes import describe_function
from fourfold.words.errors import Problem, TaskError

# ---- loss functions -------------------------------------------------------------------------------------------------


class LossFunction:
    """What computes a loss: here the model, which returns it among its outputs."""

    is_of_model = True
    """Whether the model computes its loss itself, in its forward."""
    is_compiled = False
    """Whether the function is compiled. It is then not observed: under a mode it would run uncompiled."""

    def __call__(self, outputs: Any, part: Microbatch) -> Any:
        """The loss of a microbatch. Raises TaskError for targets that are missing, or not used."""
        if part.targets is not None:
            got = "a batch (inputs, targets), and loss = None"
            need = "inputs only, as a dict with the labels among them: the model returns the loss"
            raise TaskError(Problem(got, need, "samples that are dicts, or loss(outputs, targets)"), where="the batch")
        return model_loss(outputs, part.inputs)

    def modules(self, model: nn.Module) -> nn.ModuleList:
        """The modules that the function is, or holds as a method, a partial or a closure; not the model's."""
        return nn.ModuleList()

    def objects(self) -> list[Any]:
        """The function, and what it holds."""
        return []

    def with_new_graph(self, outputs: Any) -> Any:
        """The outputs, as the start of a graph of what the function computes of them."""
        return outputs


class UserLoss(LossFunction):
    """A function loss(outputs, targets)."""

    is_of_model = False

    def __init__(self, function: Callable[[Any, Any], Any]) -> None:
        self._function, self.is_compiled = function, is_compiled_function(function)

    def __call__(self, outputs: Any, part: Microbatch) -> Any:
        if part.targets is None:
            got = f"a batch of {input_names(part.inputs)} without targets, and a loss(outputs, targets)"
            attempt = "loss=None to train the loss that the model returns, or samples (inputs, targets)"
            raise TaskError(Problem(got, "targets for the loss", attempt), where="the batch")
        if self.is_compiled:  # the compiler would look into the collectives that gather logits
            outputs = tree_map(outputs, whole_logits)
        return self._function(outputs, part.targets)

    def __str__(self) -> str:
        return describe_function(self._function)

    def modules(self, model: nn.Module) -> nn.ModuleList:
        of_model = set(model.modules())
        modules = dict.fromkeys(each for each in self.objects() if isinstance(each, nn.Module))
        return nn.ModuleList(module for module in modules if module not in of_model)

    def objects(self) -> list[Any]:
        function: Any = self._function
        objects = [function, getattr(function, "__self__", None), getattr(function, "func", None)]
        objects += [*getattr(function, "args", ()), *(getattr(function, "keywords", None) or {}).values()]
        cells = getattr(function, "__closure__", None) or ()
        return objects + [cell.cell_contents for cell in cells if _is_cell_filled(cell)]

    def with_new_graph(self, outputs: Any) -> Any:
        return tree_map(outputs, _require_grad)


def _require_grad(tensor: Tensor) -> Tensor:
    """A tensor from which autograd starts a new graph; integers as they are."""
    return tensor.detach().requires_grad_() if tensor.is_floating_point() else tensor


def _is_cell_filled(cell: Any) -> bool:
    """Whether a closure's variable has a value yet."""
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


# ---- objective ------------------------------------------------------------------------------------------------------


MAX_NODES = 64  # walking over the graph takes time in each forward


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
    is_torch_mean: bool = False
    """Whether the loss is one of torch's means, perhaps cast or reshaped."""


class Objective:
    """The loss of a training step. The first batches show how it must be weighted."""

    def __init__(self, loss: LossFunction, *, is_batch_split: bool) -> None:
        """`is_batch_split`: the parts of a batch must add up."""
        self.function = loss
        self._around_loss: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
        self.is_shape_1_scalar: bool | None = None
        """Whether a loss of shape [1] is a scalar loss; None: not known yet."""
        self.has_scalar: bool | None = None
        """Whether the loss of the first batch was a scalar; None: not known, or nothing is split."""
        self.is_mixed = False
        """Whether a scalar loss has other parts than torch's means, which differ from sample to sample."""
        self.is_scale_dependent = False
        """Whether backward is not linear in the upstream gradient: it clamps, say."""
        self.uses_counts = False
        """Whether a scalar loss is weighted by the elements that torch's loss functions count."""
        self.observes_forward = True
        """Whether calls are observed in the model's forward too."""
        self._has_calls_in_forward = False
        self.is_batch_split = is_batch_split
        self._is_used: Sequence[bool] = []
        """Which calls the last scalar loss with a graph was made of: metrics that are only printed are not."""
        self._is_unused: Sequence[bool] = []
        """Which calls the loss of the dry run does not depend on."""
        self._loss_names: Sequence[str] = []
        self.dummy_batch: Microbatch | None = None
        """A sample for the forward of a rank without samples, if forward changes buffers; else None."""

    @property
    def loss_names(self) -> str:
        """The loss functions that the last scalar loss was made of."""
        return ", ".join(dict.fromkeys(self._loss_names)) or "a hand-written mean"

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
        with contextlib.nullcontext([]) if self.function.is_compiled else observing() as calls:
            value = self.raw_loss(output.outputs, part)
        if self.has_scalar is False and isinstance(value, Tensor) and value.dim() == 0 and torch.is_grad_enabled():
            raise TaskError(other_form_problem(), where="the loss")
        return self._make_result(output.outputs, value, [*output.calls, *calls], part)

    def __call__(self, model: nn.Module, part: Microbatch) -> ForwardResult:
        """Forward and loss of a microbatch that is not empty. Raises TaskError if it returns no loss."""
        return self.loss(self.forward(model, part), part)

    def dry_run(self, model: nn.Module, part: Microbatch) -> ForwardResult:
        """The same without keeping the graph; finds out which calls the loss depends on, and by which factor."""
        with observing() as calls:
            outputs = call_model(model, part.inputs, part.real_tokens)
            if is_compiled(model):
                calls.clear()  # a dry run runs uncompiled; in a step these calls are not observed
            self._has_calls_in_forward |= bool(calls)
            # As in a step, a loss may differentiate outputs with respect to each other.
            if not torch.is_grad_enabled():
                outputs = self.function.with_new_graph(outputs)
            with torch.enable_grad():
                value = self.raw_loss(outputs, part)
        derivatives = _derivatives(value, calls)
        self._is_unused = [each is None for each in derivatives]
        calls = [dataclasses.replace(c, derivative=d) for c, d in zip(calls, derivatives, strict=True)]
        return _without_graph(self._make_result(outputs, value, calls, part))

    def loss_of_outputs(self, outputs: Any, part: Microbatch) -> ForwardResult:
        """The loss of outputs that no forward has made, such as those of a few samples of a batch, with its graph."""
        outputs = self.function.with_new_graph(outputs)
        with torch.enable_grad(), observing() as calls:
            value = self.raw_loss(outputs, part)
        return self._make_result(outputs, value, calls, part)

    @contextlib.contextmanager
    def trying(self) -> Iterator[None]:
        """Within, losses that no batch has shown are computed: they teach nothing."""
        before = self.uses_counts, self._is_used, self._is_unused
        try:
            yield
        finally:
            self.uses_counts, self._is_used, self._is_unused = before

    def raw_loss(self, outputs: Any, part: Microbatch) -> Any:
        """What the loss function returns."""
        with self._around_loss():
            return self.function(outputs, part)

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
        compiled = self.function.is_compiled or any(map(is_compiled, model.modules()))
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
            value = self.function(call_model(model, self.dummy_batch.inputs), self.dummy_batch)
        return sum_loss(value, self.dummy_batch.num_samples).total

    def _make_result(self, outputs: Any, value: Any, calls: Sequence[LossCall], part: Microbatch) -> ForwardResult:
        used = self._used_calls(value, calls)
        loss = self.sum_loss(value, used, part.num_samples)
        return ForwardResult(outputs, value, used, loss, _is_torch_mean(value, used))

    def _used_calls(self, value: Any, calls: Sequence[LossCall]) -> Sequence[LossCall]:
        """The calls that a scalar was made of. Without a graph: those of the last one with as many calls."""
        if calls and isinstance(value, Tensor) and value.grad_fn is not None:
            near = _nodes_near(value, calls)
            known = self._is_unused if len(self._is_unused) == len(calls) else [False] * len(calls)
            flags = [
                call.value.requires_grad and (call.value.grad_fn in near or not is_unused)
                for call, is_unused in zip(calls, known, strict=True)
            ]
            # Within no_grad, as in the first forward of a reentrant checkpoint, none has a graph.
            self._is_used = flags if any(flags) else [not call.value.requires_grad for call in calls]
        if len(self._is_used) != len(calls):
            return calls
        return [call for call, is_used in zip(calls, self._is_used, strict=True) if is_used]

    def finish_first_step(self) -> None:
        """After the first training step: stop observing forward if it calls no loss function."""
        self.observes_forward = self._has_calls_in_forward

    def is_scalar(self, value: Any, num_samples: int) -> bool:
        """Whether this is a scalar loss. Shape [1] is one too, unless it is the value of one sample, or the only one
        that the loss has left: a dry run tells."""
        if not isinstance(value, Tensor) or value.numel() != 1:
            return False
        if value.dim() == 0:
            return True
        return num_samples > 1 if self.is_shape_1_scalar is None else self.is_shape_1_scalar

    def sum_loss(self, value: Any, calls: Sequence[LossCall], num_samples: int) -> Loss:
        """The loss as a sum and a count. `calls`: those it was made of."""
        if not self.is_scalar(value, num_samples):
            return sum_loss(value, num_samples)
        self._loss_names = [each.name for each in calls]
        self.uses_counts |= bool(calls)
        # Where means are counted, a part without a mean has no elements: `if mask.any(): … else: 0 * outputs.sum()`.
        count, *others = [each.count for each in calls] or [0.0 if self.uses_counts else float(num_samples)]
        if self.is_mixed and self.uses_counts:
            others.append(float(num_samples))
        if calls and self.is_batch_split:  # all parts take the same means
            kind = repr((self._loss_names, _is_torch_mean(value, calls)))
            others.append((1.0 + zlib.crc32(kind.encode()) / 2**32) * count)
        elif self.uses_counts and self.is_batch_split:  # a number without a count would be dropped
            others.append((value.detach().isfinite() & (value.detach() != 0)).double().reshape(()))
        dtype = torch.promote_types(value.dtype, torch.float32)
        total = value.reshape(()).to(dtype) * (count.to(dtype) if isinstance(count, Tensor) else count)
        return with_others(total, count, others) if others else Loss(total, count)


def _is_torch_mean(value: Any, calls: Sequence[LossCall]) -> bool:
    """Whether a loss is the mean that its only call has taken."""
    if len(calls) != 1 or not isinstance(value, Tensor):
        return False
    node = value.grad_fn
    while node is not None and node is not calls[0].value.grad_fn and node.name() in RESHAPING_NODES:
        node = node.next_functions[0][0]
    return value is calls[0].value or (node is not None and node is calls[0].value.grad_fn)


def _nodes_near(value: Tensor, calls: Sequence[LossCall]) -> set[Any]:
    """The nodes of autograd's graph nearest to a scalar, until those of all calls are among them."""
    missing = {call.value.grad_fn for call in calls} - {None}
    pending, found = deque([value.grad_fn]), set[Any]()
    while missing and pending and len(found) < MAX_NODES:
        node = pending.popleft()
        if node is None or node in found:
            continue
        found.add(node)
        if node in missing:  # what is behind it is its own
            missing.remove(node)
        else:
            pending += [before for before, _ in node.next_functions]
    return found


def _without_graph(result: ForwardResult) -> ForwardResult:
    outputs, raw_loss = (tree_map(tree, Tensor.detach) for tree in (result.outputs, result.raw_loss))
    calls = [dataclasses.replace(each, value=each.value.detach()) for each in result.calls]
    loss = dataclasses.replace(result.loss, total=result.loss.total.detach())
    return result._replace(outputs=outputs, raw_loss=raw_loss, calls=calls, loss=loss)


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
