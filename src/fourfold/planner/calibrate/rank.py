"""Rank: everything that the ranks of a host measure together, as a calibration.

median  of the turns of each rank; of these the mean, but of segments those of the slowest rank
Law: all ranks measure the same things in the same order, and make the same calibration of them.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from fourfold.comm.communicator import Communicator
from fourfold.planner.calibrate.costs import (
    BucketTimes,
    Overheads,
    change_of,
    measure_buckets,
    measure_codecs,
    measure_edges,
    measure_exchanges,
    measure_lone_update,
    measure_operations,
    measure_overheads,
    price_reduction,
)
from fourfold.planner.calibrate.segments import Say, measure_segments
from fourfold.planner.calibrate.timing import Points, Turns, mean_over_ranks
from fourfold.planner.predict.calibrated_prices import operation_factors
from fourfold.planner.predict.calibration import (
    Calibration,
    CollectiveRecord,
    Curve,
    ExchangeRecord,
    MachineIdentity,
    OperationRates,
)
from fourfold.planner.predict.facts import FactsSource
from fourfold.planner.search.space import divisors
from fourfold.torch_kit import memory
from fourfold.words.layout import Change
from fourfold.words.task import Task

# From the first on, messages and operations take no more turns than they must. From the second on segments too, and
# cuts that have not begun are left out.
STEADY_SECONDS, SECONDS = 15.0, 45.0


class Conditions(NamedTuple):
    """What calibration is made under: see `Calibration`."""

    machine: MachineIdentity
    load: float
    is_forced: bool


class Measured(NamedTuple):
    """A calibration, and what the model does not allow, one text each."""

    calibration: Calibration
    left_out: list[str]


def measure(task: Task, source: FactsSource, ranks: Communicator, conditions: Conditions, *, say: Say) -> Measured:
    """Collective; the same on every rank."""
    torch.manual_seed(0)
    memory.keep_freed_memory()  # as from the second step on
    begin = time.monotonic()
    turns = Turns(ranks, begin + STEADY_SECONDS)
    say("reductions, gathers and updates")
    buckets = list(measure_buckets(task, turns))
    update = _update(buckets, ranks) if buckets else _curve(measure_lone_update(task, turns), ranks)
    say("messages")
    exchanges = [
        ExchangeRecord(each.size, _curve(each.all_reduce, ranks), _curve(each.hop, ranks))
        for each in measure_exchanges(turns, divisors(ranks.size)[1:])
    ]
    edge = _curve(measure_edges(turns), ranks) if ranks.size > 1 else None
    say("codecs, operations and overheads")
    codecs = {kind: _curve(points, ranks) for kind, points in measure_codecs(turns).items()}
    operations = OperationRates(**{name: _curve(points, ranks) for name, points in measure_operations(turns).items()})
    overheads = Overheads(*mean_over_ranks(list(measure_overheads(turns)), ranks))
    segments, left_out = measure_segments(task, source, Turns(ranks, begin + SECONDS), say)
    crosses_hosts = ranks.num_hosts > 1
    factors = operation_factors(segments, operations)
    calibration = Calibration(
        machine=conditions.machine,
        load=conditions.load,
        is_forced=conditions.is_forced,
        segments=tuple(each.record for each in segments),
        collectives=tuple(_collectives(buckets, update, ranks)),
        updates={source.update_spec.optimizer: update},
        codecs=codecs,
        exchanges=tuple(exchanges),
        edge=None if crosses_hosts else edge,
        edge_between_hosts=edge if crosses_hosts else None,
        operations=operations,
        forward_factor=factors.forward,
        backward_factor=factors.backward,
        slowdown=overheads.slowdown,
        between_actions=overheads.between_actions,
        around_step=overheads.around_step,
    )
    return Measured(calibration, left_out)


def _curve(points: Points, ranks: Communicator) -> Curve:
    """The mean over the ranks. Collective."""
    return Curve.through((size, seconds) for size, seconds in mean_over_ranks([list(each) for each in points], ranks))


def _update(buckets: Sequence[BucketTimes], ranks: Communicator) -> Curve:
    """By bytes of what it works on: where sums are made before it. Collective."""
    return _curve([point for each in buckets if not each.is_split for point in each.update], ranks)


def _collectives(buckets: Iterable[BucketTimes], update: Curve, ranks: Communicator) -> Iterator[CollectiveRecord]:
    """Reductions, and gathers where states rest split. Collective."""
    for each in buckets:
        group = each.group
        yield CollectiveRecord(change_of(each), *group, _curve(price_reduction(each, update), ranks))
        if each.is_split:
            yield CollectiveRecord(Change.ALL_GATHER, *group, _curve(each.gather, ranks))
