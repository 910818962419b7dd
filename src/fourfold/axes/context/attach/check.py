"""The check of the context axis: each rank checks its shard (`dry_run.py`), and all ranks judge all reports.

report  what one rank has found: problems, gradient projections, and the loss of all tokens and of its own shard
"""

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fourfold.axes.context.attach.dry_run import ContextDryRun, DryRunResult, truncate_batch
from fourfold.axes.context.attach.losses import (
    GradProjections,
    LossSum,
    ObservedLoss,
    gradient_problem,
    gradient_sum_problem,
    loss_sum_problem,
    non_mean_problem,
    observe_losses,
)
from fourfold.axes.context.attach.token_shards import inputs_and_targets, packed_problems, sequence_length, token_shards
from fourfold.axes.context.rules.layout import ContextSpec
from fourfold.comm.communicator import Communicator
from fourfold.proof.checks import STRICTEST_SEQUENCE_CHECK, Learned, MemoryFit, Report, find_memory_fit, raise_problems
from fourfold.proof.digests.batches import batch_digest, batch_mismatch_problem
from fourfold.proof.grad_projections import Projection
from fourfold.torch_kit.tensor_tree import tree_leaves, tree_map
from fourfold.words.errors import Problem, TaskError

DRY_RUN_TOKENS = 256
DRY_RUN_SAMPLES = 2
log = logging.getLogger("fourfold")


class ContextCheck:
    """The check of the context axis. `world` lies on the plan's mesh."""

    claim = "the model and the loss compute the same from shards of the tokens as from all tokens"
    phase: str | None = "try out"

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Any, Any], Any],
        spec: ContextSpec,
        world: Communicator,
    ) -> None:
        self._model, self._loss, self._spec, self._world = model, loss, spec, world
        self._cp_group = world.along("cp")
        self._finished_modes: set[bool] = set()
        self.ignored_indices: Sequence[int] | None = None
        """The targets that a scalar loss ignores; None: the loss is no scalar, or not known yet."""
        self.is_scale_dependent = False
        """Whether backward is not linear in the upstream gradient: it clamps, say."""

    def is_needed(self, *, training: bool) -> bool:
        return not {self._model.training, True} & self._finished_modes

    def memory_fits(self) -> Sequence[bool]:
        return find_memory_fit(self._model, self._world.device, num_local_ranks=self._world.world.local_size)

    def inspect(self, batch: Any, fits: Sequence[bool], *, training: bool) -> Report:
        inputs, targets = inputs_and_targets(batch)
        report: Report = {"cp_ranks": self._cp_group.ranks, "digest": batch_digest(batch)}
        if any(len(tensor) for tensor in tree_leaves(targets)):
            report |= self._run_local(inputs, targets, MemoryFit(*fits))
        return report

    def judge(self, reports: Sequence[Report], *, training: bool) -> Learned | None:
        for group in _by_cp_group(reports):
            if len({report["digest"] for report in group}) > 1:
                raise TaskError(batch_mismatch_problem("cp", group[0]["cp_ranks"]), where="the batch")
        raise_problems(reports, "the batch", "packed")
        raise_problems(reports, "the model")
        reports = [each for each in reports if "loss_sums" in each]
        self._check_gradients(reports)
        # A loss that is not finite shows nothing: the next batch is tried.
        reports = [each for each in reports if math.isfinite(each["loss_sums"][0][0])]
        self._check_losses(reports)
        if not reports:
            return None
        has_mean = any(each["has_mean"] for each in reports)
        indices = sorted({index for each in reports for index in each["ignored_indices"]})
        is_weaker = any(each["config"] != str(STRICTEST_SEQUENCE_CHECK) for each in reports)
        ignored = indices if has_mean else None
        return {
            "training": self._model.training,
            "ignored_indices": ignored,
            "is_scale_dependent": any(each["is_scale_dependent"] for each in reports),
            "is_weaker": is_weaker,
        }

    def learn(self, learned: Learned, batch: Any) -> None:
        self._finished_modes.add(learned["training"])
        if learned["ignored_indices"] is not None:
            self.ignored_indices = learned["ignored_indices"]
        self.is_scale_dependent = learned["is_scale_dependent"]

    def shortened(self, batch: Any) -> tuple[Any, Any]:
        """The first samples and tokens of a batch, as many as checks take."""
        return self._truncate(*inputs_and_targets(batch))

    def _truncate(self, inputs: Any, targets: Any) -> tuple[Any, Any]:
        length = sequence_length((inputs, targets))
        num_tokens = self._num_tokens(length, inputs, targets)
        inputs, targets = (
            truncate_batch(tree, length=length, num_tokens=num_tokens, num_samples=DRY_RUN_SAMPLES)
            for tree in (inputs, targets)
        )
        return inputs, targets

    def _num_tokens(self, length: int, inputs: Any, targets: Any) -> int:
        """How many tokens the dry run takes: a number that divides, and that is no other tensor's dim 1."""
        num_tokens = self._spec.padded_length(min(length, DRY_RUN_TOKENS))
        others = [
            t.shape[1] for t in (*tree_leaves(inputs), *tree_leaves(targets)) if t.dim() > 1 and t.shape[1] != length
        ]
        while num_tokens in others:
            num_tokens += self._spec.length_divisor
        return num_tokens

    def _run_local(self, inputs: Mapping[str, Any], targets: Any, memory_fit: MemoryFit) -> Report:
        """The report of a rank that has samples."""
        # Of all tokens: the dry run takes the first ones only.
        if packed := packed_problems(self._model, inputs):
            return {"packed": packed}
        result, losses, loss_problem = self._inspect(inputs, targets, memory_fit)
        return {
            "problems": result.problems,
            "gradients": result.grad_projections,
            "config": str(result.config),
            "fallback_reason": result.fallback_reason,
            "is_scale_dependent": result.is_scale_dependent,
            "loss_problem": loss_problem,
            "loss_sums": [each.loss_sum for each in losses],
            "has_mean": any(each.is_mean for each in losses),
            "non_mean_op": next((each.non_mean_op for each in losses if each.non_mean_op is not None), None),
            "tolerance": max((each.tolerance for each in losses), default=0.0),
            "ignored_indices": sorted({index for each in losses for index in each.ignored_indices}),
        }

    def _inspect(
        self, inputs: Mapping[str, Any], targets: Any, memory_fit: MemoryFit
    ) -> tuple[DryRunResult, list[ObservedLoss], Problem | None]:
        """The result for the model; without problems, also the loss of all tokens, this rank's, and what is wrong."""
        length = sequence_length((inputs, targets))
        inputs, targets = self._truncate(inputs, targets)
        num_tokens = sequence_length((inputs, targets))
        inputs, targets = (tree_map(tree, lambda tensor: tensor.to(self._world.device)) for tree in (inputs, targets))
        shard = token_shards(self._spec, num_tokens)[self._cp_group.rank]
        try:
            result = ContextDryRun(self._model, inputs, shard, ulysses=self._spec.ulysses, memory_fit=memory_fit).run()
        except (RuntimeError, ValueError, IndexError, AssertionError) as error:
            text = str(error).splitlines()[0] if str(error) else type(error).__name__
            if num_tokens == length:
                problem = Problem(f"a model that fails on a sample of {length} tokens: {text}", "a model that runs")
                return DryRunResult([problem]), [], None
            got = f"cp > 1 and a model that fails on {num_tokens} tokens, where a sample has {length}: {text}"
            return DryRunResult([Problem(got, "a model that takes any number of tokens")]), [], None
        if result.problems:
            return result, [], None
        with torch.no_grad(), _loss_explained():
            full, local = observe_losses(self._loss, result.outputs, targets, shard)
            return result, [full, local], gradient_problem(full, local, shard)

    def _check_gradients(self, reports: Sequence[Report]) -> None:
        """Raise TaskError if the parameter gradients of the shards do not add up; log a weaker check."""
        names = [name for name, p in self._model.named_parameters() if p.requires_grad]
        for group in _by_cp_group(reports):
            configs = {report["config"] for report in group}
            if len(configs) > 1:
                got = f"cp > 1 and a dry run {' on one rank, but '.join(sorted(configs))} on another"
                raise TaskError(Problem(got, "ranks that can all run the same check"), where="the model")
            gradients = [report["gradients"] for report in group]
            if None in gradients:
                continue
            projections = [
                GradProjections([Projection(*each) for each in full], [Projection(*each) for each in shard], tolerance)
                for full, shard, tolerance in gradients
            ]
            if problem := gradient_sum_problem(names, projections):
                raise TaskError(problem, where="the model")
        weaker = next((report for report in reports if report["config"] != str(STRICTEST_SEQUENCE_CHECK)), None)
        if weaker is not None and self._world.rank == 0:
            log.warning(
                "the dry run of cp = %d computed %s instead of %s: %s",
                self._spec.size,
                weaker["config"],
                STRICTEST_SEQUENCE_CHECK,
                weaker["fallback_reason"],
            )

    def _check_losses(self, reports: Sequence[Report]) -> None:
        """Raise TaskError if the losses of the shards do not add up to the loss of all tokens."""
        for group in _by_cp_group(reports):
            shard_sums = [LossSum(*report["loss_sums"][1]) for report in group]
            full_sum, op = LossSum(*group[0]["loss_sums"][0]), group[0]["non_mean_op"]
            if op is None:
                problem = loss_sum_problem(full_sum, shard_sums, tolerance=group[0]["tolerance"])
            else:
                problem = non_mean_problem(op, len(shard_sums))
            if problem is None:
                problem = next((Problem(*each["loss_problem"]) for each in group if each["loss_problem"]), None)
            if problem is not None:
                raise TaskError(problem, where="the loss")


@contextlib.contextmanager
def _loss_explained() -> Iterator[None]:
    """Within, an error of the loss says what it is called with."""
    try:
        yield
    except Exception as error:
        error.add_note(
            "  the dry run of cp calls the loss with outputs alone, for all tokens and for this rank's; what forward "
            "keeps in the model is not there\n    try values of each token among the outputs, or cp = 1"
        )
        raise


def _by_cp_group(reports: Sequence[Report]) -> list[list[Report]]:
    """The reports of each cp group."""
    groups = sorted({tuple(report["cp_ranks"]) for report in reports})
    return [[report for report in reports if tuple(report["cp_ranks"]) == group] for group in groups]
