"""Prediction: what a plan will take, with the terms that add up to it.

term    a part of the step: computing, waiting for stages, gradients not hidden behind backward, …
Law: the terms of a step add up to its seconds, and the parts of the memory to its bytes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from fourfold.plan.plan import Plan
from fourfold.plan.simulate import Timeline


class StepTerms(NamedTuple):
    """Where the seconds of the slowest rank go.

    compute    forward and backward, collectives inside them excluded
    recompute  forwards that backward computes again
    tensor, sequence  collectives inside forward and backward
    bubble     waits for other stages, their messages included
    exposed    collectives of the data axis that no computing hides
    update     of the optimizer
    overhead   between actions and around the step
    """

    compute: float
    recompute: float
    tensor: float
    sequence: float
    bubble: float
    exposed: float
    update: float
    overhead: float

    @property
    def total(self) -> float:
        return sum(self)


class MemoryParts(NamedTuple):
    """Bytes that one rank holds at its peak.

    weights, gradients, states  what rests on the rank; shared memory of a host is divided among its ranks
    activations  of the microbatches in flight
    buffers      gathered weights, received messages, staging
    temporaries  of the segment that holds most
    reserve      context and fragmentation: constants of the machine
    """

    weights: float
    gradients: float
    states: float
    activations: float
    buffers: float
    temporaries: float
    reserve: float

    @property
    def total(self) -> float:
        return sum(self)


@dataclass(frozen=True)
class Prediction:
    """What one step of a plan takes.

    by_stage  the memory of a rank of each place on the pipeline axis
    timeline  by place on the pipeline axis, one rank of each; None: estimated without simulation
    """

    plan: Plan
    terms: StepTerms
    by_stage: tuple[MemoryParts, ...]
    sent_bytes: Mapping[str, float]
    """By axis: bytes that a rank sends in a step, at most."""
    timeline: Timeline | None = None

    @property
    def seconds(self) -> float:
        return self.terms.total

    @property
    def memory(self) -> MemoryParts:
        """Of the place that holds most."""
        return max(self.by_stage, key=lambda parts: parts.total)
