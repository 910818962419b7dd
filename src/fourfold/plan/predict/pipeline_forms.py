"""Pipeline forms: how long the forwards and backwards of a step take, in closed form, for any stages and messages.

cycle  from one microbatch to the next once the pipeline is full: the slowest place, or a round trip over the
       microbatches that are in flight meanwhile
start  of a place: when its first forward begins; end: when its last backward has ended. The first place begins at 0
Law: with equal stages and no messages these are the schedules' own forms (`plan/pipeline/bubble.py`).
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from fourfold.plan.pipeline.schedules import ASYNCHRONOUS
from fourfold.plan.pipeline.spec import PipelineSpec


@dataclass(frozen=True)
class PlaceTimes:
    """Seconds by place: of a microbatch on all its stages, and of messages to the next place, in each direction.

    edges  one for each boundary between places; with interleaving, from the last one back to the first too
    """

    forwards: Sequence[float]
    inputs: Sequence[float]
    weights: Sequence[float]
    edges: Sequence[float]

    @cached_property
    def totals(self) -> list[float]:
        return [sum(each) for each in zip(self.forwards, self.inputs, self.weights, strict=True)]

    @cached_property
    def backwards(self) -> list[float]:
        return [first + second for first, second in zip(self.inputs, self.weights, strict=True)]


class PipelineSeconds(NamedTuple):
    """By place. `pace`: from one backward of a place to its next one, once the pipeline is full."""

    starts: Sequence[float]
    ends: Sequence[float]
    pace: float


def _cycle(times: PlaceTimes, spec: PipelineSpec) -> float:
    """Of 1F1B: place i has p − i microbatches in flight, each of which goes to the last place and back."""
    totals, cycle = times.totals, max(times.totals)
    round_trip = 0.0
    for place in reversed(range(spec.pp)):
        round_trip += totals[place] + (2 * times.edges[place] if place < spec.pp - 1 else 0.0)
        if spec.pp - place < spec.microbatches:
            cycle = max(cycle, round_trip / (spec.pp - place))
    return max(cycle, 2 * max(times.edges[: spec.pp - 1]))  # a lane sends in both directions


def _until(times: Sequence[float], edges: Sequence[float], spec: PipelineSpec) -> list[float]:
    """By place: seconds of the hops from the first place to it, each through one stage and one message."""
    hops = [seconds / spec.interleave + edge for seconds, edge in zip(times, edges, strict=False)]
    return list(itertools.accumulate(hops[: spec.pp - 1], initial=0.0))


def _from_first_to_first(times: PlaceTimes, spec: PipelineSpec, seconds: float, pace: float) -> PipelineSeconds:
    """Places begin when the first forward reaches them; they end one after the other, the first place last."""
    ends = [seconds - each for each in _until(times.backwards, times.edges, spec)]
    return PipelineSeconds(_until(times.forwards, times.edges, spec), ends, pace)


def _gpipe(times: PlaceTimes, spec: PipelineSpec) -> PipelineSeconds:
    edges = times.edges[: spec.pp - 1]
    ramp = sum(times.totals) + 2 * sum(edges)
    forward, backward = max(*times.forwards, *edges), max(*times.backwards, *edges)
    return _from_first_to_first(times, spec, ramp + (spec.microbatches - 1) * (forward + backward), backward)


def _one_f_one_b(times: PlaceTimes, spec: PipelineSpec) -> PipelineSeconds:
    seconds = max(_while_busy(times, spec, place) for place in range(spec.pp))
    cycle = _cycle(times, spec)
    messages = 2 * sum(times.edges[: spec.pp - 1]) + (spec.microbatches - 1) * (cycle - max(times.totals))
    return _from_first_to_first(times, spec, seconds + messages, cycle)


def _while_busy(times: PlaceTimes, spec: PipelineSpec, place: int) -> float:
    """How long 1F1B takes if this place is the slowest: it waits for the first gradient and for the last one, while it
    computes the forwards of its warm-up, and the backwards that are left.
    """
    totals, m, warm_up = times.totals, spec.microbatches, spec.pp - 1 - place
    before, behind = sum(totals[:place]), sum(totals[place + 1 :])
    if warm_up >= m:  # one wait, for the only gradients that come
        return before + m * totals[place] + behind
    waits = [max(0.0, behind - warm_up * each[place]) for each in (times.forwards, times.backwards)]
    return before + m * totals[place] + sum(waits)


def _interleaved(times: PlaceTimes, spec: PipelineSpec) -> PipelineSeconds:
    """Ramps go through one stage of each place; a warm-up of twice as many hides the messages in between."""
    slowest = max(times.totals)
    chains = 2 * (sum(times.edges[: spec.pp - 1]) + (spec.interleave - 1) * sum(times.edges[: spec.pp]))
    ramp = (sum(times.totals) - slowest) / spec.interleave + chains
    return _from_first_to_first(times, spec, ramp + spec.microbatches * slowest, slowest)


def _zero_bubble(times: PlaceTimes, spec: PipelineSpec) -> PipelineSeconds:
    """The slowest place waits for the others, and fills as many of the waits with halves of weights as it may defer."""
    p, slowest = spec.pp, max(range(spec.pp), key=times.totals.__getitem__)
    num_deferred = min(spec.max_in_flight or p, spec.microbatches, 2 * p - 1) - 1
    others = sum(times.forwards) + sum(times.inputs) - times.forwards[slowest] - times.inputs[slowest]
    bubble = max(0.0, others - num_deferred * times.weights[slowest]) + 2 * sum(times.edges[: p - 1])
    starts = _until(times.forwards, times.edges, spec)
    span = bubble + spec.microbatches * times.totals[slowest]
    # With the limit of H1 all places end together, with that of H2 they end as they have begun.
    staggered = max(0.0, num_deferred - (p - 1)) / (p - 1)
    return PipelineSeconds(starts, [span + staggered * start for start in starts], times.totals[slowest])


def _undrained(times: PlaceTimes, spec: PipelineSpec) -> PipelineSeconds:
    endless = spec._replace(microbatches=spec.pp + spec.microbatches)
    cycle = _cycle(times, endless)
    return PipelineSeconds([0.0] * spec.pp, [spec.microbatches * cycle] * spec.pp, cycle)


FORMS: dict[str, Callable[[PlaceTimes, PipelineSpec], PipelineSeconds]] = {
    "gpipe": _gpipe,
    "1f1b": _one_f_one_b,
    "interleaved": _interleaved,
    "zero-bubble": _zero_bubble,
    "pipedream": _undrained,
    "2bw": _undrained,
    "written": _one_f_one_b,  # whatever its order is
}


class Flight(NamedTuple):
    """How many microbatches a place keeps at most, in those of one microbatch on all its stages.

    deferred  of these, between the halves of their backward
    """

    saved: float
    deferred: float = 0.0


def flights_of(schedule: str, spec: PipelineSpec) -> list[Flight]:
    """By place."""
    p, m, v = spec.pp, spec.microbatches, spec.interleave
    if schedule == "gpipe":
        return [Flight(m)] * p
    if schedule == "zero-bubble":
        # As in 1F1B, or twice as many, are on their way to the last place and back; the others wait for their W.
        limit = min(m, spec.max_in_flight or p)
        on_the_way = [2 * (p - 1 - place) + 1 if limit > p else p - place for place in range(p)]
        return [Flight(min(limit, each), max(0, limit - each)) for each in on_the_way]
    if schedule == "interleaved":
        return [Flight(min(m * v, 2 * (p - 1 - place) + (v - 1) * p + 1) / v) for place in range(p)]
    filled = p if schedule in ASYNCHRONOUS else m
    return [Flight(min(filled, p - place)) for place in range(p)]
