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

import bisect
import math
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

ROUNDING = 1e-9  # of sums in another order


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


class _Label(NamedTuple):
    """A division of the first blocks, without its last stage: `before`."""

    slowest: float
    total: float
    stop: int = 0
    kind: int = 0
    before: "_Label | None" = None

    def division(self) -> Division:
        labels = list(_behind(self))[::-1]
        stops, kinds = (tuple(getattr(each, name) for each in labels) for name in ("stop", "kind"))
        return Division(stops, kinds, self.slowest, self.total)


def _behind(label: _Label) -> Iterator[_Label]:
    """A label and those before it, the empty division left out."""
    current: _Label | None = label
    while current is not None and current.before is not None:
        yield current
        current = current.before


_State = tuple[int, tuple[int, ...]]
"""The number of blocks that are divided, and by kind the number of submeshes that are used."""


def best_division(
    chain: Chain,
    submeshes: Sequence[Submesh],
    *,
    microbatches: int,
    in_flight: Sequence[int],
    known_seconds: float = math.inf,
    order: Sequence[int] | None = None,
) -> Division | None:
    """The division with the shortest step; None: none fits, or none is shorter than `known_seconds`.

    submeshes      by kind; together at least as many as there are stages
    in_flight      by stage: the microbatches whose activations are alive at once; its length is the number of stages
    known_seconds  the step of a division that is known already
    order          by stage: the kind of its submesh, if that is not open
    """
    # All microbatches pass the slowest stage: a division with a slower one has a longer step than the known one.
    ranges = _StageRanges(chain, len(in_flight), known_seconds / microbatches, max(each.speed for each in submeshes))
    states: dict[_State, list[_Label]] = {(0, (0,) * len(submeshes)): [_Label(0.0, 0.0)]}
    for stage, num_saved in enumerate(in_flight):
        following: dict[_State, list[_Label]] = {}
        for (start, used), labels in states.items():
            for kind in range(len(submeshes)) if order is None else (order[stage],):
                submesh = submeshes[kind]
                if used[kind] == submesh.num_places:
                    continue
                now_used = (*used[:kind], used[kind] + 1, *used[kind + 1 :])
                for stop, seconds in ranges.stops(stage, start, submesh, num_saved):
                    kept = following.setdefault((stop, now_used), [])
                    for each in labels:
                        slowest, total = max(each.slowest, seconds), each.total + seconds
                        _keep(kept, _Label(slowest, total, stop, kind, each))
        states = following
    found = [each.division() for labels in states.values() for each in labels]
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
    """What consecutive blocks take as a stage, from sums over the chain.

    limit       of a stage's seconds
    best_speed  of any submesh
    """

    def __init__(self, chain: Chain, num_stages: int, limit: float = math.inf, best_speed: float = 1.0) -> None:
        self._chain, self._num_stages, self._num_blocks = chain, num_stages, len(chain.blocks)
        self._limit, self._best_speed = limit, best_speed
        self._sums = [
            list(accumulate((block[index] for block in chain.blocks), initial=0.0))
            for index in range(len(Segment._fields))
        ]

    def stops(self, stage: int, start: int, submesh: Submesh, num_saved: int) -> Iterator[tuple[int, float]]:
        """Where a stage that begins with a block may stop, and its seconds."""
        left = self._num_stages - 1 - stage  # stages that need a block each
        first = max(start + 1, self._first_stop(left)) if left else self._num_blocks
        for stop in range(first, self._num_blocks - left + 1):
            seconds = self.seconds(stage, start, stop) / submesh.speed
            held = self._total(1, stage, start, stop) + num_saved * self._total(2, stage, start, stop)
            if seconds > self._limit or held > submesh.memory_bytes:
                return
            yield stop, seconds

    def _first_stop(self, left: int) -> int:
        """The least stop behind which the blocks are not too many for so many stages within the limit."""
        seconds, most = self._sums[0], left * self._limit * self._best_speed
        if most == math.inf:
            return 0
        return bisect.bisect_left(seconds, seconds[-1] - most * (1 + ROUNDING))

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


def _keep(kept: list[_Label], new: _Label) -> None:
    """Add a division to those of a state, unless one of them is as good in both respects; drop those that are worse."""
    if any(each.slowest <= new.slowest and each.total <= new.total for each in kept):
        return
    kept[:] = [each for each in kept if each.slowest < new.slowest or each.total < new.total]
    kept.append(new)
