"""Step parts: what a step is assembled of, by stage and for the whole rank.

Law: records only; `assembly.py` makes them, the verbs use them.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from fourfold.axes.data.work.gradients import Gradients
from fourfold.axes.data.work.local_sgd import LocalSGD
from fourfold.axes.pipeline.work.tied import TiedWeights
from fourfold.comm.communicator import Communicator
from fourfold.comm.edge_compression import Compression
from fourfold.comm.edges import StageEdges
from fourfold.comm.meter import CommMeter
from fourfold.comm.reduce.protocol import GradReducer, ScalarReducer, WeightGatherer
from fourfold.model.objective import Objective
from fourfold.model.weights import Weights
from fourfold.optim.flat_optimizer import FlatOptimizer
from fourfold.optim.step_hooks import StepHooks
from fourfold.plan.precision import LossScale
from fourfold.step.grad_strategies import GradRounds, GradScaling, GradScope, LossDivision, NormSum
from fourfold.step.stage import Stage
from fourfold.torch_kit.deferred_grads import BackwardHalves
from fourfold.torch_kit.grad_hooks import GradHooks
from fourfold.words.program import Verb


class StageParts(NamedTuple):
    """What the actions of one stage work with."""

    chunks: Mapping[int, Stage]
    """By number in the model: the stages whose parameters are here; several, if stages are interleaved."""
    parameters: Sequence[Sequence[nn.Parameter]]
    """By bucket and slot."""
    bucket_stages: Sequence[int]
    """By bucket: the stage in the model that computes with it."""
    gradients: Gradients
    grad_hooks: GradHooks
    halves: BackwardHalves
    reducer: GradReducer
    gatherer: WeightGatherer
    data_ranks: Communicator
    """The ranks that sum this stage's gradients."""
    scalars: ScalarReducer
    """Of these ranks."""
    optimizer: FlatOptimizer
    weights: Weights
    step_hooks: StepHooks
    rounds: GradRounds
    update_verbs: tuple[Verb, ...]
    """What updates a bucket: UPDATE, and GATHER if new weights are all-gathered."""
    norm_sum: NormSum
    """Of layer-wise updates."""

    @property
    def num_buckets(self) -> int:
        return len(self.parameters)

    def buckets_of(self, stage: int) -> Sequence[int]:
        """The buckets of one of the stages."""
        return [bucket for bucket, each in enumerate(self.bucket_stages) if each == stage]

    def used_slots(self, bucket: int, counts: Sequence[float] | None) -> Sequence[bool] | None:
        """Which slots of a bucket have a gradient on any rank; None: all. `counts` are by slot of all buckets."""
        if counts is None:
            return None
        first = sum(len(parameters) for parameters in self.parameters[:bucket])
        return [bool(count) for count in counts[first : first + len(self.parameters[bucket])]]


class StepParts(NamedTuple):
    """What the steps of one rank work with."""

    stages: Mapping[int, StageParts]
    """This rank's, by the number of its first stage in the model."""
    num_places: int
    """Of the pipeline axis: stage s is at place s % num_places."""
    scalars: ScalarReducer
    """Of all ranks of the world."""
    meter: CommMeter
    objective: Objective
    scope: GradScope
    local_sgd: LocalSGD
    """Of no buckets, unless ranks average their weights."""
    division: LossDivision
    scaling: GradScaling
    loss_scale: LossScale
    added_totals: Sequence[str]
    """Which of its totals this rank adds to those over all ranks; of ranks that have the same samples, one adds all."""
    edges: StageEdges
    """To the stages before and behind this rank's."""
    compression: Compression
    """Of the messages over these edges."""
    tied: TiedWeights
    """What the first and the last place of the pipeline use together."""
    count_ranks: Communicator
    """The ranks that know together how many loss elements a microbatch has: those of one tensor place."""
    max_norm: float
    """The bound of the gradient norm; infinite without clip."""
    device: torch.device

    def place_of(self, stage: int) -> int:
        """The number by which `stages` has a stage."""
        return stage % self.num_places
