"""Stages: how a chain of blocks is best divided among the places of a pipeline, whose devices may differ.

chain      the blocks of a model, with what one microbatch takes on each and what each holds
submesh    the devices of a place: there are `num_places` equal ones of a kind
division   by stage: where its blocks stop, and the kind of submesh that computes it
step       the seconds of all stages once, and those of the slowest one for each further microbatch
Law: no division of the chain that fits has a shorter step.

Dynamic programming over (stages, blocks, submeshes used): O(blocks² · stages · kinds) transitions. A state keeps the
divisions of which none is both shorter in all and faster at its slowest stage than another: the step is monotone in
both, so the best one is among them.
Sources: PipeDream (Narayanan et al., SOSP 2019, §3.1) and DAPPLE (2007.01045, §4) minimize the slowest stage over
boundaries and numbers of devices; Alpa (2201.12023, §5.2) adds the sum and kinds of submeshes; HetPipe (2005.14038)
has places of unlike GPUs. All places of a plan have equally many devices: submeshes differ in speed and memory.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple


class Segment(NamedTuple):
    """A block, or an end of the chain.

    seconds      of one microbatch, forward and backward, on a device of speed 1
    held_bytes   weights, gradients and states
    saved_bytes  activations of one microbatch
    """

    seconds: float
    held_bytes: float = 0.0
    saved_bytes: float = 0.0


class Chain(NamedTuple):
    """What is divided. `edge_seconds`: of the messages of one microbatch between two stages, in both directions."""

    first: Segment
    blocks: tuple[Segment, ...]
    last: Segment
    edge_seconds: float = 0.0


class Submesh(NamedTuple):
    """Places of the pipeline with equal devices. `speed`: in relation to that of the chain's seconds."""

    num_places: int
    speed: float = 1.0
    memory_bytes: float = math.inf


class Division(NamedTuple):
    """By stage: where its blocks stop, and the index of its submesh."""

    stops: tuple[int, ...]
    submeshes: tuple[int, ...]
    slowest: float
    total: float

    def step_seconds(self, microbatches: int) -> float:
        return self.total + (microbatches - 1) * self.slowest

    @property
    def counts(self) -> str:
        """The division as a plan's `stages`: how many blocks each stage has."""
        return ",".join(str(stop - start) for start, stop in zip((0, *self.stops), self.stops, strict=False))


_State = tuple[int, tuple[int, ...]]
"""The number of blocks that are divided, and by kind the number of submeshes that are used."""


def best_division(
    chain: Chain,
    submeshes: Sequence[Submesh],
    *,
    microbatches: int,
    in_flight: Sequence[int],
    known_seconds: float = math.inf,
) -> Division | None:
    """The division with the shortest step; None: none fits, or none is shorter than `known_seconds`.

    submeshes      by kind; together at least as many as there are stages
    in_flight      by stage: the microbatches whose activations are alive at once; its length is the number of stages
    known_seconds  the step of a division that is known already
    """
    ranges = _StageRanges(chain, len(in_flight))
    # All microbatches pass the slowest stage: a division with a slower one has a longer step than the known one.
    limit = known_seconds / microbatches
    states: dict[_State, list[Division]] = {(0, (0,) * len(submeshes)): [Division((), (), 0.0, 0.0)]}
    for stage, num_saved in enumerate(in_flight):
        following: dict[_State, list[Division]] = {}
        for (start, used), divisions in states.items():
            for kind, submesh in enumerate(submeshes):
                if used[kind] == submesh.num_places:
                    continue
                now_used = (*used[:kind], used[kind] + 1, *used[kind + 1 :])
                for stop, seconds in ranges.stops(stage, start, submesh, num_saved, limit):
                    kept = following.setdefault((stop, now_used), [])
                    for each in divisions:
                        _keep(kept, _extended(each, stop, kind, seconds))
        states = following
    found = [each for divisions in states.values() for each in divisions]
    best = min(found, key=lambda each: each.step_seconds(microbatches), default=None)
    return best if best is not None and best.step_seconds(microbatches) < known_seconds else None


def division_of(chain: Chain, stops: Sequence[int], speeds: Sequence[float]) -> Division:
    """A division that is known, with what it takes. `speeds`: by stage."""
    ranges, starts = _StageRanges(chain, len(stops)), (0, *stops[:-1])
    seconds = [
        ranges.seconds(stage, start, stop) / speed
        for stage, (start, stop, speed) in enumerate(zip(starts, stops, speeds, strict=True))
    ]
    return Division(tuple(stops), (0,) * len(stops), max(seconds), sum(seconds))


class _StageRanges:
    """What consecutive blocks take as a stage, from sums over the chain."""

    def __init__(self, chain: Chain, num_stages: int) -> None:
        self._chain, self._num_stages, self._num_blocks = chain, num_stages, len(chain.blocks)
        self._sums = [
            list(accumulate((block[index] for block in chain.blocks), initial=0.0))
            for index in range(len(Segment._fields))
        ]

    def stops(
        self, stage: int, start: int, submesh: Submesh, num_saved: int, limit: float
    ) -> Iterator[tuple[int, float]]:
        """Where a stage that begins with a block may stop, and its seconds."""
        is_last = stage == self._num_stages - 1
        left = self._num_stages - 1 - stage  # stages that need a block each
        for stop in [self._num_blocks] if is_last else range(start + 1, self._num_blocks - left + 1):
            seconds = self.seconds(stage, start, stop) / submesh.speed
            held = self._total(1, stage, start, stop) + num_saved * self._total(2, stage, start, stop)
            if seconds > limit or held > submesh.memory_bytes:
                return
            yield stop, seconds

    def seconds(self, stage: int, start: int, stop: int) -> float:
        """Of one microbatch on a stage, at speed 1."""
        num_edges = (stage > 0) + (stage < self._num_stages - 1)
        return self._total(0, stage, start, stop) + num_edges * self._chain.edge_seconds

    def _total(self, index: int, stage: int, start: int, stop: int) -> float:
        """One of the numbers of a segment, of all segments of a stage."""
        ends = (self._chain.first[index] if stage == 0 else 0.0) + (
            self._chain.last[index] if stage == self._num_stages - 1 else 0.0
        )
        return self._sums[index][stop] - self._sums[index][start] + ends


def _extended(division: Division, stop: int, kind: int, seconds: float) -> Division:
    return Division(
        (*division.stops, stop),
        (*division.submeshes, kind),
        max(division.slowest, seconds),
        division.total + seconds,
    )


def _keep(kept: list[Division], new: Division) -> None:
    """Add a division to those of a state, unless one of them is as good in both respects; drop those that are worse."""
    if any(each.slowest <= new.slowest and each.total <= new.total for each in kept):
        return
    kept[:] = [each for each in kept if each.slowest < new.slowest or each.total < new.total]
    kept.append(new)
