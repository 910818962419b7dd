"""Gradient strategies: of whose samples gradients are, when they are reduced, where sums are scaled.

grad scale  the factor that turns reduced sums into the gradient of the mean; None while the totals are not known
round       the reductions after one backward, or after the last one of a step
worker      ranks that train one copy of the weights together: all of them; with local steps, those of one data index
Law: a sum is multiplied once, in one pass over it that is made anyway.
Law: all ranks that hold a weight get the same bits.
Law: every microbatch's gradient is in exactly one round, and every rank has the same rounds.
Law: where a batch is one part on one rank, gradients have in backward the size that they have on one device.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fourfold.axes.data.work.gradients import Gradients
from fourfold.axes.data.work.local_sgd import LocalSGD
from fourfold.axes.data.work.weight_edits import TrainedEdits
from fourfold.comm.communicator import Communicator
from fourfold.comm.reduce.protocol import GradReducer, shard_addend
from fourfold.comm.reduce.scalars import ScalarReducer
from fourfold.comm.tensor_group import TensorGroup
from fourfold.model.loss_sum import Loss
from fourfold.words.program import LOSS, TRUST_NORMS

# ---- rounds --------------------------------------------------------------------------------------------------------


class OneRound:
    """The rounds of a stage: gradients are added up over the microbatches, and reduced once.

    Microbatches are numbered from 0; the last one may be empty on this rank.
    """

    def begin_backward(self, gradients: Gradients, buckets: Sequence[int], index: int, last_nonempty: int) -> None:
        """The backward of microbatch `index` begins, which gives gradients of these buckets.

        `last_nonempty` is the last microbatch with samples on this rank.
        """
        gradients.countdown.is_last_backward = index == last_nonempty

    def ends_with(self, index: int, num_microbatches: int) -> bool:
        """Whether a round ends with this microbatch."""
        return index == num_microbatches - 1

    def has_all_grads(self, index: int, num_microbatches: int) -> bool:
        """Whether a bucket that is launched in this backward has all gradients of the step: it may be updated."""
        return True


class RoundEveryBackward(OneRound):
    """Gradients rest split: every backward is followed by reductions, which add to this rank's shard."""

    def begin_backward(self, gradients: Gradients, buckets: Sequence[int], index: int, last_nonempty: int) -> None:
        gradients.begin_round(buckets, index)
        gradients.countdown.is_last_backward = True

    def ends_with(self, index: int, num_microbatches: int) -> bool:
        return True

    def has_all_grads(self, index: int, num_microbatches: int) -> bool:
        return index == num_microbatches - 1


# ---- loss counts ---------------------------------------------------------------------------------------------------


class DividedByNominalCount:
    """What backward divides losses by: the nominal count, as the count of the step is not known in backward."""

    def mean_of(self, loss: Loss, nominal: float | None) -> Tensor:
        """What the backward of a microbatch begins with. `nominal`: the nominal count, once it is measured."""
        assert nominal is not None
        return loss.total / nominal

    def divisor(self, nominal: float | None, count: float) -> float:
        """What the gradients of a step were divided by, of which `count` elements are."""
        assert nominal is not None
        return nominal


class DividedByOwnCount(DividedByNominalCount):
    """A batch is one part, on one rank: its count is that of the step. Without elements the divisor is 1."""

    def mean_of(self, loss: Loss, nominal: float | None) -> Tensor:
        if isinstance(loss.count, Tensor):  # without waiting for the device
            return loss.total / torch.where(loss.count == 0, 1, loss.count).to(loss.total.dtype)
        return loss.total / (loss.count or 1.0)

    def divisor(self, nominal: float | None, count: float) -> float:
        return count or 1.0


# ---- workers -------------------------------------------------------------------------------------------------------


class OfAllRanks:
    """Of whose samples a rank's gradient is: all ranks are one worker, and sum their gradients in every step."""

    def loss_count(self, total: float, local: float | Tensor) -> float:
        """The loss elements of this rank's worker; `total`: of all ranks, `local`: of this one."""
        return total

    def is_count_ready(self, scalars: ScalarReducer) -> bool:
        """Whether the totals, which `scalars` sum, and `loss_count` are known without waiting for another rank."""
        return scalars.is_ready(LOSS)

    def nominal_count(self, total: float) -> float:
        """The nominal count, of the loss elements of all ranks."""
        return total

    def scaled_squares(self, own_squares: Tensor, factor: float) -> Tensor:
        """This rank's addend of the squared norm; `factor`: what the sums must still be multiplied by."""
        return own_squares

    def norms(self, total_squares: float, own_squares: Tensor, factor: float) -> tuple[float, float]:
        """The norm of the gradient that this rank updates with, and the global norm, the same on all ranks. Collective
        with local steps.
        """
        norm = total_squares**0.5 * factor
        return norm, norm


class OfWorker(OfAllRanks):
    """Each data index is a worker: the tensor ranks and the stages that hold its model together.

    Only the last stage counts loss elements. `stages`: the ranks that differ from this one on the pipeline axis only.
    """

    def __init__(self, num_workers: int, tensor_group: TensorGroup, stages: Communicator) -> None:
        self._num_workers, self._tensor_group, self._stages = num_workers, tensor_group, stages

    def loss_count(self, total: float, local: float | Tensor) -> float:
        return self._over_stages(torch.tensor(float(local), dtype=torch.float64))

    def is_count_ready(self, scalars: ScalarReducer) -> bool:
        return self._stages.size == 1 and scalars.is_ready(LOSS)

    def _over_stages(self, addend: Tensor) -> float:
        """The sum over the stages of this worker. Collective among them."""
        on_device = addend.to(self._stages.device)
        self._stages.all_reduce(on_device)
        return on_device.item()

    def nominal_count(self, total: float) -> float:
        return total / self._num_workers

    def scaled_squares(self, own_squares: Tensor, factor: float) -> Tensor:
        return own_squares * factor**2  # workers have different factors

    def norms(self, total_squares: float, own_squares: Tensor, factor: float) -> tuple[float, float]:
        of_worker = self._tensor_group.all_gather(own_squares.reshape(1), 0).sum()
        return self._over_stages(of_worker) ** 0.5, (total_squares / self._num_workers) ** 0.5


class LocalSteps(NamedTuple):
    """Whether ranks train alone and average their weights every `interval` steps. Else they sum gradients in each.

    sgd             of no buckets, unless they do
    edits_at_sync   where what is written after a sync becomes part of its weights; only if they do
    averaged_ranks  whose optimizer states differ, and are averaged when they are saved
    """

    interval: int
    scope: OfAllRanks
    sgd: LocalSGD
    edits_at_sync: Sequence[TrainedEdits]
    averaged_ranks: Communicator


# ---- norms ---------------------------------------------------------------------------------------------------------


def sum_over_tensor_ranks(group: TensorGroup, addends: Tensor) -> Tensor:
    """[n], float64 -> the sums over the ranks that hold parts of the same parameters. Collective.

    Here data ranks each hold all that their place of the tensor axis has of a parameter.
    """
    # Each rank adds in rank order: data ranks must get the same bits, also where the tensor ranks of one are joined
    # by another transport.
    return group.all_gather(addends.unsqueeze(0), 0).sum(0)


def sum_over_shards(group: TensorGroup, scalars: ScalarReducer, reducer: GradReducer, addends: Tensor) -> Tensor:
    """The same where data ranks each update a shard."""
    scalars.all_reduce_async(TRUST_NORMS, shard_addend(reducer, addends))
    of_place = torch.tensor(scalars.wait(TRUST_NORMS), dtype=addends.dtype, device=addends.device)
    return sum_over_tensor_ranks(group, of_place)


# ---- scaling -------------------------------------------------------------------------------------------------------


class ScaledSums:
    """Where sums are scaled: reducers scale them, as states rest whole, and the update uses the sums as they are."""

    def sum_factor(self, scale: float | None) -> float | None:
        """What the reducers multiply sums by; None: not known yet. `scale` is the grad scale."""
        return scale

    def update_factor(self, scale: float) -> float:
        """What the sums must still be multiplied by when they are used."""
        return 1.0

    def clip(self, coefficient: float, reducer: GradReducer) -> float:
        """Make gradients smaller by a coefficient; returns what the grad scale is multiplied by."""
        if coefficient != 1.0:
            reducer.scale_grads(coefficient)
        return 1.0


class ScaledInUpdate(ScaledSums):
    """The update scales the gradients that it prepares or converts."""

    def sum_factor(self, scale: float | None) -> float | None:
        return 1.0

    def update_factor(self, scale: float) -> float:
        return scale

    def clip(self, coefficient: float, reducer: GradReducer) -> float:
        return coefficient
