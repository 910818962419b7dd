"""Dry run: what a first batch shows of a loss and of a model's state, before a weight moves.

whole   a few samples in one forward: as many as a microbatch has
parts   the same samples in two forwards, of different sizes
judged  a few of them once more in float64, forward and backward (`loss_judge.py`)
Law: a loss that is one number is refused where the parts, each weighted by its count, do not make up the whole; and so
is a forward that leaves other buffers or weights behind for other samples, or writes weights where that is lost. On
every rank, if on any.
"""

import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fourfold.parts.data.param_access import explain_transform_errors
from fourfold.parts.torch_private import is_compiled
from fourfold.plan.plan import Plan
from fourfold.step.batch import (
    Microbatch,
    batch_and_parts,
    num_samples,
    slice_samples,
    split_microbatches,
    subsample,
    unpack_batch,
)
from fourfold.step.dry_run.fixed_random import without_randomness
from fourfold.step.dry_run.forward_state import (
    StateChanges,
    differing_across_forwards,
    differing_across_ranks,
    forward_count_problems,
    loss_state_problem,
    preserve_state,
    sample_dependence_problems,
    summarize_changes,
)
from fourfold.step.dry_run.grad_hook_check import hook_problems
from fourfold.step.dry_run.loss_additivity import LossComparison, compare_losses
from fourfold.step.dry_run.loss_check import STRICTEST_CHECK, CheckResult, check_loss, summarize_error
from fourfold.step.dry_run.random_weights import MemoryFit, find_memory_fit
from fourfold.step.dry_run.weight_write_check import WeightWriteCheck
from fourfold.step.model_call import call_model, eval_mode
from fourfold.step.objective import ForwardResult, Objective
from fourfold.step.tensor_tree import detached_clone, tree_leaves, tree_map
from fourfold.step.weights import Weights
from fourfold.words.errors import Problem, TaskError

NUM_CHECKED_SAMPLES = 6  # parts of 2 and 4: a model may take a single sample for a batch without its first dim
log = logging.getLogger("fourfold")


class DryRunForward(NamedTuple):
    """One forward, and what it left."""

    measured: ForwardResult | None
    """None where the loss is not asked for."""
    num_samples: int
    state_changes: StateChanges
    loss_state_changes: StateChanges
    """What it left in the buffers and parameters of the loss's modules."""
    has_writes: bool
    """Whether it has written state, or parameters, be it without a change."""
    has_randomness: bool
    min_itemsize: int
    num_elements: int
    """How many numbers its operations have made."""


class _ComparedBatch(NamedTuple):
    """What this rank has compared, and how many numbers a forward makes of each of these samples."""

    batch: Any
    elements_per_sample: int


class DryRun:
    """The dry run of one rank, of what it is that its objective learns."""

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        plan: Plan,
        device: torch.device,
        weights: Weights,
        *,
        num_local_ranks: int,
        is_log_rank: bool,
    ) -> None:
        """`num_sharing`: how many ranks use the memory of this device. `speaks`: whether this rank logs for all."""
        self._model, self._objective, self._plan, self._device = model, objective, plan, device
        self._num_local_ranks, self._is_log_rank = num_local_ranks, is_log_rank
        self._num_parts = plan.dp * plan.sp * plan.microbatches
        objective.is_batch_split = self._num_parts > 1
        self._weight_check = WeightWriteCheck(plan, weights)
        self._compares_state = True
        """Whether what forwards write is compared, be it trained or not; what is trained is in any case."""
        self._finished_modes: set[bool] = set()
        self._sample: Microbatch | None = None
        self._compared_batch: _ComparedBatch | None = None

    def is_needed(self, *, training: bool) -> bool:
        """Whether a batch must be tried out before it is used."""
        # With sp > 1 the loss has a dry run of its own: `run.sequence`.
        is_asked = self._num_parts > 1 or (training and self._weight_check.read_only_reason is not None)
        return is_asked and (training or self._plan.sp == 1) and not {training, True} & self._finished_modes

    def run(
        self,
        batch: Any,
        unsharded: Callable[[str], contextlib.AbstractContextManager[None]],
        all_gather_json: Callable[[Any], list[Any]],
        *,
        training: bool,
    ) -> None:
        """Try a batch out. Collective. `reading(kind)`: within, the model may be called.

        Raises TaskError on every rank where the loss or the model cannot be cut; what a rank's model or loss raises
        is raised there, and a TaskError on the others.
        """
        told: dict[str, Any] = {"error": None, "problems": [], "loss": None, "writes": False, "empty": True}
        told |= {"single": False, "counted": False, "changed": {}, "divisors": None}
        error: Exception | None = None
        self._compared_batch = None
        with unsharded("try out"):
            try:
                with explain_transform_errors():
                    told |= self._inspect_batch(batch, training=training)
            except Exception as caught:  # raised below, when the other ranks have heard of it
                error, told["error"] = caught, summarize_error(caught)
        everyone = all_gather_json(told)
        self._apply_reports(everyone, error)
        losses = [LossComparison(*told["loss"]) for told in everyone if told["loss"] is not None]
        is_known = any(loss.is_comparable for loss in losses)
        if training and is_known:
            self._check_in_float64(unsharded, all_gather_json)
        self._compared_batch = None
        empty = sum(told["empty"] for told in everyone)
        # An empty batch has shown nothing, nor has a loss that is no finite number; unreduced values are asked once.
        if empty < len(everyone) and (is_known or all(loss.is_unreduced for loss in losses)):
            self._finished_modes.add(training)
            writes = any(told["writes"] for told in everyone)
            self._objective.dummy_batch = self._sample if writes else self._objective.dummy_batch

    def _inspect_batch(self, batch: Any, *, training: bool) -> dict[str, Any]:
        """What a batch shows on this rank."""
        self._objective.divisors.reset()
        samples = num_samples(batch)
        told: dict[str, Any] = {"empty": samples == 0}
        self._weight_check.reset()
        if training and (problems := hook_problems(self._model, self._num_parts)):
            told["problems"] = problems
        elif samples and self._objective.is_model_loss and is_compiled(self._model):
            attempt = "its parts compiled: model.model = torch.compile(model.model)"
            told["problems"] = [_compiled_problem("loss = None and a compiled model", self._num_parts, attempt)]
        elif samples:
            told |= self._compare_forwards(batch, samples, training=training)
        told["problems"] = [*told.get("problems", []), *self._weight_check.problems()]
        return told

    def _compare_forwards(self, batch: Any, num_samples: int, *, training: bool) -> dict[str, Any]:
        few = min(num_samples, max(2, -(-num_samples // self._plan.microbatches)))
        tried = tree_map(slice_samples(batch, 0, few), lambda tensor: tensor.to(self._device))
        # Where each part has statistics of its own, these do not make a loss of the whole.
        local = self._plan.batch_norm == "local"
        self._compares_state = training and not local
        if training and (local or self._num_parts == 1):
            self._forward(tried)  # for what it writes into weights, which is refused in any case
            if self._num_parts == 1:
                return {}
        with eval_mode(self._model) if local or not training else contextlib.nullcontext():
            whole = self._forward(tried)
            value = None if whole.measured is None else whole.measured.raw_loss
            writes = whole.has_writes
            # Pairs are believed: with them a loss says that that of a part is what it wants.
            is_compared = isinstance(value, Tensor) and (training or value.numel() == 1)
            if not is_compared and not writes:
                return {}
            try:
                whole, parts = self._forward_parts(tried, whole)
            except (RuntimeError, ValueError, IndexError):
                if isinstance(value, Tensor) and value.numel() > 1 and not writes:
                    return {}  # A model for so many samples at a time: all parts of a batch have as many.
                raise
            problems = self._state_problems(tried, [*parts, whole]) if whole.state_changes else []
            if whole.loss_state_changes:
                problems += self._loss_state_problems(tried, [*parts, whole])
        is_number = whole.measured is not None and self._objective.is_scalar(whole.measured.raw_loss, whole.num_samples)
        if is_number and self._objective.is_compiled:
            problems.append(
                _compiled_problem("a compiled loss that is one number", self._num_parts, "the loss as it was written")
            )
        self._sample = split_microbatches(tree_map(slice_samples(tried, 0, 1), torch.clone), 1, self._device)[0]
        told: dict[str, Any] = {"problems": problems, "writes": self._compares_state and whole.has_writes}
        told |= {"single": self._objective.is_shape_1_scalar, "counted": self._objective.uses_counts}
        told["changed"], told["divisors"] = summarize_changes(whole.state_changes), self._objective.divisors.summarize()
        if not is_compared:
            return told
        loss = self._compare_losses(whole, parts)
        # With one part the model takes one sample at a time.
        if loss.is_comparable and not loss.has_randomness and len(parts) > 1:
            self._compared_batch = _ComparedBatch(tried, -(-whole.num_elements // whole.num_samples))
        return told | {"loss": loss}

    def _forward_parts(self, batch: Any, whole: DryRunForward) -> tuple[DryRunForward, list[DryRunForward]]:
        """The forward of the whole, and those of two parts. One sample makes a whole with itself."""
        together, parts = batch_and_parts(batch)
        if whole.num_samples > 1:
            try:
                return whole, [self._forward(part) for part in parts]
            except (RuntimeError, ValueError, IndexError):
                return self._forward_repeated_halves(batch, whole)
        try:
            return self._forward(together), [whole, whole]
        except (RuntimeError, ValueError, IndexError):
            # A model for one sample at a time: then all parts of a batch have one.
            return whole, [whole]

    def _forward_repeated_halves(self, batch: Any, whole: DryRunForward) -> tuple[DryRunForward, list[DryRunForward]]:
        """The same for a model that takes no fewer samples: two halves, each of them twice."""
        half = whole.num_samples // 2
        if whole.num_samples % 2:
            batch = slice_samples(batch, 0, 2 * half)
            whole = self._forward(batch)
        halves_twice = (
            tree_map(slice_samples(batch, start, start + half), lambda tensor: torch.cat([tensor, tensor]))
            for start in (0, half)
        )
        return whole, [self._forward(twice)._replace(num_samples=half) for twice in halves_twice]

    def _forward(self, batch: Any, *, num_forwards: int = 1) -> DryRunForward:
        samples = num_samples(batch)
        part = Microbatch(*unpack_batch(batch), samples, 0)
        modules = self._objective.loss_modules(self._model)
        # With autograd on, as in a step: a model may differentiate within forward.
        watch = self._weight_check
        with (
            preserve_state(modules) as loss_state,
            preserve_state(self._model, not_restored=watch.not_restored, counts_renorms=watch.counts_renorms) as state,
        ):
            with self._objective.force_eager(self._model), without_randomness(self._device) as watched:
                measured = [self._forward_loss(part) for _ in range(num_forwards)]
            watch.observe(state.write_tracker)
            changes = state.changes()
            writes = bool(changes or state.write_tracker.written)
            if not self._compares_state:
                changes = {name: value for name, value in changes.items() if name in watch.trained_names}
            loss_changes = loss_state.changes() if self._compares_state else {}
            seen = watched.has_randomness, watched.min_itemsize, watched.num_elements
            return DryRunForward(measured[-1], samples, changes, loss_changes, writes or bool(loss_changes), *seen)

    def _forward_loss(self, part: Microbatch) -> ForwardResult | None:
        # Copies: a model may write into its inputs, or differentiate by them.
        part = part._replace(
            inputs=tree_map(part.inputs, detached_clone), targets=tree_map(part.targets, detached_clone)
        )
        if self._plan.sp == 1:
            return self._objective.dry_run(self._model, part)
        call_model(self._model, part.inputs)
        return None

    def _compare_losses(self, whole: DryRunForward, parts: Sequence[DryRunForward]) -> LossComparison:
        forwards = (whole, *parts)
        of_whole, *of_parts = [forward.measured for forward in forwards if forward.measured is not None]
        numbers = [
            t.detach() for each in (of_whole, *of_parts) for t in tree_leaves(each.outputs) if t.is_floating_point()
        ]
        return compare_losses(
            of_whole,
            of_parts,
            part_sizes=[forward.num_samples for forward in parts],
            min_itemsize=min(forward.min_itemsize for forward in forwards),
            max_output=max(map(_max_finite, numbers), default=0.0),
        )._replace(
            has_randomness=any(forward.has_randomness for forward in forwards), loss_names=self._objective.loss_names
        )

    def _state_problems(self, batch: Any, forwards: Sequence[DryRunForward]) -> list[Problem]:
        """What is wrong with the buffers that these forwards have changed."""
        if names := differing_across_forwards([forward.state_changes for forward in forwards]):
            return sample_dependence_problems(names, self._num_parts, self._weight_check.trained_names)
        if self._plan.microbatches == 1:
            return []
        names = differing_across_forwards(
            [forwards[-1].state_changes, self._forward(batch, num_forwards=2).state_changes]
        )
        return forward_count_problems(names, self._plan.microbatches, self._weight_check.trained_names)

    def _loss_state_problems(self, batch: Any, forwards: Sequence[DryRunForward]) -> list[Problem]:
        """What is wrong with the buffers that the loss has changed; ranks without samples do not call it."""
        several = self._forward(batch, num_forwards=2).loss_state_changes
        names = differing_across_forwards([*(forward.loss_state_changes for forward in forwards), several])
        return [loss_state_problem(names, self._num_parts)] if names else []

    def _check_in_float64(
        self,
        unsharded: Callable[[str], contextlib.AbstractContextManager[None]],
        all_gather_json: Callable[[Any], list[Any]],
    ) -> None:
        """Judge the loss of a few samples in float64, and its gradients. Collective."""
        batch, activations, shown = None, 0, self._compared_batch
        if shown is not None:
            batch = subsample(shown.batch, min(num_samples(shown.batch), NUM_CHECKED_SAMPLES))
            # Gradients of what autograd keeps, too; one sample is judged as two.
            activations = 2 * shown.elements_per_sample * max(2, num_samples(batch))
        mine = find_memory_fit(
            self._model, self._device, num_local_ranks=self._num_local_ranks, num_activations=activations
        )
        room = MemoryFit(*map(all, zip(*all_gather_json(mine), strict=True)))
        verdict, error = CheckResult(), None
        with unsharded("judge"):
            try:
                if batch is not None:
                    with eval_mode(self._model) if self._plan.batch_norm == "local" else contextlib.nullcontext():
                        verdict = check_loss(
                            self._model, self._objective, *batch_and_parts(batch), memory_fit=room, device=self._device
                        )
            except Exception as caught:  # raised below, when the other ranks have heard of it
                error = caught
        everyone = all_gather_json({"verdict": verdict, "error": None if error is None else summarize_error(error)})
        _raise_first_error(everyone, error)
        verdicts = [CheckResult(*told["verdict"]) for told in everyone]
        if (problem := next((v.problem for v in verdicts if v.problem is not None), None)) is not None:
            raise TaskError(Problem(*problem), where="the loss")
        weaker = next((v for v in verdicts if v.fallback_reason), None)
        if weaker is not None and self._is_log_rank:
            how = "compared no gradients"
            if weaker.config is not None:
                how = f"computed {weaker.config} instead of {STRICTEST_CHECK}"
            log.warning("the dry run of the loss %s: %s", how, weaker.fallback_reason)

    def _apply_reports(self, reports: list[dict[str, Any]], error: Exception | None) -> None:
        _raise_first_error(reports, error)
        problems = [Problem(*problem) for told in reports for problem in told["problems"]]
        changed = [told["changed"] for told in reports if not told["empty"]]
        if not problems and (names := differing_across_ranks(changed)):
            problems = sample_dependence_problems(names, self._num_parts, self._weight_check.trained_names)
        if problems:
            raise TaskError(list(dict.fromkeys(problems)), where="the model")
        losses = [LossComparison(*told["loss"]) for told in reports if told["loss"] is not None]
        known = [loss for loss in losses if loss.is_comparable]
        self._objective.is_manual_mean = bool(known) and all(loss.is_manual_mean for loss in known)
        self._objective.is_mixed = any(loss.is_mixed for loss in known)
        divisors = [loss.divided_by for loss in known]
        is_divided = bool(known) and all(divisor is not None for divisor in divisors)
        self._objective.divided_by = 1.0 if self._objective.is_manual_mean else divisors[0] if is_divided else None
        self._objective.divisors.merge_ranks([told["divisors"] for told in reports])
        self._objective.is_shape_1_scalar = any(told["single"] for told in reports)
        self._objective.uses_counts = any(told["counted"] for told in reports)
        problems = [] if self._objective.is_manual_mean else [loss.problem for loss in known]
        problem = next((each for each in (*problems, *(loss.kink_problem for loss in known)) if each is not None), None)
        if problem is not None:
            raise TaskError(problem, where="the loss")
        writes = any(told["writes"] for told in reports)
        empty = [rank for rank, told in enumerate(reports) if told["empty"]]
        if writes and empty:
            got = f"a first batch without samples on rank {empty[0]}, and a model whose forward changes its buffers"
            raise TaskError(Problem(got, "a sample on each rank", "a larger batch"), where="the batch")


def _raise_first_error(reports: list[dict[str, Any]], error: Exception | None) -> None:
    """Raise what a rank has raised: `error` is this rank's."""
    failed = {rank: told["error"] for rank, told in enumerate(reports) if told["error"] is not None}
    if error is not None:
        raise error
    if failed:
        rank, text = next(iter(failed.items()))
        raise TaskError(Problem(f"rank {rank} failed on its first batch: {text}"), where="the task")


def _max_finite(tensor: Tensor) -> float:
    finite = tensor[tensor.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def _compiled_problem(what: str, num_parts: int, attempt: str) -> Problem:
    """What is wrong with a mean inside compiled code, where it is one of parts of a batch."""
    need = "to see which loss functions are called, and how many targets they count"
    attempt = f"{attempt}; or a loss that returns unreduced values, or a pair (sum, count)"
    return Problem(f"{what}, and a batch that is cut in {num_parts}", need, attempt)
