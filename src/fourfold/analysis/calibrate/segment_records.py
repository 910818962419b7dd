"""Segment records: the segments of a task, measured in every way in which plans of these ranks cut samples.

Law: segments with one signature are one segment: its times are the means of all of them.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from fourfold.analysis.calibrate.cuts import MeasuredCut, cuts_of
from fourfold.analysis.calibrate.measurements import of_slowest_rank
from fourfold.analysis.calibrate.probe import Shortened, make_probe, shorten
from fourfold.analysis.calibrate.segments import SegmentTimer, SegmentTurns
from fourfold.analysis.calibrate.timing import Turns
from fourfold.feed.data_input import open_data
from fourfold.feed.feed import Feed
from fourfold.plan.predict.calibration import Curve, Cut, SegmentRecord, signature
from fourfold.plan.predict.facts import FactsSource, ModelFacts, SegmentFacts
from fourfold.step.meta_model import build_meta_model
from fourfold.step.tensor_tree import tree_map
from fourfold.words.errors import PlanError, TaskError
from fourfold.words.task import Task

Say = Callable[[str], None]


class MeasuredSegment(NamedTuple):
    """A segment, and its record: of whole backwards, or of divided ones."""

    facts: SegmentFacts
    record: SegmentRecord


class SegmentMeasurements(NamedTuple):
    """The segments, and the cuts that the model does not allow, with the reason."""

    segments: list[MeasuredSegment]
    left_out: list[str]


def measure_segments(task: Task, source: FactsSource, turns: Turns, say: Say) -> SegmentMeasurements:
    """Collective; the same on every rank. Cuts for which no time is left are left out."""
    short = shorten(task, build_meta_model(task))
    batch = _first_batch(task, source.batch_size)
    segments: list[MeasuredSegment] = []
    left_out: list[str] = []
    for cut in cuts_of(turns.ranks.size, source.batch_size):
        name = _cut_name(cut)
        if segments and turns.is_over():
            left_out.append(f"{name}: no time was left; its segments are priced by their operations")
            continue
        say(f"blocks and ends: {name}")
        try:
            facts = source.facts(cut.plan)
            segments += _measure_cut(short, cut, facts, batch, turns)
        except (PlanError, TaskError) as error:
            left_out.append(f"{name}: {error.problems[0].got if error.problems else error}")
    return SegmentMeasurements(segments, left_out)


def _cut_name(cut: MeasuredCut) -> str:
    sizes = [f"{axis} {size}" for axis, size in (("tp", cut.plan.tp), ("sp", cut.plan.sp)) if size > 1]
    return " × ".join(sizes + (["ulysses"] if cut.plan.ulysses > 1 else [])) or "whole samples"


def _first_batch(task: Task, batch_size: int) -> Any:
    """The first samples of the training data, as one rank would read them."""
    feed = Feed.single_rank(open_data(task.data(), where="the task's data").train, batch_size=batch_size, seed=0)
    batch = next(iter(feed.repeat()))
    return dict(batch) if isinstance(batch, dict) else tuple(batch)


def _measure_cut(
    short: Shortened, cut: MeasuredCut, facts: ModelFacts, batch: Any, turns: Turns
) -> Iterator[MeasuredSegment]:
    """The segments of one cut, with whole backwards and with divided ones."""
    ranks = turns.ranks
    timer = SegmentTimer(make_probe(short.task, cut.plan, ranks), turns)
    whole: dict[int, SegmentTurns] = {}
    halves: dict[int, SegmentTurns] = {}
    for samples in cut.samples:
        part = tree_map(batch, lambda tensor, samples=samples: tensor[:samples])
        whole[samples] = SegmentTurns(*of_slowest_rank(list(timer.whole(part)), ranks))
        if cut.may_have_stages:
            halves[samples] = SegmentTurns(*of_slowest_rank(list(timer.halves(part)), ranks))
    measured = [facts.first, *(facts.blocks[index] for index in short.kept), facts.last]
    by_signature: dict[str, list[int]] = {}
    for index, each in enumerate(measured):
        by_signature.setdefault(signature(each), []).append(index)
    for name, indices in by_signature.items():
        for times in filter(None, (whole, halves)):
            forward, backward, second = (_curve(times, field, indices) for field in range(3))
            assert forward is not None
            assert backward is not None
            segment = measured[indices[0]]
            record = SegmentRecord(name, Cut.of(cut.plan), forward, backward, second, segment.collectives)
            yield MeasuredSegment(segment, record)


def _curve(times: dict[int, SegmentTurns], field: int, indices: list[int]) -> Curve | None:
    """By samples: the mean of the segments with these indices; None: no segment has such times."""
    points = []
    for samples, turns in times.items():
        values = turns[field]
        if not values:
            return None
        points.append((float(samples), sum(values[index] for index in indices) / len(indices)))
    return Curve.through(points)
