"""Loss judge: the parts of a batch make up the whole in float64, in value and in the gradient of each parameter.

copies   what is computed with instead of the model's parameters: in float64, near the model's own weights, so that
         nothing hides behind a gate of zero or a head of zeros; frozen ones as they are, for they stay so
mean     a loss's sum divided by its count, and a gradient divided by the same count
bound    how far rounding may bring whole and parts apart: 1e-8 in float64
Law: a loss or a model in which samples meet, in forward or in backward, is refused; afterwards the model, its
gradients and its hooks are as before. Parameters' own hooks are not called: the copies have none.

Where float64 cannot be had (no kernel, no memory), the gradients are compared in the model's own dtype; that is logged.
"""

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fourfold.parts.torch_private import swapped_state
from fourfold.step.batch import Microbatch, num_samples, unpack_batch
from fourfold.step.dry_run.backward import run_backward
from fourfold.step.dry_run.fixed_random import without_randomness
from fourfold.step.dry_run.float64_mode import Float64Mode
from fourfold.step.dry_run.float64_operands import WidenOperandsMode
from fourfold.step.dry_run.grad_projections import Projection, project_gradients
from fourfold.step.dry_run.loss_additivity import LossComparison, compare_losses
from fourfold.step.dry_run.preserve_module import copy_tensor_attributes, preserve_module
from fourfold.step.dry_run.random_weights import CheckConfig, MemoryFit, cast_real, copy_buffers, copy_parameters
from fourfold.step.dry_run.weight_write_tracker import WeightWriteTracker
from fourfold.step.objective import ForwardResult, Objective
from fourfold.step.tensor_tree import detached_clone, tree_leaves, tree_map
from fourfold.words.errors import FourfoldError, Problem

STRICTEST_CHECK = CheckConfig(torch.float64, "near", True)
CHECK_CONFIGS = (STRICTEST_CHECK, CheckConfig(torch.float64, "own", True), CheckConfig(None, "own", True))
# Of the largest of a parameter's gradients, by the size in bytes of the least precise number in a forward.
GRADIENT_TOLERANCE = {8: 1e-8, 4: 1e-2, 2: 2e-1, 1: 5e-1}
# Of the largest gradient of the model: a gradient that is 0 in theory is rounding noise in practice.
NOISE_FLOOR = 1e-3


class CheckUnavailable(Exception):
    """The loss cannot be judged in this way; it may be in another."""


class CheckResult(NamedTuple):
    """What a judgement has found; `judgement` says how it was made, None: not at all."""

    problem: Problem | None = None
    config: str | None = None
    fallback_reason: str = ""
    """Why the best judgement could not be had; empty where it was."""


class PassResult(NamedTuple):
    """The losses of one or more batches, and the projections of their summed gradients divided by their counts."""

    measured: list[ForwardResult]
    projections: list[Projection]
    min_itemsize: int


class LossCheck:
    """One judgement of a loss that has been compared before, in the model's own dtype."""

    def __init__(self, model: nn.Module, objective: Objective, config: CheckConfig, device: torch.device) -> None:
        self._model, self._objective, self._config, self._device = model, objective, config, device
        self._param_copies = copy_parameters(model, config)
        instead = {id(p): self._param_copies[name] for name, p in model.named_parameters()}
        self._loss_modules = objective.loss_modules(model)
        # A loss that holds the model has the same copies. What it has beside them is not trained.
        self._loss_param_copies = copy_parameters(self._loss_modules, config._replace(weights="own"), instead)
        self._copy_by_id = instead | {
            id(p): self._loss_param_copies[name] for name, p in self._loss_modules.named_parameters()
        }
        self._trained = {name: p for name, p in self._param_copies.items() if p.requires_grad}

    def run(self, whole: Any, parts: Sequence[Any]) -> Problem | None:
        """What is wrong with the loss; None: nothing. Raises Unfit where it cannot be judged so."""
        together, apart = self._run_pass([whole]), self._run_pass(parts)
        if self._config.dtype is not None:  # else it has been compared
            problem = self._compare_losses(together, apart, [num_samples(part) for part in parts]).problem
            if problem is not None:
                return problem
        return self._compare_gradients(together, apart)

    # ---- forward and backward -----------------------------------------------------------------------

    def _run_pass(self, batches: Sequence[Any]) -> PassResult:
        measured, itemsize, count = [], 8, 0.0
        for batch in batches:
            with self._patched_model() as modes:
                each = self._forward_backward(batch)
            itemsize = min(itemsize, modes.min_itemsize)
            measured.append(each)
            count += float(each.loss.count)
        if not count:
            raise CheckUnavailable("a loss of no elements")
        found = project_gradients(self._trained)
        gradients = [Projection(one.value / count, one.norm / count) for one in found]
        numbers = [*(float(each.loss.total) for each in measured), *(one.norm for one in gradients)]
        if not all(map(math.isfinite, numbers)):
            raise CheckUnavailable("a loss or a gradient that is not finite")
        return PassResult(measured, gradients, itemsize)

    def _forward_backward(self, batch: Any) -> ForwardResult:
        """The loss of a batch; its gradients are added to those of the copies."""
        samples = num_samples(batch)
        inputs, targets = tree_map(
            unpack_batch(batch), lambda tensor: cast_real(detached_clone(tensor), self._config.dtype)
        )
        measured = self._objective(self._model, Microbatch(inputs, targets, samples, 0))
        total = measured.loss.total
        if total.requires_grad and float(measured.loss.count):
            run_backward(total, [torch.ones_like(total)])
        outputs, value = (tree_map(tree, Tensor.detach) for tree in (measured.outputs, measured.raw_loss))
        loss = dataclasses.replace(measured.loss, total=total.detach())
        return ForwardResult(outputs, value, measured.calls, loss)

    @contextlib.contextmanager
    def _patched_model(self) -> Iterator[WidenOperandsMode]:
        """Within, the model is its copies, in the judgement's dtype; what a forward writes and keeps is dropped."""
        dtype = self._config.dtype
        widened = WidenOperandsMode(self._copy_by_id, dtype)
        with contextlib.ExitStack() as stack:
            for module, parameters in (
                (self._model, self._param_copies),
                (self._loss_modules, self._loss_param_copies),
            ):
                state: dict[str, Tensor] = {**parameters, **copy_buffers(module, dtype)}
                stack.enter_context(swapped_state(module, state))
                stack.enter_context(copy_tensor_attributes(module, dtype))
                writes = WeightWriteTracker(module)
                stack.callback(writes.restore)
                stack.enter_context(writes)
            stack.enter_context(self._objective.force_eager(self._model))
            if dtype is not None:
                stack.enter_context(Float64Mode(new_tensors=True))
            stack.enter_context(widened)
            watched = stack.enter_context(without_randomness(self._device))
            yield widened
            widened.min_itemsize = min(widened.min_itemsize, watched.min_itemsize)

    # ---- comparison ---------------------------------------------------------------------------------

    def _compare_losses(self, whole_pass: PassResult, parts_pass: PassResult, samples: list[int]) -> LossComparison:
        (whole,), parts = whole_pass.measured, parts_pass.measured
        numbers = [
            t for each in (whole, *parts) for t in tree_leaves(each.outputs) if t.is_floating_point() and t.numel()
        ]
        largest = max((float(t.nan_to_num(0.0, 0.0, 0.0).abs().max()) for t in numbers), default=0.0)
        itemsize = min(whole_pass.min_itemsize, parts_pass.min_itemsize)
        return compare_losses(whole, parts, part_sizes=samples, min_itemsize=itemsize, max_output=largest)

    def _compare_gradients(self, whole_pass: PassResult, parts_pass: PassResult) -> Problem | None:
        close = GRADIENT_TOLERANCE[min(whole_pass.min_itemsize, parts_pass.min_itemsize)]
        largest = max((one.norm for one in whole_pass.projections), default=0.0)
        off = []
        for name, whole, parts in zip(self._trained, whole_pass.projections, parts_pass.projections, strict=True):
            scale = max(whole.norm, parts.norm, max(NOISE_FLOOR, close) * largest)
            if abs(whole.value - parts.value) > close * scale:
                off.append(name)
        return _gradient_problem(off) if off else None


def check_loss(
    model: nn.Module,
    objective: Objective,
    whole: Any,
    parts: Sequence[Any],
    *,
    memory_fit: MemoryFit,
    device: torch.device,
) -> CheckResult:
    """The verdict of the first judgement that can be had. `room`: what of it fits into memory."""
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        return CheckResult(None, None, "the weights of TorchScript modules cannot be exchanged for copies")
    reasons: list[str] = []
    if not memory_fit.fits_float64:
        reasons.append("weights, gradients and activations do not fit into memory in float64")
    if not memory_fit.fits_model_dtype:
        return CheckResult(None, None, "a second copy of weights and gradients does not fit into memory")
    for judgement in CHECK_CONFIGS if memory_fit.fits_float64 else CHECK_CONFIGS[-1:]:
        try:
            with preserve_module(model), preserve_module(objective.loss_modules(model)):
                problem = _run_check(model, objective, judgement, whole, parts, device)
            return CheckResult(problem, str(judgement), "; ".join(reasons))
        except CheckUnavailable as error:
            reasons.append(f"{judgement}: {error}")
    return CheckResult(None, None, "; ".join(reasons))


def _run_check(
    model: nn.Module,
    objective: Objective,
    config: CheckConfig,
    whole: Any,
    parts: Sequence[Any],
    device: torch.device,
) -> Problem | None:
    try:
        judge = LossCheck(model, objective, config, device)
    except torch.OutOfMemoryError as error:  # all else is no matter of the model: weights may be gathered meanwhile
        raise CheckUnavailable(summarize_error(error)) from error
    try:
        return judge.run(whole, parts)
    except CheckUnavailable:
        raise
    except Exception as error:  # the model's or the loss's, which do well in their own dtype
        raise CheckUnavailable(summarize_error(error)) from error


def _gradient_problem(names: Sequence[str]) -> Problem:
    """What is wrong where gradients of the parts do not add up."""
    some = f"{', '.join(names[:3])}{' …' if len(names) > 3 else ''}"
    got = f"gradients of {some} that do not add up: those of a few samples together are not those of two parts of them"
    need = "a backward in which each sample's gradient is its own: the batch is cut into parts"
    attempt = "hooks and functions that look at one sample at a time; a pair (sum, count) trains each part by itself"
    return Problem(got, need, attempt)


def summarize_error(error: Exception) -> str:
    lines = str(error).splitlines()
    if isinstance(error, FourfoldError):  # its first line says how many problems there are
        return "; ".join(line.strip() for line in lines[1:])
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
