"""The dry run of a first batch: what it shows of a model and its loss, before a weight changes.

full, parts  a few samples in one forward, and the same samples in two (`forward_comparison.py`)
check        some of these samples once more in float64, forward and backward (`loss_check.py`)
Law: a scalar loss is refused if the losses of the parts, each weighted by its count, do not make up the full loss. A
forward is refused if the buffers or weights that it writes depend on its samples, or if its write would be lost. If one
rank refuses, all ranks do.
"""

import contextlib
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fourfold.parts.data.param_access import explain_transform_errors
from fourfold.parts.torch_private import is_compiled
from fourfold.plan.batch_split import BatchSplit
from fourfold.step.batch import (
    batch_and_parts,
    num_samples,
    shorten,
    subsample,
)
from fourfold.step.batch_statistics import BatchStatistics
from fourfold.step.dry_run.check_config import STRICTEST_LOSS_CHECK, MemoryFit, find_memory_fit
from fourfold.step.dry_run.forward_comparison import ForwardComparison, compiled_problem
from fourfold.step.dry_run.forward_state import (
    differing_across_ranks,
)
from fourfold.step.dry_run.grad_hook_check import hook_problems
from fourfold.step.dry_run.loss_additivity import LossComparison
from fourfold.step.dry_run.loss_check import CheckResult, check_loss, peer_failed, summarize_error
from fourfold.step.dry_run.state_problems import sample_dependence_problems
from fourfold.step.dry_run.weight_write_check import WeightWriteCheck
from fourfold.step.model_call import eval_mode
from fourfold.step.objective import Objective
from fourfold.step.tensor_tree import tree_map
from fourfold.words.errors import Problem, TaskError

NUM_CHECKED_SAMPLES = 6  # parts of 2 and 4: a model may mistake a single sample for a batch without its first dim
NUM_CHECKED_TOKENS = 256
log = logging.getLogger("fourfold")

Unsharded = Callable[[str], contextlib.AbstractContextManager[None]]
"""`unsharded(kind)`: within, the model may be called."""
AllGatherJSON = Callable[[Any], list[Any]]


class DryRun:
    """The dry run of one rank. It teaches the objective how to weight the loss of the parts of a batch."""

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        statistics: BatchStatistics,
        split: BatchSplit,
        device: torch.device,
        weight_check: WeightWriteCheck,
        *,
        num_local_ranks: int,
        is_log_rank: bool,
    ) -> None:
        """`num_local_ranks` ranks share the memory of this device. `is_log_rank`: this rank logs for all."""
        self._model, self._objective, self._split, self._device = model, objective, split, device
        self._statistics = statistics
        self._num_local_ranks, self._is_log_rank = num_local_ranks, is_log_rank
        self._weight_check = weight_check
        self._comparison = ForwardComparison(model, objective, split, device, weight_check)
        self._finished_modes: set[bool] = set()

    def is_needed(self, *, training: bool) -> bool:
        """Whether a batch needs a dry run before it is used."""
        has_risk = self._split.num_parts > 1 or (training and self._weight_check.read_only_reason is not None)
        # With sp > 1, the sequence axis has a dry run of the loss of its own (`step/sequence`).
        is_shown_here = training or self._split.num_token_shards == 1
        return has_risk and is_shown_here and not {training, True} & self._finished_modes

    def run(self, batch: Any, unsharded: Unsharded, all_gather_json: AllGatherJSON, *, training: bool) -> None:
        """Run the dry run of a batch. Collective.

        Raises TaskError on every rank if the loss or the model cannot be split into parts. An exception of a rank's
        model or loss is raised on that rank, and a TaskError on the others.
        """
        report: dict[str, Any] = {"error": None, "problems": [], "loss": None, "has_writes": False, "is_empty": True}
        report |= {"is_shape_1_scalar": False, "uses_counts": False, "state_changes": {}}
        error: Exception | None = None
        self._comparison.compared_batch = None
        with unsharded("try out"), self._statistics.in_dry_run():
            try:
                with explain_transform_errors():
                    report |= self._inspect_batch(batch, training=training)
            except Exception as caught:  # raised below, after the other ranks have received the report
                error, report["error"] = caught, summarize_error(caught)
        reports = all_gather_json(report)
        self._apply_reports(reports, error)
        losses = [LossComparison(*each["loss"]) for each in reports if each["loss"] is not None]
        is_comparable = any(loss.is_comparable for loss in losses)
        if training and is_comparable:
            self._check_in_float64(unsharded, all_gather_json)
        self._comparison.compared_batch = None
        # An empty batch shows nothing, nor does a loss that is not finite. Unreduced values need one dry run only.
        is_empty = all(each["is_empty"] for each in reports)
        if not is_empty and (is_comparable or all(loss.is_unreduced for loss in losses)):
            self._finished_modes.add(training)
            if self._needs_empty_ranks(reports):
                self._objective.dummy_batch = self._comparison.sample

    def _inspect_batch(self, batch: Any, *, training: bool) -> dict[str, Any]:
        """What a batch shows on this rank."""
        is_empty = num_samples(batch) == 0
        report: dict[str, Any] = {"is_empty": is_empty}
        self._weight_check.reset()
        if training and (problems := hook_problems(self._model, self._split.num_parts)):
            report["problems"] = problems
        elif not is_empty and self._objective.is_model_loss and is_compiled(self._model):
            attempt = "compiling parts of the model: model.model = torch.compile(model.model)"
            report["problems"] = [compiled_problem("loss = None and a compiled model", self._split.num_parts, attempt)]
        elif not is_empty:
            report |= self._comparison.run(batch, training=training)
        report["problems"] = [*report.get("problems", []), *self._weight_check.problems()]
        return report

    def _check_in_float64(self, unsharded: Unsharded, all_gather_json: AllGatherJSON) -> None:
        """Check the loss of a few samples in float64, with its gradients. Collective."""
        batch, activations, compared = None, 0, self._comparison.compared_batch
        if compared is not None:
            batch = subsample(compared.batch, min(num_samples(compared.batch), NUM_CHECKED_SAMPLES))
            batch = tree_map(batch, lambda tensor: tensor.flip(0))  # other parts than those compared before
            # Activations have gradients too; a single sample is checked as two.
            activations = 2 * compared.elements_per_sample * max(2, num_samples(batch))
        local_fit = find_memory_fit(
            self._model, self._device, num_local_ranks=self._num_local_ranks, num_activations=activations
        )
        memory_fit = MemoryFit(*map(all, zip(*all_gather_json(local_fit), strict=True)))
        result, error = CheckResult(), None
        with unsharded("judge"), self._statistics.in_dry_run():
            try:
                if batch is not None:
                    with eval_mode(self._model) if self._split.has_local_batch_norm else contextlib.nullcontext():
                        result = self._check_samples(batch, memory_fit)
            except Exception as caught:  # raised below, after the other ranks have received the report
                error = caught
        reports = all_gather_json({"result": result, "error": None if error is None else summarize_error(error)})
        _raise_first_error(reports, error)
        results = [CheckResult(*each["result"]) for each in reports]
        if (problem := next((each.problem for each in results if each.problem is not None), None)) is not None:
            raise TaskError(Problem(*problem), where="the loss")
        weaker = next((each for each in results if each.fallback_reason), None)
        if weaker is not None and self._is_log_rank:
            how = "compared no gradients"
            if weaker.config is not None:
                how = f"computed {weaker.config} instead of {STRICTEST_LOSS_CHECK}"
            log.warning("the dry run of the loss %s: %s", how, weaker.fallback_reason)

    def _check_samples(self, batch: Any, memory_fit: MemoryFit) -> CheckResult:
        """Check a few tokens of these samples, and all of them where these do not show that the loss is right."""
        result = CheckResult()
        for few in (shorten(batch, NUM_CHECKED_TOKENS // num_samples(batch)), batch):
            if few is not None:
                full, parts = batch_and_parts(few)
                result = check_loss(
                    self._model, self._objective, full, parts, memory_fit=memory_fit, device=self._device
                )
                if result.problem is None and not result.fallback_reason:
                    break
        return result

    def _apply_reports(self, reports: list[dict[str, Any]], error: Exception | None) -> None:
        """Raise for what any rank has found; tell the objective what all ranks have found."""
        _raise_first_error(reports, error)
        problems = [Problem(*problem) for report in reports for problem in report["problems"]]
        changes = [report["state_changes"] for report in reports if not report["is_empty"]]
        if not problems and (names := differing_across_ranks(changes)):
            problems = sample_dependence_problems(names, self._split.num_parts, self._weight_check.trained_names)
        if problems:
            raise TaskError(list(dict.fromkeys(problems)), where="the model")
        losses = [LossComparison(*report["loss"]) for report in reports if report["loss"] is not None]
        losses = [loss for loss in losses if loss.is_comparable]
        self._objective.is_mixed = any(loss.is_mixed for loss in losses)
        self._objective.is_shape_1_scalar = any(report["is_shape_1_scalar"] for report in reports)
        self._objective.uses_counts = any(report["uses_counts"] for report in reports)
        if (problem := next((loss.problem for loss in losses if loss.problem is not None), None)) is not None:
            raise TaskError(problem, where="the loss")
        empty_ranks = [rank for rank, report in enumerate(reports) if report["is_empty"]]
        if empty_ranks and len(empty_ranks) < len(reports) and self._needs_empty_ranks(reports):
            what = "writes buffers" if any(report["has_writes"] for report in reports) else "needs all ranks"
            got = f"a first batch without samples on rank {empty_ranks[0]}, and a model whose forward {what}"
            raise TaskError(Problem(got, "at least one sample on each rank", "a larger batch"), where="the batch")

    def _needs_empty_ranks(self, reports: list[dict[str, Any]]) -> bool:
        """Whether a rank without samples must run forward all the same."""
        return any(report["has_writes"] for report in reports) or self._statistics.needs_empty_ranks()


def _raise_first_error(reports: list[dict[str, Any]], error: Exception | None) -> None:
    """Raise this rank's own `error`; or else a TaskError with the first one of another rank."""
    errors = {rank: report["error"] for rank, report in enumerate(reports) if report["error"] is not None}
    if error is not None:
        raise error
    if errors:
        rank, text = next(iter(errors.items()))
        raise peer_failed(rank, text)
