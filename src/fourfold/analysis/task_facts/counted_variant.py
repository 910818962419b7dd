"""Counted variants: what the fake steps of one variant say of each segment of the model.

alike  variants that differ in how sequence ranks share attention: they have the same kernels, which are counted once
Law: what activations take, which costs most to count, is counted when it is read.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any, TypeVar

from torch import nn

from fourfold.analysis.task_facts.fake_attention import attention_collectives
from fourfold.analysis.task_facts.fake_memory import MemoryOfSegments, MemoryRecord, record_memory
from fourfold.analysis.task_facts.fake_ranks import RecordedCollective
from fourfold.analysis.task_facts.fake_step import FakeModel, ForwardRecord, record_forward
from fourfold.analysis.task_facts.sample_operations import operations_of_sample
from fourfold.analysis.task_facts.segments import Boundary
from fourfold.plan.predict.facts import Collective, ModelFacts, SegmentFacts
from fourfold.plan.sequence import heads_problem
from fourfold.step.batch_norm import uses_batch_stats
from fourfold.step.batch_statistics import batch_norms
from fourfold.step.pipeline.chain import Chain, is_behind
from fourfold.words.errors import PlanError
from fourfold.words.layout import Change

FEW, MANY = 2, 4  # samples of the two fake steps that are compared
MORE = 6  # of a third forward, which shows whether all lie on a line
RECOMPUTES = ("none", "selective", "full")
_T = TypeVar("_T")


class Segments:
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


class Forwards:
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


class CountedVariant:
    """The fake steps of one variant. `counting`: runs what is counted later, and says why it cannot be."""

    def __init__(
        self, fake: FakeModel, forwards: Forwards, segments: Segments, counting: Callable[[Callable[[], Any]], Any]
    ) -> None:
        self._fake, self._forwards, self._segments, self._counting = fake, forwards, segments, counting
        self._recomputes = RECOMPUTES if fake.blocks else RECOMPUTES[:1]
        self._records: dict[tuple[str, int], MemoryRecord] = {}

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
        return MemoryOfSegments(self._record(recompute, FEW), self._record(recompute, MANY), FEW, MANY)

    def _record(self, recompute: str, num_samples: int) -> MemoryRecord:
        key = (recompute if recompute in self._recomputes else "none", num_samples)
        if key not in self._records:
            self._records[key] = record_memory(self._fake, num_samples, key[0])
        return self._records[key]

    # ---- what is sent ----------------------------------------------------------------------------------------------

    def _check_heads(self) -> None:
        """Raise PlanError if sequence ranks cannot share the heads."""
        for _, call in self._forwards.few.attention:
            if problem := heads_problem(call.q.shape[1], call.k.shape[1], self._fake.plan.ulysses):
                raise PlanError(problem, where="the plan")

    def _collectives(self, number: int) -> list[Collective]:
        """Along sp, and along tp: how often in forward, in backward, and again in a backward that recomputes."""
        found = list[Collective]()
        if self._fake.plan.sp > 1:
            spec, calls = self._fake.plan.sequence_spec, self._forwards.few.attention
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
