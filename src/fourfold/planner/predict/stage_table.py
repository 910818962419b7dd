"""Stage table: what places compute and keep, for estimates: sums over segments, each of which is priced once.

variant  a plan's fields on which facts and the prices of segments depend
Law: a place costs and keeps what its segments do. What it keeps is found apart: activations take long to count.
"""

import dataclasses
import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import NamedTuple

from fourfold.plan.plan import Plan
from fourfold.planner.predict.facts import FactsSource
from fourfold.planner.predict.memory import copied_shapes, factor_bytes
from fourfold.planner.predict.prediction import StepTerms
from fourfold.planner.predict.prices import GroupShape, Prices
from fourfold.planner.predict.stage_seconds import ZERO, SegmentParts, SegmentPricer, add_terms, at_speed, minus, plus
from fourfold.planner.remembered import remembered

SEGMENT_FIELDS = ("tp", "dims", "cp", "ring", "ulysses", "sequence_parallel", "precision", "recompute", "batch_norm")
PLACE_FIELDS = (*SEGMENT_FIELDS, "pp", "interleave", "stages")
place_key, segment_key = attrgetter(*PLACE_FIELDS), attrgetter(*SEGMENT_FIELDS)


@dataclass(frozen=True)
class PlaceCompute:
    """What a place computes with one microbatch.

    first_stage  seconds of a backward, and of its weight half, of the stage whose buckets are ready last
    """

    forward: StepTerms
    backward_input: StepTerms
    backward_weight: StepTerms
    first_stage: tuple[float, float]
    num_segments: int

    def at_speed(self, speed: float) -> "PlaceCompute":
        """The same on devices that compute faster or slower."""
        slower = dataclasses.replace(
            self,
            forward=at_speed(self.forward, speed),
            backward_input=at_speed(self.backward_input, speed),
            backward_weight=at_speed(self.backward_weight, speed),
        )
        backward, weight = self.first_stage
        backward *= slower.backward_seconds / self.backward_seconds if self.backward_seconds else 1.0
        weight *= slower.weight_seconds / self.weight_seconds if self.weight_seconds else 1.0
        return dataclasses.replace(slower, first_stage=(backward, weight))

    @cached_property
    def forward_seconds(self) -> float:
        return sum(self.forward)

    @cached_property
    def input_seconds(self) -> float:
        return sum(self.backward_input)

    @cached_property
    def weight_seconds(self) -> float:
        return sum(self.backward_weight)

    @cached_property
    def backward_seconds(self) -> float:
        return self.input_seconds + self.weight_seconds


class PlaceActivations(NamedTuple):
    """What a place keeps of one sample.

    saved_bytes  with what is received; `deferred_bytes`: what is kept in their place between the halves of a backward
    temporary_bytes  of a microbatch: the most that a segment holds besides, when those behind it are freed;
                     `first_half_bytes`: when those behind it have left what their second halves need
    """

    saved_bytes: float
    deferred_bytes: float
    temporary_bytes: float
    first_half_bytes: float


_Ranges = Sequence[tuple[int, int]]
"""Of segments, one for each stage of a place."""


class _Seconds(NamedTuple):
    """Sums over the first 0, 1, … segments of a model."""

    forward: list[StepTerms]
    backward_input: list[StepTerms]
    backward_weight: list[StepTerms]


class _Bytes(NamedTuple):
    """Sums over the first 0, 1, … segments of a model: what they keep until backward, and between its halves."""

    saved: list[float]
    deferred: list[float]


def _of_statistics(plan: Plan, data: GroupShape) -> GroupShape | None:
    """The ranks of dp, where seconds depend on them."""
    return data if plan.batch_norm == "sync" else None


class StageTable:
    """The places of the plans of one search."""

    def __init__(self, source: FactsSource, prices: Prices) -> None:
        self._source, self._prices = source, prices

    @remembered(lambda _, plan, num_samples, data: (place_key(plan), num_samples, _of_statistics(plan, data)))
    def of(self, plan: Plan, num_samples: float, data: GroupShape) -> tuple[PlaceCompute, ...]:
        """By place. `data`: the ranks of dp, for batch statistics."""
        sums = self._sums(plan, num_samples, data)
        return tuple(_compute(sums, ranges) for ranges in self.ranges_of(plan))

    @remembered(lambda _, plan, num_samples: (place_key(plan), num_samples))
    def activations(self, plan: Plan, num_samples: float) -> tuple[PlaceActivations, ...]:
        """By place."""
        received = self._source.facts(plan).boundary_bytes if plan.pp > 1 else 0.0
        kept, temporary = self._kept_bytes(plan), self._temporary_bytes(plan, num_samples)
        return tuple(_activations(kept, temporary, ranges, received, num_samples) for ranges in self.ranges_of(plan))

    @remembered(lambda _, plan, num_samples: (segment_key(plan), plan.pp > 1, num_samples))
    def segment_seconds(self, plan: Plan, num_samples: float) -> list[float]:
        """By segment: a forward and a backward of a microbatch, without batch statistics."""
        return [sum(map(sum, each)) for each in self._parts(plan, num_samples, GroupShape(1))]

    @remembered(lambda _, plan: (plan.pp, plan.interleave, plan.stages))
    def ranges_of(self, plan: Plan) -> list[_Ranges]:
        """By place: the segments of each of its stages."""
        blocks = self._source.stage_blocks(plan)
        # Segment 0 is the first end, block i is segment i + 1.
        starts = [0 if stage == 0 else own.start + 1 for stage, own in enumerate(blocks)]
        ranges = list(zip(starts, [*starts[1:], blocks[-1].stop + 2], strict=True))
        return [ranges[place :: plan.pp] for place in range(plan.pp)]

    @remembered(
        lambda _, plan, num_samples, data: (segment_key(plan), plan.pp > 1, num_samples, _of_statistics(plan, data))
    )
    def _parts(self, plan: Plan, num_samples: float, data: GroupShape) -> list[SegmentParts]:
        """By segment."""
        pricer = SegmentPricer(self._prices, plan, data)
        return [pricer.parts(each, num_samples) for each in self._source.facts(plan).segments]

    @remembered(
        lambda _, plan, num_samples, data: (segment_key(plan), plan.pp > 1, num_samples, _of_statistics(plan, data))
    )
    def _sums(self, plan: Plan, num_samples: float, data: GroupShape) -> _Seconds:
        halves = zip(*self._parts(plan, num_samples, data), strict=True)
        return _Seconds(*(list(itertools.accumulate(half, plus, initial=ZERO)) for half in halves))

    @remembered(lambda _, plan, num_samples: (segment_key(plan), plan.pp > 1, num_samples))
    def _temporary_bytes(self, plan: Plan, num_samples: float) -> list[float]:
        """By segment."""
        segments = self._source.facts(plan).segments
        return [each.most_temporary_bytes(num_samples, plan.recompute) for each in segments]

    @remembered(lambda _, plan: (segment_key(plan), plan.pp > 1))
    def _kept_bytes(self, plan: Plan) -> _Bytes:
        """Of one sample."""
        segments = self._source.facts(plan).segments
        copied = copied_shapes(self._source.specs(plan)) if plan.pp > 1 else set[tuple[int, ...]]()
        # The first segment is never on a stage with a copy.
        deferred = [factor_bytes(plan, each, copied if index else set()) for index, each in enumerate(segments)]
        return _Bytes(_sums([each.saved_bytes[plan.recompute] for each in segments]), _sums(deferred))


def _sums(values: Sequence[float]) -> list[float]:
    return list(itertools.accumulate(values, initial=0.0))


def _compute(sums: _Seconds, ranges: _Ranges) -> PlaceCompute:
    def terms(prefix: Sequence[StepTerms]) -> StepTerms:
        each = [minus(prefix[b], prefix[a]) for a, b in ranges]
        return each[0] if len(each) == 1 else add_terms(*each)

    begin, stop = ranges[0]
    input_half, weight_half = (
        sum(prefix[stop]) - sum(prefix[begin]) for prefix in (sums.backward_input, sums.backward_weight)
    )
    num_segments = sum(b - a for a, b in ranges)
    forward, backward_input, backward_weight = map(terms, sums)
    first_stage = input_half + weight_half, weight_half
    return PlaceCompute(forward, backward_input, backward_weight, first_stage, num_segments)


def _activations(
    kept: _Bytes, temporaries: Sequence[float], ranges: _Ranges, received: float, num_samples: float
) -> PlaceActivations:
    """`received`: bytes of a sample."""

    def total(prefix: Sequence[float]) -> float:
        return sum(prefix[b] - prefix[a] for a, b in ranges)

    running = [(index, b) for a, b in ranges for index in range(a, b)]
    temporary = [temporaries[index] - (kept.saved[b] - kept.saved[index + 1]) * num_samples for index, b in running]
    deferred_behind = [(kept.deferred[b] - kept.deferred[index + 1]) * num_samples for index, b in running]
    return PlaceActivations(
        saved_bytes=total(kept.saved) + received * sum(begin > 0 for begin, _ in ranges),
        deferred_bytes=total(kept.deferred),
        temporary_bytes=max(temporary),
        first_half_bytes=max(map(operator.add, temporary, deferred_behind)),
    )
