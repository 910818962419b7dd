"""Task facts: the facts of a task, for the plans that a search asks about.

variant  the fields of a plan that change what one rank computes with one sample
Law: facts are counted, not guessed: on the meta device, with the modules, shards and attention of a run.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property

from torch import nn

from fourfold.analysis.task_facts.data_dependence import StepNeedsValues, forward_bounds, with_bounds
from fourfold.analysis.task_facts.fake_memory import MemoryOfSegments, record_memory
from fourfold.analysis.task_facts.fake_rank import FakeRank, RankBytes
from fourfold.analysis.task_facts.fake_ranks import RecordedCollective
from fourfold.analysis.task_facts.fake_step import FakeModel, record_forward
from fourfold.analysis.task_facts.laid_out_model import FakeBatch, lay_out
from fourfold.analysis.task_facts.sample_operations import operations_of_sample
from fourfold.analysis.task_facts.segments import Boundary
from fourfold.feed.data_input import open_data
from fourfold.feed.sample_rng import fetch_one
from fourfold.feed.stream import Stream
from fourfold.parts.optim.user_optimizer import build_optimizer
from fourfold.plan.param_spec import ParamSpec
from fourfold.plan.plan import Plan
from fourfold.plan.predict.facts import Collective, ModelFacts, SegmentFacts
from fourfold.plan.update_spec import UpdateSpec
from fourfold.step.batch import find_positions, unpack_batch
from fourfold.step.batch_norm import uses_batch_stats
from fourfold.step.batch_statistics import batch_norms
from fourfold.step.meta_model import build_meta_model
from fourfold.step.model_layout import laid_out_specs
from fourfold.step.model_specs import update_spec
from fourfold.step.pipeline.chain import Chain, find_chain, is_behind, map_stages, tied_parameters
from fourfold.words.errors import PlanError, Problem, TaskError, TrainingError
from fourfold.words.layout import Change
from fourfold.words.task import DEFAULT_BATCH_SIZE, Source, Task, check_task

FEW, MANY = 2, 4  # samples of the two fake steps that are compared
MORE = 6  # of a third forward, which shows whether all lie on a line
RECOMPUTES = ("none", "selective", "full")
VARIANT_FIELDS = ("tp", "dims", "sp", "ring", "ulysses", "residual", "precision")


class TaskFacts:
    """See `FactsSource`. Raises TaskError for a task without a batch, or whose step cannot be counted."""

    def __init__(self, task: Task) -> None:
        check_task(task)
        self._task = task
        self._facts: dict[tuple[object, ...], ModelFacts] = {}
        self._refused: dict[tuple[object, ...], Sequence[Problem]] = {}
        self._specs: dict[tuple[object, ...], list[ParamSpec]] = {}

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
        key = (plan.tensor_spec, plan.stage_spec)
        if key not in self._specs:
            self._specs[key] = laid_out_specs(
                self._model, self._optimizer, self._task.tensor, plan.tensor_spec, plan.stage_spec
            )
        return self._specs[key]

    def stage_blocks(self, plan: Plan) -> tuple[range, ...]:
        if plan.num_stages == 1:
            return (range(len(self._chain.blocks)),)
        return map_stages(self._model, plan.stage_spec).blocks

    def facts(self, plan: Plan) -> ModelFacts:
        ties = self._ties if plan.num_stages > 1 else {}
        key = (*(getattr(plan, name) for name in VARIANT_FIELDS), bool(ties))
        if key in self._refused:
            raise PlanError(self._refused[key], where="the plan")
        if key not in self._facts:
            try:
                fake = self._fake_model(plan).with_copies(ties)
                self._facts[key] = _Counted(fake, self._model, self._chain).facts()
            except StepNeedsValues as error:
                raise with_bounds(error, forward_bounds(self._task.model, self._source)) from error
            except (PlanError, TrainingError) as error:  # attention says in a step which heads it cannot divide
                self._refused[key] = error.problems
                raise PlanError(error.problems, where="the plan") from error
        return self._facts[key]

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
            self._fake_model(plan),
            stages,
            place,
            num_samples=num_samples,
            states_per_weight=max(self.update_spec.num_states, default=0),
        )
        return rank.run(plan.compute_lists[place])

    def _fake_model(self, plan: Plan) -> FakeModel:
        return FakeModel(lay_out(self._task, plan), self._chain.blocks, self._task.loss, self._batch, plan)


class _Counted:
    """The fake steps of one variant."""

    def __init__(self, fake: FakeModel, whole: nn.Module, chain: Chain) -> None:
        """`whole`: the model that is not cut."""
        self._fake, self._whole, self._chain = fake, whole, chain
        recomputes = RECOMPUTES if chain.blocks else RECOMPUTES[:1]
        self._memory = {each: _memory_of(fake, each) for each in recomputes}
        self._forwards = {number: record_forward(fake, number) for number in (FEW, MANY, MORE)}
        self._operations = operations_of_sample({n: each.kernels for n, each in self._forwards.items()})
        self._num_segments = len(chain.blocks) + 2

    def facts(self) -> ModelFacts:
        segments = [self._segment(number) for number in range(self._num_segments)]
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
        tracker = self._forwards[FEW].tracker
        counted = tracker.counted_as(number)
        kept = {each: memory.kept(counted) for each, memory in self._memory.items()}
        peaks = {each: memory.peaks(counted) for each, memory in self._memory.items()}
        return SegmentFacts(
            self._name(number),
            self._params.get(number, ()),
            tuple(self._operations.get(counted, ())),
            {each: kept.get(each, kept["none"]) for each in RECOMPUTES},
            tuple(self._collectives(counted)),
            max((each.sample_bytes for each in peaks["none"]), default=0.0),
            self._norm_channels.get(number, ()),
            {each: peaks.get(each, peaks["none"]) for each in RECOMPUTES},
        )

    def _name(self, number: int) -> str:
        return self._chain.blocks[number - 1] if 0 < number <= len(self._chain.blocks) else ""

    def _owner(self, name: str) -> int:
        """The segment of a parameter or module."""
        place = self._place_of.get(".".join(name.split(".")[: self._depth]))
        if place is not None:
            return place + 1
        return self._num_segments - 1 if is_behind(self._chain, name) else 0

    @cached_property
    def _place_of(self) -> dict[str, int]:
        return {name: place for place, name in enumerate(self._chain.blocks)}

    @cached_property
    def _depth(self) -> int:
        """How many parts the names of blocks have."""
        return self._chain.blocks[0].count(".") + 1 if self._chain.blocks else 0

    @cached_property
    def _params(self) -> dict[int, tuple[str, ...]]:
        """By segment: the names of its parameters."""
        found: dict[int, tuple[str, ...]] = {}
        for name, _ in self._whole.named_parameters():
            owner = self._owner(name)
            found[owner] = (*found.get(owner, ()), name)
        return found

    @cached_property
    def _norm_channels(self) -> dict[int, tuple[int, ...]]:
        found: dict[int, tuple[int, ...]] = {}
        for name, norm in batch_norms(self._whole):
            if uses_batch_stats(norm):
                owner = self._owner(f"{name}.")
                found[owner] = (*found.get(owner, ()), norm.num_features)
        return found

    def _collectives(self, number: int) -> list[Collective]:
        """Along sp, and along tp: how often in forward, in backward, and again in a backward that recomputes."""
        found = [each for segment, each in self._forwards[FEW].sent_by_attention if segment == number]
        if self._fake.plan.tp == 1:
            return found
        counts = {each: memory.few.collectives.get(number, Counter()) for each, memory in self._memory.items()}
        forward, backward = (_by_tensor(counts["none"], in_backward=each) for each in (False, True))
        again = {each: _by_tensor(counts[each], in_backward=True) - backward for each in self._memory}
        full, selective = (again.get(each, Counter()) for each in ("full", "selective"))
        return found + [
            Collective("tp", call[0], call[1] / FEW, forward[call], backward[call], full[call], selective[call])
            for call in forward | backward | full | selective
        ]

    def _boundary(self) -> Boundary:
        """Of one sample."""
        found = self._forwards[FEW].tracker.boundary
        return found._replace(num_bytes=found.num_bytes / FEW)


def _by_tensor(calls: Mapping[RecordedCollective, int], *, in_backward: bool) -> Counter[tuple[Change, float]]:
    """How often each change of a tensor of so many bytes is made."""
    found = Counter[tuple[Change, float]]()
    for call, count in calls.items():
        found[call.change, call.whole_bytes] += count * (call.in_backward == in_backward)
    return found


def _memory_of(fake: FakeModel, recompute: str) -> MemoryOfSegments:
    few, many = (record_memory(fake, number, recompute) for number in (FEW, MANY))
    return MemoryOfSegments(few, many, FEW, MANY)
