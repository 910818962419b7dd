"""Stage seconds: what a stage computes with one microbatch, segment by segment, and when its buckets are ready.

segment  the first end, a block or the last end; a stage has consecutive ones, and its backward runs them in reverse
parts    of an action: its seconds by the terms of a step, `StepTerms`
ready    a bucket's gradients, once the backward of the first segment that has a parameter in it has ended
Law: the parts of a segment add up to its price.
"""

import dataclasses
import itertools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fourfold.plan.plan import Plan
from fourfold.planner.predict.bucket_collectives import statistics_seconds
from fourfold.planner.predict.facts import ModelFacts, SegmentFacts
from fourfold.planner.predict.prediction import StepTerms
from fourfold.planner.predict.prices import GroupShape, Prices

ZERO = StepTerms(*[0.0] * len(StepTerms._fields))


def add_terms(*terms: StepTerms) -> StepTerms:
    return StepTerms(*map(sum, zip(*terms, strict=True)))


def plus(terms: StepTerms, other: StepTerms) -> StepTerms:
    return StepTerms(*map(operator.add, terms, other))


def minus(terms: StepTerms, other: StepTerms) -> StepTerms:
    return StepTerms(*map(operator.sub, terms, other))


def shorten_waits(terms: StepTerms, waiting: float) -> StepTerms:
    """With so much of the waits for other stages: `Prices.waiting`."""
    return terms._replace(bubble=waiting * terms.bubble)


def scale_terms(terms: StepTerms, factor: float) -> StepTerms:
    return StepTerms(*(each * factor for each in terms))


class SegmentParts(NamedTuple):
    """One microbatch on one segment."""

    forward: StepTerms
    backward_input: StepTerms
    backward_weight: StepTerms

    @property
    def backward(self) -> StepTerms:
        return add_terms(self.backward_input, self.backward_weight)


class SegmentPricer:
    """Prices segments, equal ones once. `data`: the ranks of dp, for batch statistics."""

    def __init__(self, prices: Prices, plan: Plan, data: GroupShape) -> None:
        self._prices, self._plan = prices, plan
        self._whole_backward = plan if plan.recompute == "none" else dataclasses.replace(plan, recompute="none")
        self._data = data if plan.batch_norm == "sync" else GroupShape(1)
        self._kinds: dict[tuple[object, ...], int] = {}
        self._last_computed: tuple[object, ...] = ()
        self._last_kind = 0
        self._parts: dict[tuple[int, float], SegmentParts] = {}

    def parts(self, facts: SegmentFacts, num_samples: float) -> SegmentParts:
        """A segment's forward and the halves of its backward."""
        computed = (facts.operations, facts.collectives, facts.norm_channels)
        # Blocks share their operations: to hash them takes longer than all else.
        if not (self._last_computed and all(map(operator.is_, computed, self._last_computed))):
            self._last_computed, self._last_kind = computed, self._kinds.setdefault(computed, len(self._kinds))
        key = self._last_kind, num_samples
        if key not in self._parts:
            self._parts[key] = self._make(facts, num_samples)
        return self._parts[key]

    def _make(self, facts: SegmentFacts, num_samples: float) -> SegmentParts:
        """The parts are differences of prices: with and without the collectives of an axis, and what is recomputed."""
        without_tensor = tuple(each for each in facts.collectives if each.axis != "tp")
        variants = [
            self._prices.segment(dataclasses.replace(facts, collectives=collectives), plan, num_samples)
            for collectives, plan in (
                (facts.collectives, self._plan),
                (without_tensor, self._plan),
                ((), self._plan),
                ((), self._whole_backward),
            )
        ]
        statistics = statistics_seconds(self._prices, facts.norm_channels, self._data)
        exposed = (statistics, statistics, 0.0)
        return SegmentParts(*map(_parts, *variants, exposed))


def _parts(whole: float, without_tensor: float, bare: float, without_recompute: float, exposed: float) -> StepTerms:
    """The parts of one pass; none is negative, even where measured prices contradict each other."""
    tensor = max(0.0, whole - without_tensor)
    context = max(0.0, whole - tensor - bare)
    recompute = max(0.0, whole - tensor - context - without_recompute)
    compute = whole - tensor - context - recompute
    return ZERO._replace(compute=compute, recompute=recompute, tensor=tensor, context=context, exposed=exposed)


def stage_segments(facts: ModelFacts, blocks: range, *, is_first: bool, is_last: bool) -> tuple[SegmentFacts, ...]:
    """The segments of a stage."""
    first, last = (facts.first,) * is_first, (facts.last,) * is_last
    return (*first, *facts.blocks[blocks.start : blocks.stop], *last)


@dataclass(frozen=True)
class StageSeconds:
    """What one stage computes with one microbatch.

    forwards_before, backwards_before, weights_before  by segment: seconds of those of all segments in front of it; the
                                                       last number is that of all
    segments_of  by parameter: the segments that have it, from the first to the last
    """

    forward: StepTerms
    backward_input: StepTerms
    backward_weight: StepTerms
    forwards_before: tuple[float, ...]
    backwards_before: tuple[float, ...]
    weights_before: tuple[float, ...]
    segments_of: Mapping[str, range]

    @property
    def backward(self) -> StepTerms:
        return add_terms(self.backward_input, self.backward_weight)

    def segments(self, names: Sequence[str]) -> range:
        """From the first to the last segment that has one of these parameters; all, if a name is unknown."""
        everywhere = range(len(self.forwards_before) - 1)
        found = [self.segments_of.get(name, everywhere) for name in names]
        return range(min(each.start for each in found), max(each.stop for each in found))

    def remaining(self, names: Sequence[str], *, is_weight_half: bool) -> float:
        """Seconds from when the gradients of these parameters are complete to the end of the backward."""
        sums = self.weights_before if is_weight_half else self.backwards_before
        return sums[self.segments(names).start]

    def forward_until(self, names: Sequence[str]) -> float:
        """Seconds from the begin of a forward to the first use of these parameters."""
        return self.forwards_before[self.segments(names).start]

    def backward_until(self, names: Sequence[str], *, is_input_half: bool) -> float:
        """Seconds from the begin of a backward to the first use of these parameters."""
        sums = self.backwards_before
        seconds = sums[-1] - sums[self.segments(names).stop]
        return seconds * (sum(self.backward_input) / sums[-1] if is_input_half and sums[-1] else 1.0)


def segments_by_parameter(segments: Sequence[SegmentFacts]) -> dict[str, range]:
    """From the first to the last segment that has a parameter: tied weights are in several."""
    found: dict[str, range] = {}
    for index, segment in enumerate(segments):
        for name in segment.params:
            found[name] = range(found.get(name, range(index, index)).start, index + 1)
    return found


def at_speed(terms: StepTerms, speed: float) -> StepTerms:
    """The same work on devices that compute faster or slower; messages take as long."""
    return terms._replace(compute=terms.compute / speed, recompute=terms.recompute / speed)


def stage_seconds(
    segments: Sequence[SegmentFacts], pricer: SegmentPricer, num_samples: float, *, speed: float = 1.0
) -> StageSeconds:
    """A microbatch of so many samples on a stage with these segments. `speed`: relative to the prices."""
    whole = [pricer.parts(each, num_samples) for each in segments]
    parts = [SegmentParts(*(at_speed(half, speed) for half in each)) for each in whole]
    forwards, inputs, weights = ([sum(each[half]) for each in parts] for half in range(3))
    backwards = [first + second for first, second in zip(inputs, weights, strict=True)]
    return StageSeconds(
        add_terms(ZERO, *(each.forward for each in parts)),
        add_terms(ZERO, *(each.backward_input for each in parts)),
        add_terms(ZERO, *(each.backward_weight for each in parts)),
        _sums(forwards),
        _sums(backwards),
        _sums(weights),
        segments_by_parameter(segments),
    )


def _sums(values: Sequence[float]) -> tuple[float, ...]:
    """The sums of the first 0, 1, … values."""
    return tuple(itertools.accumulate(values, initial=0.0))
