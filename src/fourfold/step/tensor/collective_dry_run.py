"""Collective dry run of the tensor axis: before the first step, all ranks judge what each has found.

Law: TaskError is raised on every rank or on none; an exception of a rank's own model is raised on that rank, and a
TaskError on the others.
"""

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from fourfold.parts.comm.communicator import Communicator
from fourfold.parts.torch_private import is_compiled_function
from fourfold.step.batch import num_samples, shorten, unpack_batch
from fourfold.step.dry_run.check_config import MemoryFit, find_memory_fit, fit_of_bytes
from fourfold.step.dry_run.grad_hook_check import treats_parts_alike
from fourfold.step.dry_run.loss_check import peer_failed, summarize_error
from fourfold.step.sequence.transformers import install_attention
from fourfold.step.tensor.draw_slices import DrawSlices, FoundDraw, slices_mismatch, with_slices_of_one_token
from fourfold.step.tensor.dry_run import Findings, LossFunction, TensorDryRun, TensorMemoryFit
from fourfold.step.tensor.rule_problems import GradMismatch, RuleProblems
from fourfold.step.tensor.tensor_axis import TensorAxis
from fourfold.step.tensor_tree import tree_map
from fourfold.words.errors import Problem, TaskError

DRY_RUN_SAMPLES = 2
DRY_RUN_TOKENS = 256
NUM_LARGEST = (
    4  # of the largest weight: random numbers of its size, in float64, become the weight, which has a gradient
)
log = logging.getLogger("fourfold")


class CollectiveTensorDryRun:
    """The dry run of the tensor axis on all ranks. `world` lies on the plan's mesh; `draw_slices` learn from it.

    trained  the model whose weights have the user's hooks
    loss     None: it is not compared; nor is one that is compiled, or of a model with stages
    """

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

    @property
    def is_needed(self) -> bool:
        """Whether no batch has shown yet that the model is cut right; in training mode there may be dropout."""
        return not {self._model.training, True} & self._finished_modes

    def run(self, batch: Any, unsharded: AbstractContextManager[None]) -> None:
        """Compare the model that is cut with the whole one on a few samples of a batch. Collective.

        Within `unsharded` the model may be called. Raises TaskError if the two differ.
        """
        has_samples, findings = num_samples(batch) > 0, Findings()
        memory_fit = self._find_memory_fit()
        with unsharded, self._attention():
            # The tensor ranks of a place have the same samples, or all of them none.
            if has_samples:
                parts = _first_samples(unpack_batch(batch))
                samples = [tree_map(each, lambda t: t.to(self._world.device)) for each in parts]
                dry_run = TensorDryRun(self._model, self._axis, self._world.device, self._loss)
                findings = dry_run.run(samples, memory_fit)
        if self._trained.training and not findings.problems and findings.error is None:
            findings = findings._replace(problems=self._hook_problems())
        reports = self._world.all_gather_json(self._report(findings, has_samples=has_samples))
        if findings.error is not None:
            raise findings.error
        _complete_draws(reports)
        self._judge(reports)
        if any(report["has_samples"] for report in reports):
            self._finished_modes.add(self._model.training)
        self._learn_draws(reports)

    @contextlib.contextmanager
    def _attention(self) -> Iterator[None]:
        """Within, models of transformers attend as they do in a step: with sp > 1, through Fourfold's own interface."""
        if self._world.along("sp").size == 1:
            yield
            return
        with install_attention(self._model), install_attention(self._axis.structure):
            yield

    def _hook_problems(self) -> list[Problem]:
        shards, words = self._axis.shards, RuleProblems(self._model, self._axis)
        return [
            words.hook(name)
            for name, p in self._trained.named_parameters()
            if p.requires_grad and not shards[name].is_whole and not treats_parts_alike(p, shards[name])
        ]

    def _learn_draws(self, reports: Sequence[Mapping[str, Any]]) -> None:
        """Take over what the first rank at this place of the tensor axis has found that has compared something."""
        index = self._axis.group.index
        for rank, report in enumerate(reports):
            if report["tp_ranks"][index] == rank and report["has_samples"] and not report["unavailable"]:
                self._draw_slices.learn(report["draws"], training=self._model.training)
                return

    def _find_memory_fit(self) -> TensorMemoryFit:
        """What fits into memory on every rank. Collective."""
        options: dict[str, Any] = {"num_local_ranks": self._world.world.local_size}
        held = find_memory_fit(self._axis.structure, self._world.device, **options)
        drawn = fit_of_bytes(*drawn_bytes(self._axis), self._world.device, **options)
        columns = zip(*self._world.all_gather_json([*held, *drawn]), strict=True)
        all_fit = list(map(all, columns))
        return TensorMemoryFit(MemoryFit(*all_fit[:2]), MemoryFit(*all_fit[2:]))

    def _report(self, findings: Findings, *, has_samples: bool) -> dict[str, Any]:
        error = None if findings.error is None else summarize_error(findings.error)
        fields = findings._asdict() | {"error": error, "has_samples": has_samples}
        return {**fields, "tp_ranks": list(self._axis.ranks.ranks)}

    def _judge(self, reports: list[Mapping[str, Any]]) -> None:
        """Raise TaskError for what any rank has found; log what could not be compared."""
        for rank, report in enumerate(reports):
            if report["error"] is not None:
                raise peer_failed(rank, report["error"])
        problems = [Problem(*problem) for report in reports for problem in report["problems"]]
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
            got = "tensor ranks that sum different tensors in one forward or backward"
            problems = [Problem(got, "a model that computes the same on each of them", "no branches by rank")]
        if problems:
            raise TaskError(list(dict.fromkeys(problems)), where="the tensor rules")
        self._warn(reports)

    def _warn(self, reports: list[Mapping[str, Any]]) -> None:
        if self._world.rank:
            return
        size = self._axis.group.size
        if reason := next((report["unavailable"] for report in reports if report["unavailable"]), ""):
            log.warning("the dry run of tp = %d compared nothing, so the tensor rules are unchecked: %s", size, reason)
        elif reason := next((report["fallback"] for report in reports if report["fallback"]), ""):
            log.warning("the dry run of tp = %d compared in the model's own dtype, not in float64: %s", size, reason)
        if reason := next((report["loss_error"] for report in reports if report["loss_error"]), ""):
            log.warning("the dry run of tp = %d did not compare the loss, which failed: %s", size, reason)


def _complete_draws(reports: Sequence[dict[str, Any]]) -> None:
    """Put the draws that the ranks have found in place of the lists that they have sent."""
    for group in {tuple(report["tp_ranks"]) for report in reports}:
        mine = [reports[rank] for rank in group]
        found = [[FoundDraw.from_json(*draw) for draw in report["draws"]] for report in mine]
        for report, draws in zip(mine, with_slices_of_one_token(found), strict=True):
            report["draws"] = draws


def drawn_bytes(axis: TensorAxis) -> tuple[int, int]:
    """Bytes of weights and gradients where whole weights are drawn one at a time: in float64, and in the model's dtype.

    This rank's parts, and two gradients of each; of the largest weight the random numbers, itself and its gradient.
    """
    own = dict(axis.structure.named_parameters())
    local = {name: axis.shards[name].num_elements for name in own}
    num_elements = 3 * sum(local.values()) + NUM_LARGEST * max(p.numel() for p in own.values())
    widest = max(p.element_size() for p in own.values())
    num_bytes = 3 * sum(local[name] * p.element_size() for name, p in own.items())
    return 8 * num_elements, num_bytes + NUM_LARGEST * max(max(8, widest) * p.numel() for p in own.values())


def _first_samples(batch: tuple[Any, Any]) -> list[Any]:
    """The first samples of a batch: a few of their tokens, where they have more, then all of them."""
    few = tree_map(batch, lambda tensor: tensor[:DRY_RUN_SAMPLES])
    short = shorten(few, DRY_RUN_TOKENS)
    return [few] if short is None else [short, few]
