"""Dry run of the pipeline axis: the stages of a model, one after the other, compute what the whole model computes.

skeleton   the model with random weights that take nearly no memory (`skeleton.py`): every rank has all stages of it
templates  what the modules of other stages return in place of their outputs (`gates.py`)
Law: a block that needs more than what the block before it returned and what the model makes of the batch alone is
found, for its stage then computes with placeholders: its outputs differ.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fourfold.parts.comm.communicator import Communicator
from fourfold.step.batch import num_samples, unpack_batch
from fourfold.step.dry_run.fixed_random import without_randomness
from fourfold.step.dry_run.loss_check import summarize_error
from fourfold.step.dry_run.preserve_module import preserve_module
from fourfold.step.model_call import call_model, eval_mode
from fourfold.step.pipeline.chain import StageMap
from fourfold.step.pipeline.gates import Gates, StageEnd, Template, Templates
from fourfold.step.tensor_tree import tree_leaves, tree_map
from fourfold.words.errors import FourfoldError, Problem, TaskError

DRY_RUN_SAMPLES = 2
MODEL = ""  # the name under which templates have the whole model
NEED = "blocks that are called once each, in order, and need only what the one before returned and the batch"


class _Call(NamedTuple):
    """A call of one of the modules that gates replace, and its outputs."""

    name: str
    template: Template
    outputs: list[Tensor]


class PipelineDryRun:
    """The dry run of one rank. `world` lies on the plan's mesh."""

    def __init__(self, skeleton: nn.Module, stages: StageMap, world: Communicator) -> None:
        self._skeleton, self._stages, self._world = skeleton, stages, world
        self.templates: Templates = {}
        """What modules of other stages return; known after the first batch with samples on this rank."""
        self.has_ended = False
        """Whether every rank has had a batch with samples."""

    def run(self, batch: Any) -> None:
        """Compare the stages with the whole model on the first samples of a batch. Collective. Raises TaskError."""
        inputs, _ = unpack_batch(batch)
        few = tree_map(inputs, lambda tensor: tensor[:DRY_RUN_SAMPLES].to(self._world.device))
        problems: list[Problem] = []
        error: Exception | None = None
        if num_samples(batch) and not self.templates:
            try:
                problems = self._compare(few)
            except Exception as caught:  # raised below, after the other ranks have received the report
                error = caught
        text = None if error is None else summarize_error(error)
        report = {"problems": problems, "error": text, "has_templates": bool(self.templates)}
        reports = self._world.all_gather_json(report)
        if error is not None:
            raise error
        for rank, report in enumerate(reports):
            if report["error"] is not None:
                raise TaskError(Problem(f"rank {rank} failed on its first batch: {report['error']}"), where="the task")
        found = [Problem(*problem) for report in reports for problem in report["problems"]]
        if found:
            raise TaskError(list(dict.fromkeys(found)), where="the pipeline")
        self.has_ended = all(report["has_templates"] for report in reports)

    def _compare(self, inputs: Any) -> list[Problem]:
        with self._computing():
            calls, returned = self._run_whole(inputs)
            if problems := self._order_problems(calls):
                return problems
            by_name = {call.name: call for call in calls}
            templates = {call.name: call.template for call in calls} | {MODEL: Template.of(returned, inputs)}
            expected = [by_name[name].outputs for name in self._stages.boundaries()]
            expected.append([each.clone() for each in tree_leaves(returned)])
            received: list[Tensor] = []
            for stage, wanted in enumerate(expected):
                got = self._run_stage(stage, inputs, templates, received)
                if problem := self._difference(stage, got, wanted):
                    return [problem]
                received = got
        self.templates = templates
        return []

    @contextlib.contextmanager
    def _computing(self) -> Iterator[None]:
        with (
            torch.no_grad(),
            preserve_module(self._skeleton),
            eval_mode(self._skeleton),
            without_randomness(self._world.device),
        ):
            yield

    def _run_whole(self, inputs: Any) -> tuple[list[_Call], Any]:
        """The calls of blocks, and of modules in front of them, and what the model returned."""
        calls: list[_Call] = []
        hooks = []
        for name in (*self._stages.chain.before, *self._stages.chain.blocks):

            def record(module: nn.Module, args: Any, kwargs: Any, output: Any, name: str = name) -> None:
                template = Template.of(output, (args, kwargs))
                calls.append(_Call(name, template, [each.clone() for each in tree_leaves(output)]))

            hooks.append(self._skeleton.get_submodule(name).register_forward_hook(record, with_kwargs=True))
        try:
            return calls, call_model(self._skeleton, inputs)
        finally:
            for hook in hooks:
                hook.remove()

    def _order_problems(self, calls: list[_Call]) -> list[Problem]:
        chain = self._stages.chain
        called = [call.name for call in calls if call.name in chain.blocks]
        if called != list(chain.blocks):
            wrong = next((name for name in chain.blocks if called.count(name) != 1), None)
            got = "blocks in another order" if wrong is None else f"{wrong} called {called.count(wrong)} times"
            return [Problem(f"{got} in one forward", NEED, "pp = 1")]
        before = [call.name for call in calls if call.name in chain.before]
        repeated = [name for name in dict.fromkeys(before) if before.count(name) > 1]
        missing = [name for name in chain.before if name not in before]
        if repeated or missing:
            name = (repeated or missing)[0]
            got = f"{name}, which has weights, called {before.count(name)} times in one forward"
            return [Problem(got, "a module in front of the blocks that is called once", "pp = 1")]
        return []

    def _run_stage(self, stage: int, inputs: Any, templates: Templates, received: list[Tensor]) -> list[Tensor]:
        outputs: Any
        try:
            with Gates(self._skeleton, self._stages, stage).closed(templates, received):
                outputs = call_model(self._skeleton, inputs)
        except StageEnd as end:
            outputs = end.outputs
        except FourfoldError:
            raise
        except Exception as error:
            blocks = self._stages.blocks[stage]
            names = self._stages.chain.blocks
            where = f"stage {stage} ({names[blocks.start]} to {names[blocks.stop - 1]})"
            problem = Problem(f"{where} fails by itself: {summarize_error(error)}", NEED, "pp = 1")
            raise TaskError(problem, where="the pipeline") from error
        return [each.clone() for each in tree_leaves(outputs)]

    def _difference(self, stage: int, got: list[Tensor], wanted: list[Tensor]) -> Problem | None:
        """A problem unless a stage's outputs are those of the whole model."""
        is_equal = len(got) == len(wanted) and all(
            a.shape == b.shape and torch.allclose(a, b, rtol=1e-5, atol=1e-6, equal_nan=True)
            for a, b in zip(got, wanted, strict=True)
        )
        if is_equal:
            return None
        blocks, names = self._stages.blocks[stage], self._stages.chain.blocks
        where = f"stage {stage} ({names[blocks.start]} to {names[blocks.stop - 1]})"
        text = f"other outputs of {where} by itself than in the whole model"
        return Problem(text, NEED, "no connections that skip blocks, no weights that two stages use; or pp = 1")
