"""Buckets: seconds of reductions, gathers and updates of buckets of several sizes, by the transports of plans.

reduce   from the launch of a bucket on all ranks until its sum can be used
update   of what a rank owns of a bucket. Where ranks share memory and states rest split, it makes the sum as well:
         what it takes more than an update of as many bytes is the price of the sum
gather   from the end of the update until all ranks have the new weights
Law: gradients are written before a reduction as a backward writes them, by their owner.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from statistics import median
from typing import NamedTuple

import torch
from torch import nn

from fourfold.analysis.calibrate.probe import Probe, make_probe
from fourfold.analysis.calibrate.timing import Points, Turns, now
from fourfold.plan.plan import Plan
from fourfold.plan.predict.calibration import Curve
from fourfold.plan.predict.prices import GroupShape
from fourfold.words.layout import Change
from fourfold.words.task import Task

# Elements. The largest are in no cache; tensors that are powers of two apart would take each other's places there.
SIZES = (4_096, 64_000, 256_000, 1_024_000, 4_096_000, 12_288_000)
NETWORK_SIZES = (4_096, 16_000, 64_000, 128_000, 256_000)  # the largest takes 160 ms at 100 Mbit/s
COLUMNS = 64


class BucketTimes(NamedTuple):
    """What the ranks of a group take: by bytes of a whole bucket, but `update` by bytes of what it works on."""

    group: GroupShape
    is_split: bool
    reduce: Points
    update: Points
    gather: Points


class _Weights(nn.Module):
    """Matrices of several sizes, the largest first: each becomes a bucket."""

    def __init__(self, sizes: Iterable[int]) -> None:
        super().__init__()
        self.matrices = nn.ParameterList(torch.zeros(size // COLUMNS, COLUMNS) for size in sizes)


class _Chain(nn.Module):
    """One such block for each place of a pipeline axis."""

    def __init__(self, num_blocks: int, sizes: Sequence[int]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Weights(sizes) for _ in range(num_blocks))


def measure_buckets(task: Task, turns: Turns) -> Iterator[BucketTimes]:
    """Reductions and gathers of every group size that divides the ranks, and the task's update. Collective."""
    ranks = turns.ranks
    crosses_hosts = ranks.num_hosts > 1
    has_gloo = not crosses_hosts and ranks.device.type == "cpu"
    transports = ("by-host", "gloo") if has_gloo else ("by-host",)
    for size in (each for each in range(2, ranks.size + 1) if ranks.size % each == 0):
        for transport in transports:
            # Over messages, what is sent decides: the largest bucket would take long and show nothing new.
            sizes = NETWORK_SIZES if crosses_hosts else SIZES[:-1] if transport == "gloo" else SIZES
            for zero in (0, 1):
                places = ranks.size // size
                plan = Plan(dp=size, pp=places, zero=zero, bucket_bytes=1, transport=transport, microbatches=places)
                yield _measure(make_probe(_bucket_task(task, places, sizes), plan, ranks), turns)


def measure_lone_update(task: Task, turns: Turns) -> Points:
    """The update of a rank that has no others, whose gradients stay where autograd leaves them. Collective."""
    probe = make_probe(_bucket_task(task, 1, SIZES), Plan(), turns.ranks)
    for parameter in probe.parameters:
        parameter.grad = torch.full_like(parameter, 1e-3)
    seconds = [
        turns.median_seconds(lambda bucket=bucket: probe.stage.optimizer.update(bucket))
        for bucket in range(probe.stage.num_buckets)
    ]
    sizes = [sum(parameter.nbytes for parameter in bucket) for bucket in probe.stage.parameters]
    return list(zip(_moved_bytes(probe, sizes), seconds, strict=True))


def _bucket_task(task: Task, num_blocks: int, sizes: Sequence[int]) -> Task:
    return dataclasses.replace(task, model=lambda: _Chain(num_blocks, sizes), tensor={}, loss=_no_loss, clip=None)


def _no_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    raise AssertionError("the programs of a probe are never run")


@torch.no_grad()
def _measure(probe: Probe, turns: Turns) -> BucketTimes:
    stage, is_split = probe.stage, probe.blueprint.is_sharded
    taken: list[list[tuple[float, float, float]]] = []

    def turn() -> float:
        taken.append([_time_bucket(probe, turns, bucket) for bucket in range(stage.num_buckets)])
        stage.gatherer.signal_backward_done()
        stage.reducer.end_step()
        stage.gatherer.end_step()
        return sum(map(sum, taken[-1]))

    timed = taken[-turns.take(turn) :]
    by_bucket = [[median(values) for values in zip(*rows, strict=True)] for rows in zip(*timed, strict=True)]
    sizes = [flat.nbytes for flat in stage.reducer.grad_buffers]
    moved = _moved_bytes(probe, sizes)
    columns = list(zip(*by_bucket, strict=True))
    return BucketTimes(
        probe.group,
        is_split,
        list(zip(sizes, columns[0], strict=True)),
        list(zip(moved, columns[1], strict=True)),
        list(zip(sizes, columns[2], strict=True)) if is_split else [],
    )


def _time_bucket(probe: Probe, turns: Turns, bucket: int) -> tuple[float, float, float]:
    """Seconds of a reduction, an update, and a gather; ranks begin each of the three together."""
    stage = probe.stage
    stage.reducer.acquire_buffer(bucket, 1.0)
    stage.reducer.grad_buffers[bucket].fill_(1e-3)
    turns.begin()
    start = now()
    stage.reducer.reduce_async(bucket, None, 1.0)
    stage.reducer.wait_reduce(bucket, 1.0)
    reduced = now()
    turns.begin()
    update_start = now()
    stage.optimizer.update(bucket)
    updated = now()
    gather_start = gathered = updated
    if probe.blueprint.is_sharded:
        turns.begin()
        gather_start = now()
        stage.gatherer.all_gather_async(bucket, stage.weights.flats[bucket])
        stage.gatherer.wait(bucket)
        gathered = now()
    return reduced - start, updated - update_start, gathered - gather_start


def _moved_bytes(probe: Probe, sizes: Sequence[int]) -> list[float]:
    """By bucket: bytes of the weights, gradients and optimizer states that this rank's updates work on."""
    stage = probe.stage
    owned = [size / (stage.reducer.size if probe.blueprint.is_sharded else 1) for size in sizes]
    # An optimizer counts steps in scalars.
    states = sum(each.nbytes for each in stage.optimizer.owned_tensors() if each.dim())
    return [(2.0 + states / sum(owned)) * each for each in owned]


def price_reduction(times: BucketTimes, update: Curve) -> Points:
    """By bytes of a whole bucket: what its sum takes, in the reduction and in the update."""
    if not times.is_split:
        return times.reduce
    return [
        (size, max(0.0, seconds + spent - update.at(moved)))
        for (size, seconds), (moved, spent) in zip(times.reduce, times.update, strict=True)
    ]


def change_of(times: BucketTimes) -> Change:
    """What the reduction of a bucket is."""
    return Change.REDUCE_SCATTER if times.is_split else Change.ALL_REDUCE
