"""The data axis of a step, and its checks: what a first batch shows of a model and its loss, before a weight changes.

full, parts  a few samples in one forward, and the same samples in two (`forward_comparison.py`)
float64      some of these samples once more in float64, forward and backward (`loss_check.py`)
Law: a scalar loss is refused if the losses of the parts, each weighted by its count, do not make up the full loss. A
forward is refused if the buffers or weights that it writes depend on its samples, or if its write would be lost.
"""

import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any

from fourfold.model.batch import num_samples, repeated_and_parts, shorten, subsample
from fourfold.model.model_call import eval_mode
from fourfold.model.weights import Weights
from fourfold.plan.check import read_only_reason
from fourfold.proof.attachment import AxisParts, Rank
from fourfold.proof.checks import (
    STRICTEST_LOSS_CHECK,
    Check,
    Learned,
    MemoryFit,
    Report,
    find_memory_fit,
    raise_problems,
)
from fourfold.proof.forward_comparison import (
    ForwardComparison,
    compiled_problem,
    differing,
    first_sample,
    is_close_summary,
    sample_dependence_problems,
)
from fourfold.proof.grad_hook_check import hook_problems
from fourfold.proof.loss_check import CheckResult, LossComparison, check_loss
from fourfold.proof.weight_write_check import WeightWriteCheck
from fourfold.torch_kit.param_access import explain_transform_errors
from fourfold.torch_kit.tensor_tree import tree_map
from fourfold.torch_kit.torch_private import is_compiled
from fourfold.words.errors import Problem, TaskError

NUM_CHECKED_SAMPLES = 6  # parts of 2 and 6: a model may mistake a single sample for a batch without its first dim
NUM_COMPARED_TOKENS, NUM_CHECKED_TOKENS = 256, 96  # of all samples together, in forwards and in float64
MIN_TOKENS = 16  # of a sample
log = logging.getLogger("fourfold")


def attach(rank: Rank) -> AxisParts[None]:
    """Nothing is cut: ranks have samples of their own. What a batch must show holds on every axis."""
    return AxisParts(rank, None, _checks)


def _checks(rank: Rank, weights: Weights) -> Sequence[Check]:
    plan = rank.plan
    storage, masters = weights.storage.forward_loss_reason, weights.master_weights.forward_loss_reason
    reason = read_only_reason(plan, storage=storage, master_weights=masters)
    forwards = ForwardCheck(rank, WeightWriteCheck(weights, reason, num_ranks=plan.batch_split.num_ranks))
    return [forwards, GradientCheck(rank, forwards)]


@contextlib.contextmanager
def in_check(rank: Rank) -> Iterator[None]:
    """Within, the model of a rank and its loss may be called."""
    with rank.whole_shown_to_loss(), rank.statistics.in_dry_run():
        yield


class ForwardCheck:
    """Compares forwards. It teaches the objective how to weight the loss of the parts of a batch."""

    claim = "the loss, and what a forward writes, are the same however a batch is split"
    phase: str | None = "try out"

    def __init__(self, rank: Rank, weight_check: WeightWriteCheck) -> None:
        self._rank, self._split, self._weight_check = rank, rank.plan.batch_split, weight_check
        self.comparison = ForwardComparison(rank.skeleton, rank.objective, self._split, rank.world.device, weight_check)
        self._finished_modes: set[bool] = set()
        self.shown: Learned | None = None
        """What the forwards have shown of a loss whose gradients can be checked too; None: nothing."""

    def is_needed(self, *, training: bool) -> bool:
        split = self._split
        has_risk = split.num_parts > 1 or (training and self._weight_check.read_only_reason is not None)
        # With cp > 1, the check of the context axis has the loss of evaluations.
        is_shown_here = training or split.num_token_shards == 1
        return has_risk and is_shown_here and not {training, True} & self._finished_modes

    def memory_fits(self) -> Sequence[bool]:
        return ()

    def inspect(self, batch: Any, fits: Sequence[bool], *, training: bool) -> Report:
        rank, batch = self._rank, self._rank.shortened(batch)
        is_empty = num_samples(batch) == 0
        report: Report = {"is_empty": is_empty, "problems": [], "loss": None, "has_writes": False}
        report |= {"is_shape_1_scalar": False, "uses_counts": False, "state_changes": {}}
        self.shown, self.comparison.compared_batch = None, None
        self._weight_check.reset()
        with in_check(rank), explain_transform_errors():
            if training and (problems := hook_problems(self._weight_check.trained, self._split.num_parts)):
                report["problems"] = problems
            elif not is_empty and rank.objective.function.is_of_model and is_compiled(rank.skeleton):
                attempt = "compiling parts of the model: model.model = torch.compile(model.model)"
                what = "loss = None and a compiled model"
                report["problems"] = [compiled_problem(what, self._split.num_parts, attempt)]
            elif not is_empty:
                return report | self._compare(batch, training=training)
        report["problems"] = [*report["problems"], *self._weight_check.problems()]
        return report

    def _compare(self, batch: Any, *, training: bool) -> Report:
        """Compare forwards of a few tokens of each sample, and of all of them where these do not show enough."""
        few = shorten(batch, max(MIN_TOKENS, NUM_COMPARED_TOKENS // num_samples(batch)))
        if few is not None:
            with contextlib.suppress(Exception):  # of a model that takes samples of this length only
                report = self._run(few, training=training)
                loss = None if report.get("loss") is None else LossComparison(*report["loss"])
                is_right = loss is None or ((loss.is_comparable or loss.is_unreduced) and loss.problem is None)
                if is_right and not report["problems"] and not report.get("has_writes"):
                    self.comparison.extend_compared(batch, few)
                    return report
            self._weight_check.reset()
        return self._run(batch, training=training)

    def _run(self, batch: Any, *, training: bool) -> Report:
        report = self.comparison.run(batch, training=training)
        return report | {"problems": [*report.get("problems", []), *self._weight_check.problems()]}

    def judge(self, reports: Sequence[Report], *, training: bool) -> Learned | None:
        split = self._split
        raise_problems(reports, "the model")
        changes = [report["state_changes"] for report in reports if not report["is_empty"]]
        if names := differing(changes, is_close_summary):
            problems = sample_dependence_problems(names, split.num_parts, self._weight_check.trained_names)
            raise TaskError(problems, where="the model")
        losses = [LossComparison(*report["loss"]) for report in reports if report["loss"] is not None]
        comparable = [loss for loss in losses if loss.is_comparable]
        forms = [report["has_scalar"] for report in reports if "has_scalar" in report]
        learned = {
            "training": training,
            "has_scalar": any(forms) if forms else None,
            "is_mixed": any(loss.is_mixed for loss in comparable),
            "is_scale_dependent": self._rank.is_scale_dependent(),
            "is_shape_1_scalar": any(report["is_shape_1_scalar"] for report in reports),
            "uses_counts": any(report["uses_counts"] for report in reports),
            "needs_empty_ranks": any(report["has_writes"] for report in reports)
            or self._rank.statistics.needs_empty_ranks(),
        }
        self._teach_objective(learned)
        if (problem := next((loss.problem for loss in comparable if loss.problem is not None), None)) is not None:
            raise TaskError(problem, where="the loss")
        self._check_empty_ranks(reports, learned)
        if all(report["is_empty"] for report in reports):
            return None
        if comparable and training:  # its gradients have yet to be checked
            self.shown = learned
            return None
        # A loss that is not finite shows nothing. Unreduced values need one dry run only.
        return learned if comparable or all(loss.is_unreduced for loss in losses) else None

    def learn(self, learned: Learned, batch: Any) -> None:
        self._teach_objective(learned)
        self._finished_modes.add(learned["training"])
        if learned["needs_empty_ranks"]:
            rank = self._rank
            rank.objective.dummy_batch = first_sample(rank.shortened(batch), rank.world.device)

    def _teach_objective(self, learned: Learned) -> None:
        objective = self._rank.objective
        objective.is_mixed, objective.is_shape_1_scalar = learned["is_mixed"], learned["is_shape_1_scalar"]
        if learned["training"]:
            objective.has_scalar = learned["has_scalar"]
        objective.uses_counts, objective.is_scale_dependent = learned["uses_counts"], learned["is_scale_dependent"]

    def _check_empty_ranks(self, reports: Sequence[Report], learned: Learned) -> None:
        empty_ranks = [rank for rank, report in enumerate(reports) if report["is_empty"]]
        if empty_ranks and len(empty_ranks) < len(reports) and learned["needs_empty_ranks"]:
            what = "writes buffers" if any(report["has_writes"] for report in reports) else "needs all ranks"
            got = f"a first batch without samples on rank {empty_ranks[0]}, and a model whose forward {what}"
            raise TaskError(Problem(got, "at least one sample on each rank", "a larger batch"), where="the batch")


class GradientCheck:
    """Compares loss and gradients in float64, of samples whose forwards have been compared."""

    claim = "the loss and its gradients, in float64, are the same however a batch is split"
    phase: str | None = "judge"

    def __init__(self, rank: Rank, forwards: ForwardCheck) -> None:
        self._rank, self._forwards = rank, forwards

    def is_needed(self, *, training: bool) -> bool:
        return training and self._forwards.shown is not None

    def memory_fits(self) -> Sequence[bool]:
        rank, compared, activations = self._rank, self._forwards.comparison.compared_batch, 0
        if compared is not None:
            # Activations have gradients too; some samples are checked twice.
            checked = min(num_samples(compared.batch), NUM_CHECKED_SAMPLES)
            activations = 2 * compared.elements_per_sample * max(3, checked * 4 // 3)
        num_ranks = rank.world.world.local_size
        return find_memory_fit(rank.skeleton, rank.world.device, num_local_ranks=num_ranks, num_activations=activations)

    def inspect(self, batch: Any, fits: Sequence[bool], *, training: bool) -> Report:
        rank, compared, result = self._rank, self._forwards.comparison.compared_batch, CheckResult()
        if compared is not None:
            few = subsample(compared.batch, min(num_samples(compared.batch), NUM_CHECKED_SAMPLES))
            few = tree_map(few, lambda tensor: tensor.flip(0))  # other parts than those compared before
            mode = eval_mode(rank.skeleton) if rank.plan.batch_split.has_local_batch_norm else contextlib.nullcontext()
            with in_check(rank), mode:
                result = self._check_samples(few, MemoryFit(*fits))
        self._forwards.comparison.compared_batch = None
        return {"result": result}

    def _check_samples(self, batch: Any, memory_fit: MemoryFit) -> CheckResult:
        """Check a few tokens of these samples, and all of them where these do not show that the loss is right."""
        result, rank = CheckResult(), self._rank
        for few in (shorten(batch, max(MIN_TOKENS, NUM_CHECKED_TOKENS // num_samples(batch))), batch):
            if few is not None:
                full, parts = repeated_and_parts(few, max(1, num_samples(few) // 3))
                result = check_loss(
                    rank.skeleton, rank.objective, full, parts, memory_fit=memory_fit, device=rank.world.device
                )
                if result.problem is None and not result.fallback_reason:
                    break
        return result

    def judge(self, reports: Sequence[Report], *, training: bool) -> Learned | None:
        results = [CheckResult(*each["result"]) for each in reports]
        if (problem := next((each.problem for each in results if each.problem is not None), None)) is not None:
            raise TaskError(Problem(*problem), where="the loss")
        weaker = next((each for each in results if each.fallback_reason), None)
        if weaker is not None and self._rank.world.rank == 0:
            how = "compared no gradients"
            if weaker.config is not None:
                how = f"computed {weaker.config} instead of {STRICTEST_LOSS_CHECK}"
            log.warning("the dry run of the loss %s: %s", how, weaker.fallback_reason)
        assert self._forwards.shown is not None
        is_scale_dependent = any(each.is_scale_dependent for each in results)
        return {**self._forwards.shown, "is_scale_dependent": is_scale_dependent, "is_weaker": weaker is not None}

    def learn(self, learned: Learned, batch: Any) -> None:
        self._forwards.shown = None
        self._forwards.learn(learned, batch)
