"""Loss check: in float64, the parts of a batch add up to the full batch, in loss and in each parameter's gradient.

copies  the parameters that a check computes with: in float64 and near the model's own weights, so that nothing hides
        behind a gate of zero or a head of zeros; frozen ones keep their values
pass    the full batch, or all of its parts: losses, and gradients, each divided by the pass's count
Also for unreduced values and their mean: a value must not depend on other samples.

tolerance  how much rounding may separate the two: a forward with another number of rows rounds differently
Law: a loss or a model that mixes samples, in forward or in backward, is refused. Afterwards the model, its gradients
and its hooks are as before. The parameters' own hooks are not called: the copies have none.

If float64 is unavailable (no kernel, no memory), gradients are compared in the model's own dtype, and that is logged.
Law: numbers of Python with which a model or a loss counts its forwards, such as `self.step += 1`, are named only if
each forward changes them, and two forwards of the same samples have different losses.
Law: what is not a mean, such as a sum or a loss between the samples of a batch, is further off than the tolerance.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fourfold.model.batch import Microbatch, num_samples, unpack_batch
from fourfold.model.fixed_random import without_randomness
from fourfold.model.loss_sum import MEND, is_uneven, uneven_problem
from fourfold.model.objective import ForwardResult, Objective
from fourfold.proof.checks import (
    LOSS_CHECKS,
    CheckConfig,
    CheckUnavailable,
    MemoryFit,
    preserve_module,
    summarize_error,
)
from fourfold.proof.float64_mode import Float64Mode, WidenOperandsMode
from fourfold.proof.grad_projections import NOISE_FLOOR, Projection, is_close, project_gradients, run_backward
from fourfold.proof.random_weights import cast_real, copy_buffers, copy_parameters, copy_tensor_attributes
from fourfold.proof.weight_write_check import WeightWriteTracker
from fourfold.torch_kit.tensor_tree import detached_clone, tree_leaves, tree_map
from fourfold.torch_kit.torch_private import swapped_state
from fourfold.words.error_notes import format_names
from fourfold.words.errors import Problem

# ---- additivity ----------------------------------------------------------------------------------------------------

# Relative to the largest of the losses, by the size in bytes of the least precise number in a forward.
LOSS_TOLERANCE = {8: 1e-8, 4: 1e-4, 2: 2e-2, 1: 1e-1}
# This fraction of the largest output counts too: a cross-entropy near 0 is rounded as its logits are.
OUTPUT_FRACTION = 1e-2


class LossComparison(NamedTuple):
    """The loss of a few samples together, and the mean of the losses of their parts, each weighted by its count."""

    full_mean: float
    parts_mean: float
    part_sizes: list[int]
    """The number of samples of each part."""
    is_comparable: bool = False
    """Whether there was anything to compare: finite numbers of some elements."""
    is_additive: bool = True
    is_uneven: bool = False
    """Whether the loss consists of several means whose counts are not proportional."""
    has_randomness: bool = False
    """Whether random numbers were drawn, so that the two differ anyway."""
    loss_names: str = ""
    is_mixed: bool = False
    """Whether the loss has, besides torch's means, other terms that differ from sample to sample."""
    is_unreduced: bool = False
    """Whether the loss is the mean of unreduced values."""
    mixes_outputs: bool = False
    """Whether the model's outputs for a sample are others in a part than among all samples."""
    is_torch_mean: bool = False
    """Whether the loss is one of torch's means."""
    change: str = ""
    """How the samples were changed, in words; empty: not at all."""
    broadcast: str = ""
    """The shapes of outputs and targets if they differ, and their elements are paired by broadcasting only."""

    @property
    def problem(self) -> Problem | None:
        """What is wrong with the loss, or with the model."""
        if self.is_uneven:
            return uneven_problem(self.loss_names)
        if self.is_additive or self.has_randomness:
            return None
        sizes, together = " and ".join(map(str, self.part_sizes)), f"{sum(self.part_sizes)} samples together"
        full, parts = _format_distinct(self.full_mean, self.parts_mean)
        kind = "unreduced loss values with a mean of" if self.is_unreduced else "a scalar loss of"
        if self.mixes_outputs and (self.is_unreduced or self.is_torch_mean):
            got = f"a model whose outputs for a sample change with the other samples: {kind} {full} for {together},"
            got += f" but {parts} for the same samples in parts of {sizes}"
            need = "a model in which samples do not see each other: the batch is split into parts"
            attempt = "GroupNorm or LayerNorm instead of batch statistics, attention within a sample; or dp = 1 and"
            return Problem(got, need, f"{attempt} microbatches = 1")
        got = f"{kind} {full} for {together}, but {parts} for the same samples in parts of {sizes}{self.change}"
        if self.broadcast:
            return Problem(f"{self.broadcast}: {got}", "outputs and targets of one shape", "outputs.view_as(targets)")
        if self.is_unreduced:
            need = "values that depend on their own sample alone: the batch is split into parts"
            return Problem(got, need, "return (values.sum(), len(values)), which trains each part by itself")
        need = "a mean over samples, or one of torch's own means: the batch is split into parts"
        return Problem(got, need, MEND)


def largest_number(*trees: Any) -> float:
    """The largest finite one among the floating-point tensors of trees; 0.0 if there is none."""
    floats = (t.detach() for t in tree_leaves(trees) if t.is_floating_point() and t.numel())
    return max((float(t.abs().nan_to_num(0.0, 0.0, 0.0).max()) for t in floats), default=0.0)


def compare_losses(
    full: ForwardResult,
    parts: Sequence[ForwardResult],
    *,
    part_sizes: list[int],
    min_itemsize: int,
    max_output: float | None = None,
) -> LossComparison:
    """Compare the loss of one forward with those of its parts.

    `min_itemsize` is that of the least precise number in the forwards, `max_output` the largest output (None: theirs).
    """
    forwards = (full, *parts)
    max_output = largest_number(*(each.outputs for each in forwards)) if max_output is None else max_output
    losses = [(float(each.loss.total.detach()), float(each.loss.count)) for each in forwards]
    means = [_weighted_mean(losses[:1]), _weighted_mean(losses[1:]), *(_weighted_mean([each]) for each in losses)]
    comparison = LossComparison(
        means[0],
        means[1],
        part_sizes,
        is_unreduced=full.raw_loss.numel() != 1,
        is_torch_mean=all(each.is_torch_mean for each in forwards),
        loss_names=", ".join(dict.fromkeys(call.name for each in forwards for call in each.calls)),
    )
    mixes_outputs = _mixes_outputs(full, parts, part_sizes, LOSS_TOLERANCE[min_itemsize] * max_output)
    comparison = comparison._replace(mixes_outputs=mixes_outputs)
    if not all(map(math.isfinite, means)):
        # Finite only among other samples?
        is_only_full = bool(losses[0][1]) and math.isfinite(means[0])
        return comparison._replace(is_comparable=is_only_full, is_additive=False)
    tolerance = LOSS_TOLERANCE[min_itemsize] * (max(map(abs, means)) + OUTPUT_FRACTION * max_output)
    counts = [(each.loss.count, each.loss.other_count, each.loss.other_square) for each in parts]
    totals = [sum(map(float, column)) for column in zip(*counts, strict=True)]
    return comparison._replace(
        is_comparable=bool(losses[0][1]) and totals[0] > 0,
        is_additive=abs(comparison.full_mean - comparison.parts_mean) <= tolerance,
        is_uneven=is_uneven(*totals),
        is_mixed=_is_mixed(forwards, tolerance),
    )


def _format_distinct(a: float, b: float) -> list[str]:
    """Two numbers, with as many digits as it takes to distinguish them."""
    digits = next((digits for digits in range(6, 17) if f"{a:.{digits}g}" != f"{b:.{digits}g}"), 17)
    return [f"{number:.{digits}g}" for number in (a, b)]


def _weighted_mean(losses: Sequence[tuple[float, float]]) -> float:
    """The mean of losses, each a sum and a count; those without elements add nothing."""
    count = sum(num_elements for _, num_elements in losses)
    return sum(total for total, num_elements in losses if num_elements) / count if count else 0.0


def _mixes_outputs(full: ForwardResult, parts: Sequence[ForwardResult], sizes: Sequence[int], tolerance: float) -> bool:
    """Whether outputs with a row for each sample differ."""
    columns = zip(*(tree_leaves(each.outputs) for each in (full, *parts)), strict=False)
    return any(_differs(whole, pieces, sizes, tolerance) for whole, *pieces in columns)


def _differs(whole: Tensor, pieces: Sequence[Tensor], sizes: Sequence[int], tolerance: float) -> bool:
    if not whole.is_floating_point() or not whole.dim() or len(whole) % sum(sizes):
        return False
    rows = len(whole) // sum(sizes)
    kept = [piece[: size * rows] for piece, size in zip(pieces, sizes, strict=True)]
    if any(piece.shape[1:] != whole.shape[1:] for piece in kept):  # such as a similarity to each other sample
        return False
    joined = torch.cat(kept)
    if joined.shape != whole.shape:
        return False
    return bool((((joined - whole).abs() > tolerance) | (joined.isnan() != whole.isnan())).any())


def _is_mixed(forwards: Sequence[ForwardResult], tolerance: float) -> bool:
    """Whether the terms that torch's means do not explain differ between forwards. A penalty on weights does not."""
    forwards = [each for each in forwards if float(each.loss.count)]  # a mean of nothing shows nothing
    calls = [each.calls for each in forwards]
    if not calls or not all(any(call.derivative is not None for call in each) for each in calls):
        return False
    if len({len(each) for each in calls}) > 1:  # a mean for each sample: the scalar is a mean of these
        return True
    unexplained = [_unexplained_loss(each) for each in forwards]
    deviations = [
        _peak_to_peak([call.derivative or 0.0 for call in column]) * max(abs(float(call.value)) for call in column)
        for column in zip(*calls, strict=True)
    ]
    return max(_peak_to_peak(unexplained), *deviations) > tolerance


def _unexplained_loss(result: ForwardResult) -> float:
    """The part of a scalar that torch's loss functions do not explain."""
    explained = sum((call.derivative or 0.0) * float(call.value) for call in result.calls)
    return float(result.raw_loss.detach()) - explained


def _peak_to_peak(numbers: Sequence[float]) -> float:
    return max(numbers) - min(numbers)


# ---- counted forwards ----------------------------------------------------------------------------------------------

ROUNDINGS = 4  # a forward on a GPU may not be the same twice


def count_problem(model: nn.Module, objective: Objective, forward: Callable[[], Tensor]) -> Problem | None:
    """What is wrong with a model or a loss that counts its forwards; None: it counts none that its loss depends on.

    forward  its loss for the same samples in each call, with the same weights and buffers
    """
    before = _numbers(model, objective)
    first, second = forward().detach(), forward().detach()
    names = [name for name, value in _numbers(model, objective).items() if value != before.get(name)]
    if not names or is_close(first, second, ROUNDINGS * torch.finfo(first.dtype).eps):
        return None
    got = f"each forward changes {format_names(names)}, and the loss depends on it"
    need = "a loss that does not depend on the number of forwards: the batch is split into parts"
    attempt = "to set it once in each step, outside of forward, such as in a callback; or dp = 1 and microbatches = 1"
    return Problem(got, need, attempt)


def _numbers(model: nn.Module, objective: Objective) -> dict[str, float]:
    """The numbers among the attributes of all modules, and of the loss, by name."""
    holders: list[tuple[str, Any]] = [*model.named_modules(), *(("", each) for each in objective.function.objects())]
    return {
        f"{path}.{name} of {type(holder).__name__}".removeprefix("."): value
        for path, holder in holders
        for name, value in getattr(holder, "__dict__", {}).items()
        if type(value) in (int, float)
    }


# ---- check ---------------------------------------------------------------------------------------------------------


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
        self._loss_modules = objective.function.modules(model)
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
        problem = self._compare(full, parts, (1.0, 1.0))
        if problem is None:
            return None

        def raw_loss() -> Tensor:
            return self._run_pass([full], 1.0).results[0].raw_loss

        return count_problem(self._model, self._objective, raw_loss) or problem

    def _compare(self, full: Any, parts: Sequence[Any], scales: tuple[float, float]) -> Problem | None:
        full_pass, parts_pass = self._run_pass([full], scales[0]), self._run_pass(parts, scales[1])
        if self._config.dtype is not None:  # in the model's own dtype, losses have been compared already
            (full_result,), itemsize = full_pass.results, min(full_pass.min_itemsize, parts_pass.min_itemsize)
            sizes = [num_samples(part) for part in parts]
            compared = compare_losses(full_result, parts_pass.results, part_sizes=sizes, min_itemsize=itemsize)
            if compared.problem is not None:
                return compared.problem
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
            with preserve_module(model), preserve_module(objective.function.modules(model)):
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
