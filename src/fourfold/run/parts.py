"""Parts: what a step's actions work with, and what they learn.

parts   made once: gradients, transport, optimizer, weights
totals  loss and counts over all ranks and microbatches of a step
terms   what the updates of a step must know, once all is measured
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor, nn

from fourfold.parts.comm import Transport
from fourfold.parts.data import GradBuckets
from fourfold.parts.edits import WeightEdits
from fourfold.parts.gathered import ShardedParams
from fourfold.parts.in_place import UnbucketedGrads
from fourfold.parts.local import LocalSGD
from fourfold.parts.optim import FlatOptimizer
from fourfold.parts.step_hooks import StepHooks
from fourfold.plan.data import RestingLayouts
from fourfold.plan.precision import LossScaler


class Parts(NamedTuple):
    """What the verbs work with: the gradients of all buckets, their transport, their update."""

    gradients: GradBuckets | UnbucketedGrads
    transport: Transport
    optimizer: FlatOptimizer
    parameters: Sequence[Sequence[nn.Parameter]]
    """By bucket and slot."""
    weights: Sequence[Tensor]
    """By bucket."""
    rest: RestingLayouts
    edits: WeightEdits
    """What tells Fourfold's own writes of weights from others."""
    gathered: ShardedParams | None = None
    """Where weights rest split among ranks that do not share memory."""
    local: LocalSGD | None = None
    """Where ranks take steps of their own: what brings them together."""
    hooks: StepHooks | None = None
    """The step hooks of the user's optimizer, where they can be called."""
    scale: LossScaler | None = None
    """What the loss is multiplied by, where gradients have few numbers near 0."""


@dataclass(frozen=True)
class Totals:
    """Sums over all ranks and microbatches of a step."""

    loss: float
    count: float
    samples: float
    tokens: float
    asked: float
    """How many ranks have been asked to stop."""
    unlike: float = 0.0
    """How many ranks are of lines that have other batches: see `run.sequence.alike`."""
    other: float = 0.0
    square: float = 0.0
    """Of losses that are made of several means: see `run.objective.is_uneven`."""


class Terms(NamedTuple):
    """What the updates of a step must know: see `FlatOptimizer.update`."""

    factor: float
    used: Sequence[float] | None
    """By slot, on how many ranks it has a gradient."""
    squares: Sequence[Tensor] | None
    """By bucket."""
