"""Parts: what a step's actions work with, and what they learn.

parts   made once: gradients, transport, optimizer, weights
totals  loss and counts over all ranks and microbatches of a step
terms   what the updates of a step must know, once all is measured
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor, nn

from fourfold.parts.comm.transports import Transport
from fourfold.parts.data.grad_buckets import GradBuckets
from fourfold.parts.data.local_sgd import LocalSGD
from fourfold.parts.data.sharded_params import ShardedParams
from fourfold.parts.data.unbucketed_grads import UnbucketedGrads
from fourfold.parts.data.weight_edits import WeightEdits
from fourfold.parts.optim.flat_optimizer import FlatOptimizer
from fourfold.parts.optim.step_hooks import StepHooks
from fourfold.plan.data import RestingLayouts
from fourfold.plan.precision import LossScaler


class StepContext(NamedTuple):
    """What the verbs work with: the gradients of all buckets, their transport, their update."""

    gradients: GradBuckets | UnbucketedGrads
    transport: Transport
    optimizer: FlatOptimizer
    parameters: Sequence[Sequence[nn.Parameter]]
    """By bucket and slot."""
    weights: Sequence[Tensor]
    """By bucket."""
    resting_layouts: RestingLayouts
    edits: WeightEdits
    """What tells Fourfold's own writes of weights from others."""
    sharded_params: ShardedParams | None = None
    """Where weights rest split among ranks that do not share memory."""
    local_sgd: LocalSGD | None = None
    """Where ranks take steps of their own: what brings them together."""
    step_hooks: StepHooks | None = None
    """The step hooks of the user's optimizer, where they can be called."""
    loss_scaler: LossScaler | None = None
    """What the loss is multiplied by, where gradients have few numbers near 0."""


@dataclass(frozen=True)
class StepTotals:
    """Sums over all ranks and microbatches of a step."""

    loss: float
    count: float
    num_samples: float
    num_tokens: float
    num_stop_requests: float
    """How many ranks have been asked to stop."""
    num_mismatches: float = 0.0
    """How many ranks are of lines that have other batches: see `run.sequence.alike`."""
    other_count: float = 0.0
    other_square: float = 0.0
    """Of losses that are made of several means: see `run.objective.is_uneven`."""


class UpdateArgs(NamedTuple):
    """What the updates of a step must know: see `FlatOptimizer.update`."""

    grad_scale: float
    num_ranks_with_grad: Sequence[float] | None
    """By slot, on how many ranks it has a gradient."""
    squared_norms: Sequence[Tensor] | None
    """By bucket."""
