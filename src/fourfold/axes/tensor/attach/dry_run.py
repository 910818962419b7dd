"""Dry run of the tensor axis, on one rank: the whole model and the model that is cut run on a few samples.

whole     the modules from before the cut, with random weights, on this rank alone: outputs and gradients
held      all elements of the whole weights are in memory; else they take nearly none, and no forward may write them
way       the dtype (None: the model's), and whether whole weights are held
cut       the model with this rank's parts of the same weights, with the other tensor ranks
findings  what differs, for the ranks to judge together
Law: all ranks make the same whole weights, each from a seed of its own name, and a rank's shards are parts of them. Of
the gradient of a weight this rank's part is kept: one whole gradient is in memory at a time.
Law: the whole run sends nothing. In the cut run a rank that fails tells the others at their next collective, so none
waits for it.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fourfold.axes.tensor.attach.axis import TensorAxis
from fourfold.axes.tensor.attach.rule_problems import GradMismatch, RuleProblems, split_dims
from fourfold.axes.tensor.attach.split_randomness import Draw, DrawRecorder, find_draws
from fourfold.axes.tensor.attach.tensor_parts import OutsideUses, TensorPlace, first_difference
from fourfold.axes.tensor.work.layers import local_part
from fourfold.comm.tensor_group import CallMismatch, CheckedTensorGroup
from fourfold.model.batch_statistics import frozen_statistics
from fourfold.model.fixed_random import without_randomness
from fourfold.model.model_call import call_model
from fourfold.model.rank_dropout import FoundDraw
from fourfold.plan.param_spec import TensorShard
from fourfold.proof.checks import CheckUnavailable, first_line, preserve_module, summarize_error
from fourfold.proof.float64_mode import Float64Mode
from fourfold.proof.grad_projections import NOISE_FLOOR, gradient_tolerance_of, is_close, run_backward
from fourfold.proof.module_trace import ModuleTrace
from fourfold.proof.random_weights import cast_real, copy_buffers, copy_tensor_attributes, random_tiled, window_weight
from fourfold.proof.weight_write_check import WeightWriteTracker
from fourfold.torch_kit.tensor_tree import tree_leaves, tree_map
from fourfold.torch_kit.torch_private import swapped_state
from fourfold.words.errors import PeerError, Problem, TaskError

SEED = 13
Weights = Mapping[str, nn.Parameter]
MODULE_ATTRIBUTES = vars(nn.Module()).keys()
"""The attributes that torch gives to every module."""
LossFunction = Callable[[Any, Any], Any]


class NotFinite(CheckUnavailable):
    """The whole model gives numbers that are not finite. Those of another batch may be."""


Way = tuple[torch.dtype | None, bool]


def ways(fits: Sequence[bool]) -> list[Way]:
    """The ways that fit into memory, the strictest first.

    fits  whether whole weights fit that are held: in float64, and in the model's dtype; and the same of others
    """
    by_dtype = zip((torch.float64, None), fits[:2], fits[2:], strict=True)
    return [(dtype, held) for dtype, held, others in by_dtype if held or others]


class Findings(NamedTuple):
    """What a rank has found.

    out_of_step  another rank was in another collective, or has failed: this one has stopped
    draws        for which part of its tensor each dropout of the forward draws
    unavailable  why nothing was compared; empty: it was
    is_finite    nothing was compared only because of numbers that are not finite: False
    fallback     why it was not compared in float64
    loss_error   why the loss was not compared
    """

    problems: Sequence[Problem] = ()
    gradients: Sequence[GradMismatch] = ()
    out_of_step: bool = False
    draws: Sequence[FoundDraw] = ()
    unavailable: str = ""
    is_finite: bool = True
    fallback: str = ""
    loss_error: str = ""


# ---- whole weights -------------------------------------------------------------------------------------------------


class WholeWeights(NamedTuple):
    """By name: random whole parameters, this rank's parts of them, and its parts of the gradients that these get."""

    parameters: Mapping[str, nn.Parameter]
    local: Mapping[str, nn.Parameter]
    gradients: Mapping[str, Tensor]


def make_whole_weights(
    model: nn.Module,
    shards: Mapping[str, TensorShard],
    dtype: torch.dtype | None,
    device: torch.device,
    *,
    is_held: bool,
) -> WholeWeights:
    """Whole parameters of a model that has been cut, drawn by name; integers are the model's own.

    dtype  of what is drawn; None: of the parameter
    Raises CheckUnavailable for integers that are split.
    """
    parameters, local, gradients = dict[str, nn.Parameter](), dict[str, nn.Parameter](), dict[str, Tensor]()
    for name, p in model.named_parameters():
        if p.is_floating_point() or p.is_complex():
            to = p.dtype if dtype is None else cast_real(p.new_empty(0), dtype).dtype
            whole = window_weight(name, shards[name].shape, to, device)
            whole = whole.contiguous() if is_held else whole
        elif shards[name].is_whole:
            whole = p.detach().clone()
        else:
            raise CheckUnavailable(f"{name} is split, and {str(p.dtype).removeprefix('torch.')}")
        local[name] = nn.Parameter(local_part(whole, shards[name]), p.requires_grad)
        parameters[name] = nn.Parameter(whole, p.requires_grad)
        if p.requires_grad:
            parameters[name].register_post_accumulate_grad_hook(_take_part(name, shards[name], gradients))
    return WholeWeights(parameters, local, gradients)


def _take_part(name: str, shard: TensorShard, gradients: dict[str, Tensor]) -> Callable[[Tensor], None]:
    def take(whole: Tensor) -> None:
        assert whole.grad is not None
        part, whole.grad = local_part(whole.grad, shard), None
        gradients[name] = gradients[name] + part if name in gradients else part

    return take


# ---- runs ----------------------------------------------------------------------------------------------------------


class Run(NamedTuple):
    """A forward of a model, whose backward may follow. `outputs`: the tensors among what it has returned."""

    returned: Any
    outputs: list[Tensor]
    trace: ModuleTrace
    draws: Sequence[Draw]


def _copied(tensor: Tensor) -> Tensor:
    """A tensor that a loss may write into, split over tensor ranks as this one is: outputs are compared too."""
    return tensor * 1 if tensor.is_floating_point() or tensor.is_complex() else tensor


class Later(NamedTuple):
    """What a second forward returns, and the buffers behind it: they show what the first one has kept."""

    outputs: list[Tensor]
    buffers: Mapping[str, Tensor]


class WholeRun(NamedTuple):
    """The whole model's run, the tensors of its loss, this rank's parts of its weights and of their gradients, and the
    upstream gradients of outputs and losses.
    """

    run: Run
    losses: Sequence[Tensor] | None
    weights: Weights
    gradients: Mapping[str, Tensor]
    upstream: list[Tensor | None]
    later: Later


class TensorDryRun:
    """The dry run of one rank. `loss`: of outputs and targets; None: the model has it among its outputs."""

    def __init__(self, model: nn.Module, axis: TensorAxis, device: torch.device, loss: LossFunction | None) -> None:
        self._model, self._axis, self._device, self._loss = model, axis, device, loss
        self._loss_error = ""
        self._shards = axis.shards
        self._place = TensorPlace(axis.group.index, axis.group.size, axis.splits_tokens)
        self._problems = RuleProblems(model, axis)

    def run(self, samples: Sequence[Any], possible: Sequence[Way]) -> Findings:
        """Compare the models on the first of these batches that the whole model takes, in the first of these ways that
        is possible. Collective on the tensor ranks.

        Raises PeerError, and what the model raises before anything is compared, when all ranks know of it.
        """
        group = CheckedTensorGroup(self._axis.group, self._device)
        try:
            return self._run_checked(samples, possible, group)
        except CallMismatch:
            return Findings(out_of_step=True)
        except PeerError:
            raise
        except Exception:
            with contextlib.suppress(CallMismatch):
                group.finish(has_failed=True)
            raise

    def _run_checked(self, samples: Sequence[Any], possible: Sequence[Way], group: CheckedTensorGroup) -> Findings:
        has_float64 = any(dtype is not None for dtype, _ in possible)
        reasons = [] if has_float64 else ["the model does not fit into memory in float64"]
        error: Exception | None = None
        is_finite = True
        for number, (batch, (dtype, is_held)) in enumerate(itertools.product(samples, possible)):
            try:
                whole = self._run_whole(batch, dtype, is_held=is_held)
            except CheckUnavailable as unavailable:
                is_finite = is_finite and not isinstance(unavailable, NotFinite)
                reasons.append(str(unavailable))
                continue
            except Exception as caught:  # float64 may be what the model fails in
                error = caught
                reasons.append(first_line(caught))
                continue
            group.agree(f"attempt {number}")
            findings = self._compare(whole, batch, dtype, group)
            if findings.problems:
                with contextlib.suppress(CallMismatch):
                    group.finish(has_failed=True)
            else:
                group.finish(has_failed=False)
            fallback = "" if dtype is not None else "; ".join(dict.fromkeys(reasons))
            return findings._replace(fallback=fallback, loss_error=self._loss_error)
        if error is not None:
            raise error
        group.finish(has_failed=False)
        reason = "; ".join(dict.fromkeys(reasons)) or "the model does not fit into memory"
        return Findings(unavailable=reason, is_finite=is_finite)

    # ---- both models --------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _computing(self, model: nn.Module, weights: Weights, dtype: torch.dtype | None) -> Iterator[None]:
        """Within, a model computes with these weights, and leaves no trace in its own."""
        buffers = copy_buffers(self._model, dtype)
        with (
            preserve_module(model),
            torch.enable_grad(),
            Float64Mode(new_tensors=True) if dtype is not None else contextlib.nullcontext(),
            swapped_state(model, {**buffers, **weights}),
            copy_tensor_attributes(model, dtype),
            without_randomness(self._device),
            # Of few samples: normalized by their own, nearly nothing of their gradients would be left to compare.
            frozen_statistics(model),
        ):
            yield

    def _forward(self, model: nn.Module, batch: Any, trace: ModuleTrace) -> Run:
        with trace, DrawRecorder(trace) as recorder:
            returned = call_model(model, batch[0])
        return Run(returned, list(tree_leaves(returned)), trace, recorder.draws)

    def _losses(self, run: Run, batch: Any, weights: Mapping[str, Tensor], ran: nn.Module) -> list[Tensor]:
        """The tensors that the loss returns. What it reads of the model are these weights, and what `ran` has kept."""
        if self._loss is None:
            return []
        with preserve_module(self._model), swapped_state(self._model, weights):
            for module, other in zip(self._model.modules(), ran.modules(), strict=True):
                vars(module).update({k: v for k, v in vars(other).items() if k not in MODULE_ATTRIBUTES})
            return list(tree_leaves(self._loss(tree_map(run.returned, _copied), batch[1])))

    def _forward_again(self, model: nn.Module, batch: Any) -> Later:
        """With gradients, which the model's own forward may take."""
        outputs = [each.detach().clone() for each in tree_leaves(call_model(model, batch[0]))]
        return Later(outputs, {name: buffer.clone() for name, buffer in model.named_buffers()})

    # ---- whole --------------------------------------------------------------------------------------

    def _run_whole(self, batch: Any, dtype: torch.dtype | None, *, is_held: bool) -> WholeRun:
        """The whole model's run, without the loss where that has no finite gradients."""
        try:
            return self._run_with(batch, dtype, is_held=is_held, has_loss=self._loss is not None)
        except NotFinite:
            if self._loss is None:
                raise
            whole = self._run_with(batch, dtype, is_held=is_held, has_loss=False)
            self._loss_error = "with random weights, its gradients are not finite"
            return whole

    def _run_with(self, batch: Any, dtype: torch.dtype | None, *, is_held: bool, has_loss: bool) -> WholeRun:
        structure = self._axis.structure
        for module, before in zip(self._model.modules(), structure.modules(), strict=True):
            before.training = module.training
        weights = make_whole_weights(self._model, self._shards, dtype, self._device, is_held=is_held)
        with self._computing(structure, weights.parameters, dtype):
            writes = WeightWriteTracker(structure, not_restored=weights.parameters.keys())
            with contextlib.nullcontext() if is_held else writes:
                run = self._forward(structure, _cast(batch, dtype), ModuleTrace(structure))
            if writes.written:  # elements of such a weight share memory
                raise CheckUnavailable("the model writes into a weight")
            if not all(bool(each.isfinite().all()) for each in run.outputs if each.requires_grad):
                raise NotFinite("outputs that are not finite")
            losses, state = None, {**dict(structure.named_buffers()), **weights.parameters}
            try:
                losses = self._losses(run, _cast(batch, dtype), state, structure) if has_loss else None
            except Exception as error:  # of the user's loss, which raises it again where it is trained
                self._loss_error = summarize_error(error)
            upstream = _random_upstream([*run.outputs, *(losses or ())])
            run_backward([*run.outputs, *(losses or ())], upstream)
            later = self._forward_again(structure, _cast(batch, dtype))
        parts, found = weights.local, weights.gradients
        gradients = {name: found.get(name, torch.zeros_like(p)) for name, p in parts.items() if p.requires_grad}
        if not all(bool(each.isfinite().all()) for each in gradients.values()):
            raise NotFinite("gradients that are not finite")
        run = run._replace(returned=None, outputs=[each.detach() for each in run.outputs])
        losses = None if losses is None else [each.detach() for each in losses]
        return WholeRun(run, losses, parts, gradients, upstream, later)

    # ---- cut ----------------------------------------------------------------------------------------

    def _compare(self, whole: WholeRun, batch: Any, dtype: torch.dtype | None, group: CheckedTensorGroup) -> Findings:
        """What differs where the model is cut. Collective on the tensor ranks."""
        trace = ModuleTrace(self._model)
        uses = OutsideUses(self._model, whole.weights, self._shards, trace)
        with self._computing(self._model, whole.weights, dtype), self._axis.region.with_group(group), uses:
            try:
                run = self._forward(self._model, _cast(batch, dtype), trace)
            except (CallMismatch, PeerError):
                raise
            except TaskError as error:  # of a split layer
                return Findings(error.problems)
            except Exception as error:
                return Findings([self._problems.failure(whole.run.trace, trace, error)])
            problem = self._problems.statistics(whole.run.trace, trace)
            if problem := problem or self._output_problem(whole.run, run, uses.names):
                return Findings([problem])
            losses: list[Tensor] = []
            if whole.losses is not None:
                try:
                    losses = self._losses(run, _cast(batch, dtype), whole.weights, self._model)
                except (CallMismatch, PeerError):
                    raise
                except Exception as error:
                    return Findings([self._problems.loss(summarize_error(error))])
                if not _are_close(whole.losses, losses):
                    return Findings([self._problems.loss()])
            shards = dict.fromkeys(self._shards.values())
            draws = find_draws(whole.run.draws, run.draws, self._place, [each for each in shards if not each.is_whole])
            if draws.refused:
                return Findings([self._problems.draw(draws.refused[0])])
            try:
                run_backward([*run.outputs, *losses], whole.upstream)
            except (CallMismatch, PeerError):
                raise
            except Exception as error:
                return Findings([self._problems.failure(whole.run.trace, trace, error)])
            later = self._forward_again(self._model, _cast(batch, dtype))
        gradients = self._compare_gradients(whole)
        if not gradients and (problem := self._state_problem(whole.later, later)):
            return Findings([problem])
        return Findings(gradients=gradients, draws=draws.known)

    def _state_problem(self, whole: Later, local: Later) -> Problem | None:
        """What is wrong if the first forward has kept something else than that of the whole model."""
        names = [n for n, buffer in local.buffers.items() if self._place.is_part(whole.buffers[n], buffer) is False]
        return None if not names and _are_close(whole.outputs, local.outputs) else self._problems.state(names)

    def _output_problem(self, whole: Run, local: Run, outside: Sequence[str]) -> Problem | None:
        if _are_close(whole.outputs, local.outputs):
            return None
        event = first_difference(whole.trace, local.trace, self._place, split_dims(self._model))
        ratio = 0.0
        if event is not None:
            full = next(each.tensor for each in whole.trace.events if each[:3] == event[:3])
            ratio = max((_ratio(part, event.tensor) for part in self._place.parts(full, event.tensor)), default=0.0)
        return self._problems.output(event, local.trace.events, ratio, outside)

    def _compare_gradients(self, whole: WholeRun) -> list[GradMismatch]:
        largest = max((g.abs().max().item() for g in whole.gradients.values() if g.numel()), default=0.0)
        found = []
        for name, expected in whole.gradients.items():
            p = whole.weights[name]
            gradient = torch.zeros_like(p) if p.grad is None else p.grad
            if is_close(expected, gradient, gradient_tolerance_of(p.dtype), floor=NOISE_FLOOR * largest):
                continue
            value, whole_value = _projection(gradient), _projection(expected)
            is_whole = self._shards[name].is_whole
            found.append(GradMismatch(name, is_whole, value, whole_value, _ratio(expected, gradient)))
        return found


def _are_close(whole: Sequence[Tensor], local: Sequence[Tensor]) -> bool:
    pairs = zip(whole, local, strict=False)
    return len(whole) == len(local) and all(a.shape == b.shape and is_close(a, b.detach()) for a, b in pairs)


def _cast(inputs: Any, dtype: torch.dtype | None) -> Any:
    return tree_map(inputs, lambda tensor: cast_real(tensor, dtype))


@torch.no_grad()
def _random_upstream(outputs: Sequence[Tensor]) -> list[Tensor | None]:
    """Random upstream gradients, one for each output that is finite and can be differentiated."""
    generator = torch.Generator().manual_seed(SEED)
    can_differ = [each.requires_grad and bool(each.isfinite().all()) for each in outputs]
    pairs = zip(outputs, can_differ, strict=True)
    return [random_tiled(each.detach(), generator).to(each.dtype) if differs else None for each, differs in pairs]


@torch.no_grad()
def _projection(tensor: Tensor) -> float:
    """The dot product with fixed random numbers."""
    numbers = random_tiled(tensor, torch.Generator().manual_seed(SEED))
    return float((numbers * tensor).sum().real)


@torch.no_grad()
def _ratio(whole: Tensor, local: Tensor) -> float:
    """How many times `whole` a tensor of the same shape is; 0 if it is no number of times."""
    a, b = whole.flatten().abs().double(), local.flatten().abs().double()
    square = float(a @ a)
    ratio = float(a @ b) / square if square else 0.0
    return ratio if ratio and is_close(whole * ratio, local) else 0.0
