"""Task facts: the facts of a task, for the plans that a search asks about.

variant  the fields of a plan that change what one rank computes with one sample
alike    variants that differ in how context ranks share attention: they have the same kernels, which are counted once
Law: facts are counted, not guessed: on the meta device, with the modules, shards and attention of a run. What
activations take, which costs most to count, is counted when it is read.
"""

import copy
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from operator import attrgetter
from typing import Any, Self, TypeVar

from torch import nn

from fourfold.axes.context.rules.layout import heads_problem
from fourfold.axes.pipeline.rules.division import StageSpec
from fourfold.axes.pipeline.work.chain import Chain, find_chain, is_behind, map_stages, tied_parameters
from fourfold.axes.tensor.rules.dims import TensorSpec
from fourfold.feed.data_input import open_data
from fourfold.feed.sample_rng import fetch_one
from fourfold.feed.stream import Stream
from fourfold.model.batch import find_positions, unpack_batch
from fourfold.model.batch_statistics import batch_norms, uses_batch_stats
from fourfold.model.weights import update_spec
from fourfold.optim.user_optimizer import build_optimizer
from fourfold.plan.check import param_problems
from fourfold.plan.model_traits import ModelTraits
from fourfold.plan.param_spec import ParamSpec, UpdateSpec
from fourfold.plan.plan import Plan
from fourfold.planner.predict.facts import Collective, ModelFacts, SegmentFacts
from fourfold.planner.remembered import remembered
from fourfold.planner.task_facts.fake_memory import MemoryOfSegments, MemoryRecord, record_memory
from fourfold.planner.task_facts.fake_ranks import RecordedCollective
from fourfold.planner.task_facts.fake_step import (
    FakeBatch,
    FakeModel,
    ForwardRecord,
    StepNeedsValues,
    forward_bounds,
    lay_out,
    record_forward,
    with_bounds,
)
from fourfold.planner.task_facts.operations import MetaCalls, attention_collectives, operations_of_sample
from fourfold.planner.task_facts.segments import Boundary, equal_blocks
from fourfold.step.initial_model import build_meta_model
from fourfold.step.model_checks import model_traits
from fourfold.step.model_layout import on_stages, tensor_specs
from fourfold.words.errors import PlanError, Problem, TaskError, TrainingError
from fourfold.words.layout import Change
from fourfold.words.task import DEFAULT_BATCH_SIZE, Source, Task, check_task

# ---- one variant -----------------------------------------------------------------------------------------------------


FEW, MANY = 2, 4  # samples of the two fake steps that are compared
MORE = 6  # of a third forward, which shows whether all lie on a line
RECOMPUTES = ("none", "selective", "full")
_T = TypeVar("_T")


class _Segments:
    """The segments of a model that is not cut, and what they own."""

    def __init__(self, model: nn.Module, chain: Chain) -> None:
        self._model, self._chain = model, chain
        self.number = len(chain.blocks) + 2

    def name(self, number: int) -> str:
        return self._chain.blocks[number - 1] if 0 < number <= len(self._chain.blocks) else ""

    def _owner(self, name: str) -> int:
        """The segment of a parameter or module."""
        place = self._place_of.get(".".join(name.split(".")[: self._depth]))
        if place is not None:
            return place + 1
        return self.number - 1 if is_behind(self._chain, name) else 0

    @cached_property
    def _place_of(self) -> dict[str, int]:
        return {name: place for place, name in enumerate(self._chain.blocks)}

    @cached_property
    def _depth(self) -> int:
        """How many parts the names of blocks have."""
        return self._chain.blocks[0].count(".") + 1 if self._chain.blocks else 0

    @cached_property
    def params(self) -> dict[int, tuple[str, ...]]:
        """By segment: the names of its parameters."""
        found: dict[int, tuple[str, ...]] = {}
        for name, _ in self._model.named_parameters():
            owner = self._owner(name)
            found[owner] = (*found.get(owner, ()), name)
        return found

    @cached_property
    def norm_channels(self) -> dict[int, tuple[int, ...]]:
        found: dict[int, tuple[int, ...]] = {}
        for name, norm in batch_norms(self._model):
            if uses_batch_stats(norm):
                owner = self._owner(f"{name}.")
                found[owner] = (*found.get(owner, ()), norm.num_features)
        return found


class _Forwards:
    """The forwards of alike variants. `tensor_calls`: by `recompute`, the collectives along tp of few samples."""

    def __init__(self, fake: FakeModel) -> None:
        self.records = {number: record_forward(fake, number) for number in (FEW, MANY, MORE)}
        self.operations = {
            segment: tuple(found)
            for segment, found in operations_of_sample({n: each.kernels for n, each in self.records.items()}).items()
        }
        self.tensor_calls: dict[str, Mapping[int, Counter[RecordedCollective]]] = {}

    @property
    def few(self) -> ForwardRecord:
        return self.records[FEW]


class _CountedVariant:
    """The fake steps of one variant. `counting`: runs what is counted later, and says why it cannot be."""

    def __init__(
        self, fake: FakeModel, forwards: _Forwards, segments: _Segments, counting: Callable[[Callable[[], Any]], Any]
    ) -> None:
        self._fake, self._forwards, self._segments, self._counting = fake, forwards, segments, counting
        self._recomputes = RECOMPUTES if fake.blocks else RECOMPUTES[:1]

    def facts(self) -> ModelFacts:
        self._check_heads()
        segments = [self._segment(number) for number in range(self._segments.number)]
        boundary = self._boundary()
        return ModelFacts(
            segments[0],
            tuple(segments[1:-1]),
            segments[-1],
            boundary.num_bytes,
            self._fake.batch.num_tokens,
            boundary.columns,
            boundary.element_bytes,
        )

    def _segment(self, number: int) -> SegmentFacts:
        counted = self._forwards.few.tracker.counted_as(number)
        return SegmentFacts(
            self._segments.name(number),
            self._segments.params.get(number, ()),
            self._forwards.operations.get(counted, ()),
            _ByRecompute(lambda each: self._counting(lambda: self._memory(each).kept(counted))),
            tuple(self._collectives(counted)),
            norm_channels=self._segments.norm_channels.get(number, ()),
            peaks=_ByRecompute(lambda each: self._counting(lambda: self._memory(each).peaks(counted))),
        )

    # ---- memory ----------------------------------------------------------------------------------------------------

    def _memory(self, recompute: str) -> MemoryOfSegments:
        counted = recompute if recompute in self._recomputes else "none"
        return MemoryOfSegments(self._record(counted, FEW), self._record(counted, MANY), FEW, MANY)

    @remembered()
    def _record(self, recompute: str, num_samples: int) -> MemoryRecord:
        return record_memory(self._fake, num_samples, recompute)

    # ---- what is sent ----------------------------------------------------------------------------------------------

    def _check_heads(self) -> None:
        """Raise PlanError if context ranks cannot share the heads."""
        for _, call in self._forwards.few.attention:
            if problem := heads_problem(call.q.shape[1], call.k.shape[1], self._fake.plan.ulysses):
                raise PlanError(problem, where="the plan")

    def _collectives(self, number: int) -> list[Collective]:
        """Along cp, and along tp: how often in forward, in backward, and again in a backward that recomputes."""
        found = list[Collective]()
        if self._fake.plan.cp > 1:
            spec, calls = self._fake.plan.context_spec, self._forwards.few.attention
            found += [
                each for owner, call in calls if owner == number for each in attention_collectives(call, spec, FEW)
            ]
        if self._fake.plan.tp == 1:
            return found
        counts = {each: self._tensor_calls(each).get(number, Counter()) for each in self._recomputes}
        forward, backward = (_by_tensor(counts["none"], in_backward=each) for each in (False, True))
        again = {each: _by_tensor(counts[each], in_backward=True) - backward for each in counts}
        full, selective = (again.get(each, Counter()) for each in ("full", "selective"))
        return found + [
            Collective("tp", call[0], call[1] / FEW, forward[call], backward[call], full[call], selective[call])
            for call in forward | backward | full | selective
        ]

    def _tensor_calls(self, recompute: str) -> Mapping[int, Counter[RecordedCollective]]:
        calls = self._forwards.tensor_calls
        if recompute not in calls:
            calls[recompute] = self._record(recompute, FEW).collectives
        return calls[recompute]

    def _boundary(self) -> Boundary:
        """Of one sample."""
        found = self._forwards.few.tracker.boundary
        return found._replace(num_bytes=found.num_bytes / FEW)


class _ByRecompute(Mapping[str, _T]):
    """By the plan's `recompute`: what is counted when it is read for the first time."""

    def __init__(self, count: Callable[[str], _T]) -> None:
        self._count, self._found = count, dict[str, _T]()

    def __getitem__(self, recompute: str) -> _T:
        if recompute not in RECOMPUTES:
            raise KeyError(recompute)
        if recompute not in self._found:
            self._found[recompute] = self._count(recompute)
        return self._found[recompute]

    def __contains__(self, recompute: object) -> bool:
        return recompute in RECOMPUTES

    def __iter__(self) -> Iterator[str]:
        return iter(RECOMPUTES)

    def __len__(self) -> int:
        return len(RECOMPUTES)


def _by_tensor(calls: Mapping[RecordedCollective, int], *, in_backward: bool) -> Counter[tuple[Change, float]]:
    """How often each change of a tensor of so many bytes is made."""
    found = Counter[tuple[Change, float]]()
    for call, count in calls.items():
        found[call.change, call.whole_bytes] += count * (call.in_backward == in_backward)
    return found


# ---- all variants ----------------------------------------------------------------------------------------------------


variant_key = attrgetter("tp", "dims", "cp", "ring", "ulysses", "sequence_parallel", "precision")


class TaskFacts:
    """See `FactsSource`. Raises TaskError for a task without a batch, or whose step cannot be counted."""

    def __init__(self, task: Task) -> None:
        check_task(task)
        self.task, self.batch_size = task, task.batch_size or DEFAULT_BATCH_SIZE
        self._calls = MetaCalls()
        self._refused: dict[tuple[object, ...], Sequence[Problem]] = {}

    def resized(self, batch_size: int) -> Self:
        resized = copy.copy(self)
        resized.batch_size = batch_size
        return resized

    @cached_property
    def _model(self) -> nn.Module:
        return build_meta_model(self.task)

    @cached_property
    def _chain(self) -> Chain:
        return find_chain(self._model)

    @property
    @remembered()
    def update_spec(self) -> UpdateSpec:
        return update_spec(self._model, self._optimizer, clip=self.task.clip, counts_states=True)

    @property
    @remembered()
    def traits(self) -> ModelTraits:
        return model_traits(self._model)._replace(has_own_loss=self.task.loss is None)

    @cached_property
    def _optimizer(self):
        return build_optimizer(self.task.optimizer, list(self._model.parameters()))

    @cached_property
    def _source(self) -> Source:
        source = open_data(self.task.data(), where="the task's data").train.source
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
        # Sequence parallelism splits hidden tensors, not parameters.
        return self._specs(plan.tensor_spec._replace(sequence_parallel=False), plan.stage_spec)

    @remembered()
    def _specs(self, tensor: TensorSpec, stages: StageSpec) -> list[ParamSpec]:
        return on_stages(self._model, self._whole_specs(tensor), stages)

    @remembered()
    def _whole_specs(self, tensor: TensorSpec) -> list[ParamSpec]:
        return tensor_specs(self._model, self._optimizer, self.task.tensor, tensor)

    @remembered(lambda _, plan: plan.stage_spec)
    def stage_blocks(self, plan: Plan) -> tuple[range, ...]:
        if plan.num_stages == 1:
            return (range(len(self._chain.blocks)),)
        return map_stages(self._model, plan.stage_spec).blocks

    @remembered(lambda self, plan: self._variant(plan))
    def facts(self, plan: Plan) -> ModelFacts:
        variant = self._variant(plan)
        return self._counting(variant, lambda: self._count(plan, functools.partial(self._counting, variant)).facts())

    def _variant(self, plan: Plan) -> tuple[object, ...]:
        return (variant_key(plan), bool(self._ties_of(plan)))

    def _ties_of(self, plan: Plan) -> Mapping[str, Sequence[str]]:
        return self._ties if plan.num_stages > 1 else {}

    def _count(self, plan: Plan, counting: Callable[[Callable[[], Any]], Any]) -> _CountedVariant:
        fake = self._laid_out(plan)._replace(plan=plan)
        return _CountedVariant(fake, self._forwards(fake), self._segments, counting)

    @remembered(lambda self, plan: (plan.tensor_spec, plan.precision, bool(self._ties_of(plan))))
    def _laid_out(self, plan: Plan) -> FakeModel:
        return self.fake_model(plan, self._ties_of(plan))

    @remembered(
        lambda _, fake: (
            fake.plan.tensor_spec._replace(ulysses=1),
            *(fake.plan.precision, bool(fake.copies), fake.plan.cp, fake.tokens_of_rank),
        )
    )
    def _forwards(self, fake: FakeModel) -> _Forwards:
        return _Forwards(fake)

    def _counting(self, key: tuple[object, ...], count: Callable[[], _T]) -> _T:
        """What is counted of a variant. Raises PlanError or TaskError; a variant that is refused stays refused."""
        if key in self._refused:
            raise PlanError(self._refused[key], where="the plan")
        try:
            if problems := param_problems(Plan(), self.specs(Plan())):  # without weights there is no step to count
                raise PlanError(problems)
            return count()
        except StepNeedsValues as error:
            raise with_bounds(error, forward_bounds(self.task.model, self._source)) from error
        except (PlanError, TrainingError) as error:  # attention says in a step which heads it cannot divide
            self._refused[key] = error.problems
            raise PlanError(error.problems, where="the plan") from error

    @cached_property
    def _segments(self) -> _Segments:
        return _Segments(self._model, self._chain)

    @cached_property
    def _ties(self) -> dict[str, list[str]]:
        """By weight that is used behind the blocks too: its names there, where a last stage has a copy of it."""
        found = {}
        for first, *others in tied_parameters(self._model).values():
            if behind := [name for name in others if is_behind(self._chain, name)]:
                found[first] = behind
        return found

    def fake_model(self, plan: Plan, ties: Mapping[str, Sequence[str]]) -> FakeModel:
        """What fake steps of a plan run. `ties`: by weight, its names where a last stage has a copy of it."""
        laid_out, blocks = lay_out(self.task, plan), self._chain.blocks
        same_as = equal_blocks({name: laid_out.model.get_submodule(name) for name in blocks})
        return FakeModel(laid_out, blocks, self.task.loss, self._batch, plan, same_as, self._calls).with_copies(ties)
