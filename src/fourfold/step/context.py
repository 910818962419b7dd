"""Step context: what a step's actions work with, and what they compute.

context      made once: gradients, transport, optimizer, weights
totals       loss and counts, summed over all ranks and microbatches of a step
update args  what the updates of a step depend on, once all is measured
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor, nn

from fourfold.parts.comm.reduce.protocol import DataTransport, WorldChannel
from fourfold.parts.data.grad_buckets import GradBuckets
from fourfold.parts.data.local_sgd import LocalSGD
from fourfold.parts.data.sharded_params import ShardedParams
from fourfold.parts.data.unbucketed_grads import UnbucketedGrads
from fourfold.parts.data.weight_edits import WeightEdits
from fourfold.parts.optim.flat_optimizer import FlatOptimizer
from fourfold.parts.optim.step_hooks import StepHooks
from fourfold.plan.data.zero import RestingLayouts
from fourfold.plan.precision import LossScaler


class StepContext(NamedTuple):
    """What the verbs work with: the gradients of all buckets, their transport, their update."""

    gradients: GradBuckets | UnbucketedGrads
    world: WorldChannel
    transport: DataTransport
    optimizer: FlatOptimizer
    parameters: Sequence[Sequence[nn.Parameter]]
    """By bucket and slot."""
    weights: Sequence[Tensor]
    """By bucket."""
    resting_layouts: RestingLayouts
    edits: WeightEdits
    """Tells Fourfold's own writes of weights from the user's."""
    sharded_params: ShardedParams | None = None
    """Set if weights rest split among ranks that do not share memory."""
    local_sgd: LocalSGD | None = None
    """Set if ranks take local steps: averages their weights."""
    step_hooks: StepHooks | None = None
    """The step hooks of the user's optimizer, if they can be called."""
    loss_scaler: LossScaler | None = None
    """Set with fp16: multiplies the loss, so that small gradients are not rounded to 0."""


@dataclass(frozen=True)
class StepTotals:
    """Sums over all ranks and microbatches of a step."""

    loss: float
    count: float
    num_samples: float
    num_tokens: float
    num_stop_requests: float
    """On how many ranks a stop was requested."""
    num_mismatches: float = 0.0
    """How many ranks have another batch than the ranks of their sequence: see `sequence/batch_consistency.py`."""
    other_count: float = 0.0
    other_square: float = 0.0
    """Of a loss that is made of several means: see `uneven_means`."""


class UpdateArgs(NamedTuple):
    """What the updates of a step depend on: see `FlatOptimizer.update`."""

    grad_scale: float
    num_ranks_with_grad: Sequence[float] | None
    """By slot: how many ranks have a gradient."""
    squared_norms: Sequence[Tensor] | None
    """By bucket."""
