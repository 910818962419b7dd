"""The tensor axis of a step. Its check: all ranks judge what each has found where the model is cut (`dry_run.py`)."""

import contextlib
import logging
from collections.abc import Sequence
from typing import Any

from torch import nn

from fourfold.axes.tensor.attach.axis import TensorAxis, cut
from fourfold.axes.tensor.attach.dry_run import Findings, LossFunction, TensorDryRun, ways
from fourfold.axes.tensor.attach.rule_problems import GradMismatch, RuleProblems
from fourfold.axes.tensor.attach.split_randomness import slices_mismatch, with_slices_of_one_token
from fourfold.comm.communicator import Communicator
from fourfold.model.batch import num_samples, shorten, unpack_batch
from fourfold.model.rank_dropout import DrawSlices, FoundDraw
from fourfold.model.transformers_attention import install_attention
from fourfold.model.weights import Weights
from fourfold.proof.attachment import AxisParts, BatchLayout, Rank, SharedSamples, TensorCalls
from fourfold.proof.checks import (
    Check,
    Learned,
    Report,
    find_memory_fit,
    fit_of_bytes,
    out_of_step_problem,
    raise_problems,
)
from fourfold.proof.grad_hook_check import treats_parts_alike
from fourfold.torch_kit.tensor_tree import tree_map
from fourfold.torch_kit.torch_private import is_compiled_function
from fourfold.words.errors import Problem, TaskError

DRY_RUN_SAMPLES = 2
DRY_RUN_TOKENS = 256
NUM_LARGEST = 4  # of the largest weight: a copy for an operation, its gradient, and the sum of those of two uses
WHERE = "the tensor rules"
log = logging.getLogger("fourfold")


def attach(rank: Rank) -> AxisParts[TensorAxis]:
    """Cut the model among the tensor ranks. Collective. Raises PlanError, TaskError: see `cut`."""
    axis = cut(rank)
    split = rank.split_tokens._replace(entries=axis.sequence_parallel.entries, region=axis.region)
    rank = rank._replace(split_tokens=split)
    if not axis.is_cut:
        return AxisParts(rank, axis)

    def checks(rank: Rank, weights: Weights) -> Sequence[Check]:
        return [TensorCheck(rank.skeleton, axis, rank.world, rank.draws, trained=rank.model, loss=rank.loss)]

    def lay_out(rank: Rank, layout: BatchLayout, calls: TensorCalls) -> BatchLayout:
        return SharedSamples(layout, "tp", calls.ranks, calls.agree)

    return AxisParts(rank, axis, checks, lay_out, f"tensor ranks: {axis.group.name}")


class TensorCheck:
    """The check of the tensor axis. `world` lies on the plan's mesh; `draw_slices` learn from it.

    trained  the model whose weights have the user's hooks
    loss     None: it is not compared; nor is one that is compiled, or of a model with stages
    """

    claim = "the tensor ranks together compute what the whole model does"
    phase: str | None = "try out"

    def __init__(
        self,
        model: nn.Module,
        axis: TensorAxis,
        world: Communicator,
        draw_slices: DrawSlices,
        *,
        trained: nn.Module,
        loss: LossFunction | None,
    ) -> None:
        self._model, self._axis, self._world, self._draw_slices = model, axis, world, draw_slices
        self._trained, self._loss = trained, loss if trained is model and not is_compiled_function(loss) else None
        self._finished_modes: set[bool] = set()

    def is_needed(self, *, training: bool) -> bool:
        """Whether no batch has shown yet that the model is cut right; in training mode there may be dropout."""
        return not {self._model.training, True} & self._finished_modes

    def memory_fits(self) -> Sequence[bool]:
        options: dict[str, Any] = {"num_local_ranks": self._world.world.local_size}
        held = find_memory_fit(self._axis.structure, self._world.device, **options)
        return [*held, *fit_of_bytes(*num_bytes_without_held(self._axis), self._world.device, **options)]

    def inspect(self, batch: Any, fits: Sequence[bool], *, training: bool) -> Report:
        """Compare the model that is cut with the whole one on a few samples. Collective on the tensor ranks."""
        # These have the same samples, or all of them none.
        has_samples, findings = num_samples(batch) > 0, Findings()
        if has_samples:
            parts = _first_samples(unpack_batch(batch))
            samples = [tree_map(each, lambda t: t.to(self._world.device)) for each in parts]
            dry_run = TensorDryRun(self._model, self._axis, self._world.device, self._loss)
            with contextlib.ExitStack() as stack:
                # Models of transformers attend as they do in a step: with cp > 1, through Fourfold's own interface.
                for each in (self._model, self._axis.structure) if self._world.along("cp").size > 1 else ():
                    stack.enter_context(install_attention(each))
                findings = dry_run.run(samples, ways(fits))
        if self._trained.training and not findings.problems:
            findings = findings._replace(problems=self._hook_problems())
        ranks = list(self._axis.ranks.ranks)
        return {**findings._asdict(), "has_samples": has_samples, "tp_ranks": ranks}

    def _hook_problems(self) -> list[Problem]:
        shards, words = self._axis.shards, RuleProblems(self._model, self._axis)
        return [
            words.hook(name)
            for name, p in self._trained.named_parameters()
            if p.requires_grad and not shards[name].is_whole and not treats_parts_alike(p, shards[name])
        ]

    def judge(self, reports: Sequence[Report], *, training: bool) -> Learned | None:
        _complete_draws(reports)
        raise_problems(reports, WHERE)
        problems = list[Problem]()
        groups = sorted({tuple(report["tp_ranks"]) for report in reports})
        words = RuleProblems(self._model, self._axis)
        for group in groups:
            mine = [report for report in reports if tuple(report["tp_ranks"]) == group]
            problem = words.gradients([[GradMismatch(*each) for each in report["gradients"]] for report in mine])
            problems += [problem] if problem is not None else []
            if not problems and not any(report["out_of_step"] for report in mine):
                problem = slices_mismatch([report["draws"] for report in mine])
                problems += [problem] if problem is not None else []
        if not problems and any(report["out_of_step"] for report in reports):
            problems = [out_of_step_problem()]
        if problems:
            raise TaskError(list(dict.fromkeys(problems)), where=WHERE)
        self._warn(reports)
        if not any(report["has_samples"] and report["is_finite"] for report in reports):
            return None  # the next batch may show more
        is_weaker = any(report[reason] for report in reports for reason in ("unavailable", "fallback", "loss_error"))
        draws = [_draws_at(reports, index) for index in range(len(groups[0]))]
        return {"training": self._model.training, "draws": draws, "is_weaker": is_weaker}

    def learn(self, learned: Learned, batch: Any) -> None:
        self._finished_modes.add(learned["training"])
        draws = learned["draws"][self._axis.group.index]
        if draws is not None:
            found = [FoundDraw.from_json(*each) for each in draws]
            self._draw_slices.learn(found, training=learned["training"])

    def _warn(self, reports: Sequence[Report]) -> None:
        if self._world.rank:
            return
        size = self._axis.group.size
        if reason := next((report["unavailable"] for report in reports if report["unavailable"]), ""):
            log.warning("the dry run of tp = %d compared nothing, so the tensor rules are unchecked: %s", size, reason)
        elif reason := next((report["fallback"] for report in reports if report["fallback"]), ""):
            log.warning("the dry run of tp = %d compared in the model's own dtype, not in float64: %s", size, reason)
        if reason := next((report["loss_error"] for report in reports if report["loss_error"]), ""):
            log.warning("the dry run of tp = %d did not compare the loss, which failed: %s", size, reason)


def _draws_at(reports: Sequence[Report], index: int) -> list[FoundDraw] | None:
    """What the first rank at a place of the tensor axis has found that has compared something; None: none has."""
    for rank, report in enumerate(reports):
        if report["tp_ranks"][index] == rank and report["has_samples"] and not report["unavailable"]:
            return report["draws"]
    return None


def _complete_draws(reports: Sequence[Report]) -> None:
    """Put the draws that the ranks have found in place of the lists that they have sent."""
    for group in {tuple(report["tp_ranks"]) for report in reports}:
        mine = [reports[rank] for rank in group]
        found = [[FoundDraw.from_json(*draw) for draw in report["draws"]] for report in mine]
        for report, draws in zip(mine, with_slices_of_one_token(found), strict=True):
            report["draws"] = draws


def num_bytes_without_held(axis: TensorAxis) -> tuple[int, int]:
    """Bytes of weights and gradients where whole weights are not held: in float64, and in the model's dtype.

    This rank's parts, and two gradients of each; of the largest weight what an operation makes of it, and its gradient.
    """
    own = dict(axis.structure.named_parameters())
    local = {name: 3 * axis.shards[name].num_elements for name in own}
    num_elements = sum(local.values()) + NUM_LARGEST * max(p.numel() for p in own.values())
    num_bytes = sum(local[name] * p.element_size() for name, p in own.items())
    return 8 * num_elements, num_bytes + NUM_LARGEST * max(p.element_size() * p.numel() for p in own.values())


def _first_samples(batch: tuple[Any, Any]) -> list[Any]:
    """The first samples of a batch: a few of their tokens, where they have more, then all of them."""
    few = tree_map(batch, lambda tensor: tensor[:DRY_RUN_SAMPLES])
    short = shorten(few, DRY_RUN_TOKENS)
    return [few] if short is None else [short, few]
