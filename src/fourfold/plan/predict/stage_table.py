"""Stage table: what places compute and keep, for estimates: sums over segments, each of which is priced once.

variant  a plan's fields on which facts and the prices of segments depend
Law: a place costs and keeps what its segments do.
"""

import itertools
from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

from fourfold.plan.plan import Plan
from fourfold.plan.predict.facts import FactsSource, SegmentFacts
from fourfold.plan.predict.memory import output_bytes
from fourfold.plan.predict.prediction import StepTerms
from fourfold.plan.predict.prices import GroupShape, Prices
from fourfold.plan.predict.stage_seconds import ZERO, SegmentParts, SegmentPricer, add_terms, at_speed

SEGMENT_FIELDS = ("tp", "dims", "sp", "ring", "ulysses", "residual", "precision", "recompute", "batch_norm")
PLACE_FIELDS = (*SEGMENT_FIELDS, "pp", "interleave", "stages")
SYNC = "sync"
place_key, segment_key = attrgetter(*PLACE_FIELDS), attrgetter(*SEGMENT_FIELDS)


class PlaceCompute(NamedTuple):
    """What a place computes with one microbatch, and keeps of one sample.

    first_stage  seconds of a backward, and of its weight half, of the stage whose buckets are ready last
    deferred     kept between the halves of a backward
    """

    forward: StepTerms
    backward_input: StepTerms
    backward_weight: StepTerms
    first_stage: tuple[float, float]
    saved_bytes: float
    deferred_bytes: float
    temporary_bytes: float
    forward_seconds: float
    input_seconds: float
    weight_seconds: float

    def at_speed(self, speed: float) -> "PlaceCompute":
        """The same on devices that compute faster or slower."""
        forward, inputs, weights = (
            at_speed(each, speed) for each in (self.forward, self.backward_input, self.backward_weight)
        )
        slower = sum(inputs) + sum(weights), sum(weights)
        before = self.backward_seconds, self.weight_seconds
        first_stage = tuple(
            part * (now / then if then else 1.0)
            for part, now, then in zip(self.first_stage, slower, before, strict=True)
        )
        return self._replace(
            forward=forward,
            backward_input=inputs,
            backward_weight=weights,
            first_stage=(first_stage[0], first_stage[1]),
            forward_seconds=sum(forward),
            input_seconds=sum(inputs),
            weight_seconds=sum(weights),
        )

    @property
    def backward_seconds(self) -> float:
        return self.input_seconds + self.weight_seconds


class _Segments(NamedTuple):
    """The segments of a model, and sums over the first 0, 1, … of them."""

    forward: list[StepTerms]
    backward_input: list[StepTerms]
    backward_weight: list[StepTerms]
    saved: list[float]
    deferred: list[float]
    temporary: list[float]  # by segment


class StageTable:
    """The places of the plans of one search."""

    def __init__(self, source: FactsSource, prices: Prices) -> None:
        self._source, self._prices = source, prices
        self._segments: dict[tuple[object, ...], _Segments] = {}
        self._blocks: dict[tuple[object, ...], tuple[range, ...]] = {}
        self._places: dict[tuple[object, ...], tuple[PlaceCompute, ...]] = {}

    def of(self, plan: Plan, num_samples: float, data: GroupShape) -> tuple[PlaceCompute, ...]:
        """By place. `data`: the ranks of dp, for batch statistics."""
        key = (place_key(plan), num_samples, data if plan.batch_norm == SYNC else None)
        if key not in self._places:
            self._places[key] = self._make(plan, num_samples, data)
        return self._places[key]

    def _make(self, plan: Plan, num_samples: float, data: GroupShape) -> tuple[PlaceCompute, ...]:
        sums, blocks = self._sums(plan, num_samples, data), self._blocks_of(plan)
        # Segment 0 is the first end, block i is segment i + 1.
        starts = [0 if stage == 0 else own.start + 1 for stage, own in enumerate(blocks)]
        stops = [*starts[1:], len(sums.temporary)]
        ranges = list(zip(starts, stops, strict=True))
        return tuple(_place(sums, ranges[place :: plan.pp]) for place in range(plan.pp))

    def _blocks_of(self, plan: Plan) -> tuple[range, ...]:
        key = plan.pp, plan.interleave, plan.stages
        if key not in self._blocks:
            self._blocks[key] = self._source.stage_blocks(plan)
        return self._blocks[key]

    def _sums(self, plan: Plan, num_samples: float, data: GroupShape) -> _Segments:
        key = (segment_key(plan), num_samples, data if plan.batch_norm == SYNC else None)
        if key not in self._segments:
            segments = self._source.facts(plan).segments
            pricer = SegmentPricer(self._prices, plan, data)
            parts = [pricer.parts(each, num_samples) for each in segments]
            self._segments[key] = _sum_up(plan, segments, parts, num_samples)
        return self._segments[key]


def _sum_up(
    plan: Plan, segments: Sequence[SegmentFacts], parts: Sequence[SegmentParts], num_samples: float
) -> _Segments:
    halves = [list(itertools.accumulate((each[half] for each in parts), add_terms, initial=ZERO)) for half in range(3)]
    return _Segments(
        *halves,
        saved=_sums([each.saved_bytes[plan.recompute] for each in segments]),
        deferred=_sums([output_bytes(plan, [each]) for each in segments]),
        temporary=[each.most_temporary_bytes(num_samples, plan.recompute) for each in segments],
    )


def _sums(values: Sequence[float]) -> list[float]:
    return list(itertools.accumulate(values, initial=0.0))


def _place(sums: _Segments, ranges: Sequence[tuple[int, int]]) -> PlaceCompute:
    """A place with these ranges of segments, one for each of its stages."""

    def terms(prefix: Sequence[StepTerms]) -> StepTerms:
        return StepTerms(*(sum(prefix[b][i] - prefix[a][i] for a, b in ranges) for i in range(len(ZERO))))

    def total(prefix: Sequence[float]) -> float:
        return sum(prefix[b] - prefix[a] for a, b in ranges)

    begin, stop = ranges[0]
    input_half, weight_half = (
        sum(prefix[stop]) - sum(prefix[begin]) for prefix in (sums.backward_input, sums.backward_weight)
    )
    forward, backward_input, backward_weight = map(terms, (sums.forward, sums.backward_input, sums.backward_weight))
    return PlaceCompute(
        forward,
        backward_input,
        backward_weight,
        first_stage=(input_half + weight_half, weight_half),
        saved_bytes=total(sums.saved),
        deferred_bytes=total(sums.deferred),
        temporary_bytes=max(sums.temporary[index] for a, b in ranges for index in range(a, b)),
        forward_seconds=sum(forward),
        input_seconds=sum(backward_input),
        weight_seconds=sum(backward_weight),
    )
