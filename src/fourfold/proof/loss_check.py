"""Loss check: in float64, the parts of a batch add up to the full batch, in loss and in each parameter's gradient.

copies  the parameters that a check computes with: in float64 and near the model's own weights, so that nothing hides
        behind a gate of zero or a head of zeros; frozen ones keep their values
pass    the full batch, or all of its parts: losses, and gradients, each divided by the pass's count
Law: a loss or a model that mixes samples, in forward or in backward, is refused. Afterwards the model, its gradients
and its hooks are as before. The parameters' own hooks are not called: the copies have none.

If float64 is unavailable (no kernel, no memory), gradients are compared in the model's own dtype, and that is logged.
"""

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fourfold.model.batch import Microbatch, num_samples, unpack_batch
from fourfold.model.fixed_random import without_randomness
from fourfold.model.objective import ForwardResult, Objective
from fourfold.proof.backward import run_backward
from fourfold.proof.check_config import LOSS_CHECKS, CheckConfig, CheckUnavailable, MemoryFit
from fourfold.proof.checks import summarize_error
from fourfold.proof.float64_mode import Float64Mode
from fourfold.proof.float64_operands import WidenOperandsMode
from fourfold.proof.grad_projections import NOISE_FLOOR, Projection, project_gradients
from fourfold.proof.loss_additivity import LossComparison, compare_losses
from fourfold.proof.preserve_module import copy_tensor_attributes, preserve_module
from fourfold.proof.random_weights import cast_real, copy_buffers, copy_parameters
from fourfold.proof.state_problems import format_names
from fourfold.proof.weight_write_tracker import WeightWriteTracker
from fourfold.torch_kit.tensor_tree import detached_clone, tree_leaves, tree_map
from fourfold.torch_kit.torch_private import swapped_state
from fourfold.words.errors import Problem

# Relative to the largest of a parameter's gradients, by the size in bytes of the least precise number in a forward.
GRADIENT_TOLERANCE = {8: 1e-8, 4: 1e-2, 2: 2e-1, 1: 5e-1}
# Of upstream gradients. Powers of two: a backward that is linear gives the same, bit for bit.
SCALES = 2.0**-30, 2.0**30


class CheckResult(NamedTuple):
    """The result of a check. `config` describes how it was made; None: not at all."""

    problem: Problem | None = None
    config: str | None = None
    fallback_reason: str = ""
    """Why the strictest check was unavailable; empty if it was made."""
    is_scale_dependent: bool = False
    """Whether backward is not linear in the upstream gradient: it clamps, say."""


class PassResult(NamedTuple):
    """The losses of a pass, and the projections of its summed gradients divided by its count."""

    results: list[ForwardResult]
    projections: list[Projection]
    min_itemsize: int


class LossCheck:
    """One check of a loss that has already been compared in the model's own dtype."""

    def __init__(self, model: nn.Module, objective: Objective, config: CheckConfig, device: torch.device) -> None:
        self._model, self._objective, self._config, self._device = model, objective, config, device
        self._param_copies = copy_parameters(model, config)
        copies = {id(p): self._param_copies[name] for name, p in model.named_parameters()}
        self._loss_modules = objective.loss_modules(model)
        # A loss that holds the model shares its copies. Other parameters of the loss are not trained.
        self._loss_param_copies = copy_parameters(self._loss_modules, config._replace(weights="own"), copies)
        self._copy_by_id = copies | {
            id(p): self._loss_param_copies[name] for name, p in self._loss_modules.named_parameters()
        }
        self._trained = {name: p for name, p in self._param_copies.items() if p.requires_grad}
        self.is_scale_dependent = False

    def run(self, full: Any, parts: Sequence[Any]) -> Problem | None:
        """What is wrong with the loss, if anything. Raises CheckUnavailable if this check cannot be made."""
        if self._config.dtype is not None:
            with contextlib.suppress(CheckUnavailable):
                if self._compare(full, parts, SCALES) is None:
                    return None
                self.is_scale_dependent = True  # unless the next comparison shows a problem too
        return self._compare(full, parts, (1.0, 1.0))

    def _compare(self, full: Any, parts: Sequence[Any], scales: tuple[float, float]) -> Problem | None:
        full_pass, parts_pass = self._run_pass([full], scales[0]), self._run_pass(parts, scales[1])
        if self._config.dtype is not None:  # in the model's own dtype, losses have been compared already
            problem = self._compare_losses(full_pass, parts_pass, [num_samples(part) for part in parts]).problem
            if problem is not None:
                return problem
        return self._compare_gradients(full_pass, parts_pass)

    # ---- forward and backward -----------------------------------------------------------------------

    def _run_pass(self, batches: Sequence[Any], scale: float) -> PassResult:
        results, itemsize, count = [], 8, 0.0
        for batch in batches:
            with self._patched_model() as mode:
                result = self._forward_backward(batch, scale)
            itemsize = min(itemsize, mode.min_itemsize)
            results.append(result)
            count += float(result.loss.count)
        if not count:
            raise CheckUnavailable("a loss of no elements")
        count *= scale
        projections = [Projection(each.value / count, each.norm / count) for each in project_gradients(self._trained)]
        numbers = [*(float(result.loss.total) for result in results), *(each.norm for each in projections)]
        if not all(map(math.isfinite, numbers)):
            raise CheckUnavailable("a loss or a gradient that is not finite")
        return PassResult(results, projections, itemsize)

    def _forward_backward(self, batch: Any, scale: float) -> ForwardResult:
        """The loss of a batch; its gradients, times `scale`, are added to the gradients of the copies."""
        samples = num_samples(batch)
        inputs, targets = tree_map(
            unpack_batch(batch), lambda tensor: cast_real(detached_clone(tensor), self._config.dtype)
        )
        result = self._objective(self._model, Microbatch(inputs, targets, samples, 0))
        total = result.loss.total
        if total.requires_grad and float(result.loss.count):
            run_backward(total, [torch.full_like(total, scale)])
        outputs, raw_loss = (tree_map(tree, Tensor.detach) for tree in (result.outputs, result.raw_loss))
        loss = dataclasses.replace(result.loss, total=total.detach())
        return ForwardResult(outputs, raw_loss, result.calls, loss)

    @contextlib.contextmanager
    def _patched_model(self) -> Iterator[WidenOperandsMode]:
        """Within, the model computes with the copies in the check's dtype; what it writes or caches is dropped."""
        dtype = self._config.dtype
        operands_mode = WidenOperandsMode(self._copy_by_id, dtype)
        with contextlib.ExitStack() as stack:
            for module, parameters in (
                (self._model, self._param_copies),
                (self._loss_modules, self._loss_param_copies),
            ):
                # Not `torch.func.functional_call`: a checkpoint's second forward, in backward, needs these weights too.
                state: dict[str, Tensor] = {**parameters, **copy_buffers(module, dtype)}
                stack.enter_context(swapped_state(module, state))
                stack.enter_context(copy_tensor_attributes(module, dtype))
                writes = WeightWriteTracker(module)
                stack.callback(writes.restore)
                stack.enter_context(writes)
            stack.enter_context(self._objective.force_eager(self._model))
            if dtype is not None:
                stack.enter_context(Float64Mode(new_tensors=True))
            stack.enter_context(operands_mode)
            random_mode = stack.enter_context(without_randomness(self._device))
            yield operands_mode
            operands_mode.min_itemsize = min(operands_mode.min_itemsize, random_mode.min_itemsize)

    # ---- comparison ---------------------------------------------------------------------------------

    def _compare_losses(self, full_pass: PassResult, parts_pass: PassResult, part_sizes: list[int]) -> LossComparison:
        (full,), parts = full_pass.results, parts_pass.results
        outputs = [
            t for each in (full, *parts) for t in tree_leaves(each.outputs) if t.is_floating_point() and t.numel()
        ]
        largest = max((float(t.nan_to_num(0.0, 0.0, 0.0).abs().max()) for t in outputs), default=0.0)
        itemsize = min(full_pass.min_itemsize, parts_pass.min_itemsize)
        return compare_losses(full, parts, part_sizes=part_sizes, min_itemsize=itemsize, max_output=largest)

    def _compare_gradients(self, full_pass: PassResult, parts_pass: PassResult) -> Problem | None:
        tolerance = GRADIENT_TOLERANCE[min(full_pass.min_itemsize, parts_pass.min_itemsize)]
        largest = max((each.norm for each in full_pass.projections), default=0.0)
        names = []
        for name, full, parts in zip(self._trained, full_pass.projections, parts_pass.projections, strict=True):
            scale = max(full.norm, parts.norm, max(NOISE_FLOOR, tolerance) * largest)
            if abs(full.value - parts.value) > tolerance * scale:
                names.append(name)
        return _gradient_problem(names) if names else None


def check_loss(
    model: nn.Module,
    objective: Objective,
    full: Any,
    parts: Sequence[Any],
    *,
    memory_fit: MemoryFit,
    device: torch.device,
) -> CheckResult:
    """The result of the strictest check that can be made; `memory_fit` says which ones fit into memory."""
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        return CheckResult(None, None, "the weights of TorchScript modules cannot be replaced by copies")
    reasons: list[tuple[str, str]] = []
    if not memory_fit.fits_float64:
        reasons.append(("", "weights, gradients and activations do not fit into memory in float64"))
    if not memory_fit.fits_model_dtype:
        return CheckResult(None, None, "a second copy of weights and gradients does not fit into memory")
    for config in LOSS_CHECKS if memory_fit.fits_float64 else LOSS_CHECKS[-1:]:
        try:
            with preserve_module(model), preserve_module(objective.loss_modules(model)):
                problem, is_scale_dependent = _run_check(model, objective, config, full, parts, device)
            fallback_reason = "; ".join(where + cause for where, cause in reasons)
            return CheckResult(problem, str(config), fallback_reason, is_scale_dependent)
        except CheckUnavailable as error:
            reasons.append((f"{config}: ", str(error)))
    return CheckResult(None, None, "; ".join(dict.fromkeys(cause for _, cause in reasons)))


def _run_check(
    model: nn.Module,
    objective: Objective,
    config: CheckConfig,
    full: Any,
    parts: Sequence[Any],
    device: torch.device,
) -> tuple[Problem | None, bool]:
    try:
        check = LossCheck(model, objective, config, device)
    # Other errors are not the model's: this may all-gather weights.
    except torch.OutOfMemoryError as error:
        raise CheckUnavailable(summarize_error(error)) from error
    try:
        return check.run(full, parts), check.is_scale_dependent
    except CheckUnavailable:
        raise
    except Exception as error:  # from the model or the loss, which run in their own dtype
        raise CheckUnavailable(summarize_error(error)) from error


def _gradient_problem(names: Sequence[str]) -> Problem:
    """What is wrong if the gradients of the parts do not add up."""
    got = f"gradients of {format_names(names)} that do not add up: a few samples together give other gradients"
    got += " than the same samples in two parts"
    need = "a backward in which each sample's gradient depends on that sample alone: the batch is split into parts"
    attempt = "hooks and functions that look at one sample at a time; a pair (sum, count) trains each part by itself"
    return Problem(got, need, attempt)
