"""Dry run of the pipeline axis: the stages of a model, one after the other, compute what the whole model computes.

skeleton   the model with random weights that take nearly no memory (`skeleton.py`): every rank has all stages of it
templates  what the modules of other stages return in place of their outputs (`gates.py`)
need       of a stage: the modules of earlier stages whose outputs change its own, besides the block before it
Law: a stage computes with its weights, with what it receives, and with what the model makes of the batch alone. If it
needs anything else, this is found, for its outputs differ.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fourfold.parts.comm.communicator import Communicator
from fourfold.step.batch import num_samples, unpack_batch
from fourfold.step.dry_run.fixed_random import without_randomness
from fourfold.step.dry_run.loss_check import peer_failed, summarize_error
from fourfold.step.dry_run.preserve_module import preserve_module
from fourfold.step.model_call import call_model, eval_mode
from fourfold.step.pipeline.chain import StageMap
from fourfold.step.pipeline.gates import Carried, Gates, SplitResidual, StageEnd, Template, Templates
from fourfold.step.tensor_tree import is_plain, tree_leaves, tree_map
from fourfold.words.errors import FourfoldError, Problem, TaskError

DRY_RUN_SAMPLES = 2
MODEL = ""  # the name under which templates have the whole model
NEED = "blocks that are called once each, in order, and need only what modules before them returned and the batch"


class _Call(NamedTuple):
    """A call of one of the modules that gates replace, and its outputs."""

    name: str
    template: Template
    outputs: list[Tensor]


class PipelineDryRun:
    """The dry run of one rank. `world` lies on the plan's mesh."""

    def __init__(self, skeleton: nn.Module, stages: StageMap, world: Communicator, residual: SplitResidual) -> None:
        self._skeleton, self._stages, self._world, self._residual = skeleton, stages, world, residual
        self.templates: Templates = {}
        """What modules of other stages return; known after the first batch with samples on this rank."""
        self._needs: list[set[str]] = [set() for _ in stages.blocks]
        """By stage; those that any rank has found."""
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
        needs = [sorted(each) for each in self._needs]
        report = {"problems": problems, "error": text, "has_templates": bool(self.templates), "needs": needs}
        reports = self._world.all_gather_json(report)
        if error is not None:
            raise error
        for rank, report in enumerate(reports):
            if report["error"] is not None:
                raise peer_failed(rank, report["error"])
        found = [Problem(*problem) for report in reports for problem in report["problems"]]
        if found:
            raise TaskError(list(dict.fromkeys(found)), where="the pipeline")
        self._needs = [set().union(*each) for each in zip(*(report["needs"] for report in reports), strict=True)]
        self.has_ended = all(report["has_templates"] for report in reports)

    def carried_by(self, stage: int) -> Carried:
        """What a stage receives and sends for itself and for later ones, besides its input and output."""
        after = self._received(stage + 1) if stage + 1 < self._stages.num_stages else ()
        return Carried(self._received(stage), after)

    def _received(self, stage: int) -> tuple[str, ...]:
        wanted = set().union(*self._needs[stage:])
        return tuple(name for name in self._gates(stage).may_be_carried if name in wanted)

    def _gates(self, stage: int) -> Gates:
        return Gates(self._skeleton, self._stages, stage, self._residual)

    def _compare(self, inputs: Any) -> list[Problem]:
        with self._computing():
            calls, returned = self._run_whole(inputs)
            if problems := self._order_problems(calls):
                return problems
            by_name = {call.name: call for call in calls}
            templates = {call.name: call.template for call in calls} | {
                MODEL: Template.of(_without_caches(returned), inputs)
            }
            expected = [by_name[name].outputs for name in self._stages.boundaries()]
            expected.append([each.clone() for each in tree_leaves(returned)])
            outputs, received = {call.name: call.outputs for call in calls}, []
            for stage, wanted in enumerate(expected):
                run = _StageRun(stage, inputs, templates, received, outputs)
                if problem := self._find_needs(run, wanted):
                    return [problem]
                received = wanted
        self.templates = templates
        return []

    def _find_needs(self, run: "_StageRun", wanted: list[Tensor]) -> Problem | None:
        """Find what a stage needs; a problem if its outputs are others even with all that earlier modules returned."""
        candidates = self._gates(run.stage).may_be_carried
        if self._is_computed(run, wanted, unknown=candidates):
            return None
        if problem := self._difference(run.stage, self._run_stage(run, candidates, ()), wanted):
            return problem
        needs = [name for name in candidates if not self._is_computed(run, wanted, unknown=[name])]
        rest = [name for name in candidates if name not in needs]
        self._needs[run.stage] |= set(needs if self._is_computed(run, wanted, unknown=rest) else candidates)
        return None

    def _is_computed(self, run: "_StageRun", wanted: list[Tensor], *, unknown: Sequence[str]) -> bool:
        """Whether a stage's outputs are these although it does not know what some modules returned."""
        try:
            got = self._run_stage(run, self._gates(run.stage).may_be_carried, unknown)
        except TaskError:  # the model itself has refused what it cannot know
            return False
        return _is_equal(got, wanted)

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
        names, (first_exit, *_) = [call.name for call in calls], self._stages.boundaries()
        if late := [name for name in before if names.index(name) > names.index(first_exit)]:
            got = f"{late[0]}, which has weights and is defined in front of the blocks, called behind {first_exit}"
            attempt = "a model that defines it behind the blocks, or pp = 1"
            return [Problem(got, "modules defined in front of the blocks that are called on the first stage", attempt)]
        return []

    def _run_stage(self, run: "_StageRun", carried: Sequence[str], unknown: Sequence[str]) -> list[Tensor]:
        """A stage's outputs. `unknown`: those of the carried modules whose outputs are replaced by NaN."""
        outputs: Any
        stage, received = run.stage, list(run.received)
        for name in carried:
            received += [_unknown(each) if name in unknown else each.clone() for each in run.outputs[name]]
        try:
            with (
                self._own_weights_only(stage),
                self._gates(stage).closed(run.templates, received, Carried(tuple(carried))),
            ):
                outputs = call_model(self._skeleton, run.inputs)
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

    @contextlib.contextmanager
    def _own_weights_only(self, stage: int) -> Iterator[None]:
        """Within, the weights of other stages are NaN: in a step, this stage does not have them."""
        named = list(self._skeleton.named_parameters(remove_duplicate=False))
        own = {id(p) for name, p in named if self._stages.stage_of(name) == stage}
        others = [(p, p.data) for p in self._skeleton.parameters() if id(p) not in own and p.is_floating_point()]
        for p, data in others:
            p.data = data.new_full((), torch.nan).expand(data.shape)
        try:
            yield
        finally:
            for p, data in others:
                p.data = data

    def _difference(self, stage: int, got: list[Tensor], wanted: list[Tensor]) -> Problem | None:
        """A problem unless a stage's outputs are those of the whole model."""
        if _is_equal(got, wanted):
            return None
        blocks, names = self._stages.blocks[stage], self._stages.chain.blocks
        where = f"stage {stage} ({names[blocks.start]} to {names[blocks.stop - 1]})"
        text = f"other outputs of {where} by itself than in the whole model"
        attempt = "no weights that two stages use, but for an embedding tied to a head; or pp = 1"
        return Problem(text, NEED, attempt)


class _StageRun(NamedTuple):
    """What a stage is tried with: the batch, what it receives, and what all modules have returned."""

    stage: int
    inputs: Any
    templates: Templates
    received: list[Tensor]
    outputs: Mapping[str, list[Tensor]]


def _unknown(tensor: Tensor) -> Tensor:
    """A tensor that shows where it is used: what is computed with NaN is NaN."""
    return torch.full_like(tensor, torch.nan) if tensor.is_floating_point() else torch.zeros_like(tensor)


def _without_caches(returned: Any) -> Any:
    """A model's outputs without objects that have a state of their own: those of a dry run are no later call's."""
    if not isinstance(returned, dict):
        return returned
    kept = {name: each for name, each in returned.items() if is_plain(each)}
    return kept if type(returned) is dict else type(returned)(**kept)


def _is_equal(got: Sequence[Tensor], wanted: Sequence[Tensor]) -> bool:
    return len(got) == len(wanted) and all(
        a.shape == b.shape and torch.allclose(a, b, rtol=1e-5, atol=1e-6, equal_nan=True)
        for a, b in zip(got, wanted, strict=True)
    )
