"""Task facts: the facts of a task, for the plans that a search asks about.

variant  the fields of a plan that change what one rank computes with one sample
alike    see `counted_variant.py`
Law: facts are counted, not guessed: on the meta device, with the modules, shards and attention of a run.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TypeVar

from torch import nn

from fourfold.analysis.task_facts.counted_variant import CountedVariant, Forwards, Segments
from fourfold.analysis.task_facts.data_dependence import StepNeedsValues, forward_bounds, with_bounds
from fourfold.analysis.task_facts.fake_rank import FakeRank, RankBytes
from fourfold.analysis.task_facts.fake_step import FakeModel
from fourfold.analysis.task_facts.laid_out_model import FakeBatch, lay_out
from fourfold.analysis.task_facts.meta_calls import MetaCalls
from fourfold.analysis.task_facts.segments import equal_blocks
from fourfold.feed.data_input import open_data
from fourfold.feed.sample_rng import fetch_one
from fourfold.feed.stream import Stream
from fourfold.parts.optim.user_optimizer import build_optimizer
from fourfold.plan.check import param_problems
from fourfold.plan.model_traits import ModelTraits
from fourfold.plan.param_spec import ParamSpec
from fourfold.plan.pipeline.division import StageSpec
from fourfold.plan.plan import Plan
from fourfold.plan.predict.facts import ModelFacts
from fourfold.plan.tensor_dims import TensorSpec
from fourfold.plan.tensor_residual import WHOLE
from fourfold.plan.update_spec import UpdateSpec
from fourfold.step.batch import find_positions, unpack_batch
from fourfold.step.meta_model import build_meta_model
from fourfold.step.model_checks import model_traits
from fourfold.step.model_layout import on_stages, tensor_specs
from fourfold.step.model_specs import update_spec
from fourfold.step.pipeline.chain import Chain, find_chain, is_behind, map_stages, tied_parameters
from fourfold.words.errors import PlanError, Problem, TaskError, TrainingError
from fourfold.words.task import DEFAULT_BATCH_SIZE, Source, Task, check_task

_T = TypeVar("_T")
VARIANT_FIELDS = ("tp", "dims", "sp", "ring", "ulysses", "residual", "precision")


class TaskFacts:
    """See `FactsSource`. Raises TaskError for a task without a batch, or whose step cannot be counted."""

    def __init__(self, task: Task) -> None:
        check_task(task)
        self._task = task
        self._calls = MetaCalls()
        self._facts: dict[tuple[object, ...], ModelFacts] = {}
        self._forwards: dict[tuple[object, ...], Forwards] = {}
        self._laid_out: dict[tuple[object, ...], FakeModel] = {}
        self._refused: dict[tuple[object, ...], Sequence[Problem]] = {}
        self._whole_specs: dict[TensorSpec, list[ParamSpec]] = {}
        self._specs: dict[tuple[object, ...], list[ParamSpec]] = {}
        self._stage_blocks: dict[StageSpec, tuple[range, ...]] = {}

    @property
    def batch_size(self) -> int:
        return self._task.batch_size or DEFAULT_BATCH_SIZE

    @cached_property
    def _model(self) -> nn.Module:
        return build_meta_model(self._task)

    @cached_property
    def _chain(self) -> Chain:
        return find_chain(self._model)

    @property
    def update_spec(self) -> UpdateSpec:
        return self._update_spec

    @cached_property
    def _update_spec(self) -> UpdateSpec:
        return update_spec(self._model, self._optimizer, clip=self._task.clip, counts_states=True)

    @property
    def traits(self) -> ModelTraits:
        return self._traits

    @cached_property
    def _traits(self) -> ModelTraits:
        return model_traits(self._model)._replace(has_own_loss=self._task.loss is None)

    @cached_property
    def _optimizer(self):
        return build_optimizer(self._task.optimizer, list(self._model.parameters()))

    @cached_property
    def _source(self) -> Source:
        source = open_data(self._task.data(), where="the task's data").train.source
        if isinstance(source, Stream):
            need = "numbered samples: the step of one is counted"
            raise TaskError(Problem("a stream as data", need, "a list of some of its samples"), where="the task")
        return source

    @cached_property
    def _batch(self) -> FakeBatch:
        inputs, targets = unpack_batch(fetch_one(self._source, 0))
        positions = find_positions(inputs)
        return FakeBatch(inputs, targets, None if positions is None else positions.shape[1])

    def specs(self, plan: Plan) -> Sequence[ParamSpec]:
        tensor = plan.tensor_spec._replace(residual=WHOLE)  # of hidden tensors, not of parameters
        key = (tensor, plan.stage_spec)
        if key not in self._specs:
            if tensor not in self._whole_specs:
                self._whole_specs[tensor] = tensor_specs(self._model, self._optimizer, self._task.tensor, tensor)
            self._specs[key] = on_stages(self._model, self._whole_specs[tensor], plan.stage_spec)
        return self._specs[key]

    def stage_blocks(self, plan: Plan) -> tuple[range, ...]:
        if plan.num_stages == 1:
            return (range(len(self._chain.blocks)),)
        if plan.stage_spec not in self._stage_blocks:
            self._stage_blocks[plan.stage_spec] = map_stages(self._model, plan.stage_spec).blocks
        return self._stage_blocks[plan.stage_spec]

    def facts(self, plan: Plan) -> ModelFacts:
        ties = self._ties if plan.num_stages > 1 else {}
        key = (*(getattr(plan, name) for name in VARIANT_FIELDS), bool(ties))
        if key not in self._facts:
            self._facts[key] = self._counting(key, lambda: self._count(plan, ties, key).facts())
        return self._facts[key]

    def _count(self, plan: Plan, ties: Mapping[str, Sequence[str]], key: tuple[object, ...]) -> CountedVariant:
        laid_out_key = (plan.tensor_spec, plan.precision, bool(ties))
        if laid_out_key not in self._laid_out:
            self._laid_out[laid_out_key] = self._fake_model(plan, ties)
        fake = self._laid_out[laid_out_key]._replace(plan=plan)
        alike = (plan.tensor_spec._replace(ulysses=1), plan.precision, bool(ties), plan.sp, fake.tokens_of_rank)
        if alike not in self._forwards:
            self._forwards[alike] = Forwards(fake)
        return CountedVariant(fake, self._forwards[alike], self._segments, functools.partial(self._counting, key))

    def _counting(self, key: tuple[object, ...], count: Callable[[], _T]) -> _T:
        """What is counted of a variant. Raises PlanError or TaskError; a variant that is refused stays refused."""
        if key in self._refused:
            raise PlanError(self._refused[key], where="the plan")
        try:
            if problems := param_problems(Plan(), self.specs(Plan())):  # without weights there is no step to count
                raise PlanError(problems)
            return count()
        except StepNeedsValues as error:
            raise with_bounds(error, forward_bounds(self._task.model, self._source)) from error
        except (PlanError, TrainingError) as error:  # attention says in a step which heads it cannot divide
            self._refused[key] = error.problems
            raise PlanError(error.problems, where="the plan") from error

    @cached_property
    def _segments(self) -> Segments:
        return Segments(self._model, self._chain)

    @cached_property
    def _ties(self) -> dict[str, list[str]]:
        """By weight that is used behind the blocks too: its names there, where a last stage has a copy of it."""
        found = {}
        for first, *others in tied_parameters(self._model).values():
            if behind := [name for name in others if is_behind(self._chain, name)]:
                found[first] = behind
        return found

    def rank_bytes(self, plan: Plan, place: int = 0) -> RankBytes:
        """What a rank at a place of the pipeline axis holds at its peak: it runs its whole list, with all its blocks.

        Weights, gradients and states rest whole. Raises PlanError or TaskError.
        """
        num_samples = -(-self.batch_size // (plan.dp * plan.microbatches))
        stages = map_stages(self._model, plan.stage_spec)
        rank = FakeRank(
            self._fake_model(plan, {}),
            stages,
            place,
            num_samples=num_samples,
            states_per_weight=max(self.update_spec.num_states, default=0),
        )
        return rank.run(plan.compute_lists[place])

    def _fake_model(self, plan: Plan, ties: Mapping[str, Sequence[str]]) -> FakeModel:
        laid_out, blocks = lay_out(self._task, plan), self._chain.blocks
        same_as = equal_blocks({name: laid_out.model.get_submodule(name) for name in blocks})
        return FakeModel(laid_out, blocks, self._task.loss, self._batch, plan, same_as, self._calls).with_copies(ties)
