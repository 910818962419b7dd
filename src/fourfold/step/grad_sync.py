"""Gradient sync: whether ranks sum their gradients in every step, or train alone and average their weights at times.

sync  a step after which all ranks have the same weights: every step, or with local SGD every few steps
Law: after a sync all ranks have the same weights.
"""

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from fourfold.axes.data.work.gradients import Gradients, launch_complete
from fourfold.axes.data.work.local_sgd import LocalSGD
from fourfold.axes.data.work.weight_edits import WeightEdits
from fourfold.comm.communicator import Communicator
from fourfold.comm.reduce.protocol import ScalarReducer
from fourfold.comm.tensor.protocol import TensorGroup
from fourfold.torch_kit.tensor_reader import TensorReader
from fourfold.words.program import LOSS


class GradSync(Protocol):
    """What ranks sum."""

    interval: int
    """After so many steps, and so many more, all ranks have the same weights."""

    def loss_count(self, total: float, local: float | Tensor) -> float:
        """The loss elements that this rank's gradient is of: those of all ranks, or of its worker."""
        ...

    def is_count_ready(self, scalars: ScalarReducer) -> bool:
        """Whether the totals, which `scalars` sum, and `loss_count` are known without waiting for another rank."""
        ...

    def nominal_count(self, total: float) -> float:
        """The nominal count, of the loss elements of all ranks."""
        ...

    def scaled_squares(self, own_squares: Tensor, factor: float) -> Tensor:
        """This rank's addend of the squared norm; `factor`: what the sums must still be multiplied by."""
        ...

    def norms(self, total_squares: float, own_squares: Tensor, factor: float) -> tuple[float, float]:
        """The norm of the gradient that this rank updates with, and the global norm, the same on all ranks. Collective
        with local SGD.
        """
        ...

    def begin_step(self) -> None: ...

    def end_backward(self, gradients: Gradients, factor: float | None) -> None:
        """The last backward of a round has ended: its buckets are complete."""
        ...

    def count_losses(self, own: float, total: float) -> None:
        """The step's first update is about to be made, with a gradient of `own` loss elements: see `loss_count`."""
        ...

    def push(self, bucket: int) -> None:
        """Start to sum the ranks' changes of a bucket's weights."""
        ...

    def pull(self, bucket: int) -> None:
        """Take a bucket's new weights from the sum. Waits for all ranks."""
        ...

    def end_step(self) -> None: ...

    def accept_weights(self) -> None:
        """All ranks have the same weights now, from wherever."""
        ...

    def accept_edits(self, edits: WeightEdits) -> None:
        """All ranks have just synced: what has been written since becomes part of the weights of the sync, if any."""
        ...

    def load_weights(self, values: Mapping[str, Tensor]) -> None:
        """Weights were replaced, by name, by the same values on every rank."""
        ...

    @property
    def momenta(self) -> Mapping[str, Tensor]:
        """The outer momentum by parameter."""
        ...

    def load_momenta(self, momenta: Mapping[str, TensorReader]) -> None:
        """Load what `momenta` gave."""
        ...

    def merge_state(self, state: Tensor, data_ranks: Communicator) -> None:
        """Turn this rank's whole tensor of optimizer state into the one to save. Collective with local SGD."""
        ...


class SumEveryStep:
    """All ranks sum their gradients in every step, and so have the same weights after each."""

    interval = 1

    def loss_count(self, total: float, local: float | Tensor) -> float:
        return total

    def is_count_ready(self, scalars: ScalarReducer) -> bool:
        return scalars.is_ready(LOSS)

    def nominal_count(self, total: float) -> float:
        return total

    def scaled_squares(self, own_squares: Tensor, factor: float) -> Tensor:
        return own_squares

    def norms(self, total_squares: float, own_squares: Tensor, factor: float) -> tuple[float, float]:
        norm = total_squares**0.5 * factor
        return norm, norm

    def begin_step(self) -> None:
        pass

    def end_backward(self, gradients: Gradients, factor: float | None) -> None:
        pass  # the program's reductions launch them

    def count_losses(self, own: float, total: float) -> None:
        pass

    def push(self, bucket: int) -> None:
        raise AssertionError("gradients are summed in every step")

    def pull(self, bucket: int) -> None:
        raise AssertionError("gradients are summed in every step")

    def end_step(self) -> None:
        pass

    def accept_weights(self) -> None:
        pass

    def accept_edits(self, edits: WeightEdits) -> None:
        pass

    def load_weights(self, values: Mapping[str, Tensor]) -> None:
        pass

    @property
    def momenta(self) -> Mapping[str, Tensor]:
        return {}

    def load_momenta(self, momenta: Mapping[str, TensorReader]) -> None:
        pass

    def merge_state(self, state: Tensor, data_ranks: Communicator) -> None:
        pass


class LocalSteps:
    """Each worker trains with its own gradients; every few steps the workers average their weights.

    A worker is a data rank, or the tensor ranks and the stages that hold its model together: each of these averages its
    own part of the weights. Only the last stage counts loss elements.
    """

    def __init__(
        self, local_sgd: LocalSGD, num_workers: int, tensor_group: TensorGroup, stages: Communicator, interval: int
    ) -> None:
        """`stages`: the ranks that differ from this one on the pipeline axis only."""
        self._local_sgd, self._num_workers, self.interval = local_sgd, num_workers, interval
        self._tensor_group, self._stages = tensor_group, stages
        self._has_pulled = False

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

    def begin_step(self) -> None:
        self._has_pulled = False
        self._local_sgd.begin_step()

    def end_backward(self, gradients: Gradients, factor: float | None) -> None:
        launch_complete(gradients, factor)  # the program has no reductions

    def count_losses(self, own: float, total: float) -> None:
        self._local_sgd.add_loss_counts(own, total)

    def push(self, bucket: int) -> None:
        self._local_sgd.push(bucket)

    def pull(self, bucket: int) -> None:
        self._local_sgd.pull(bucket)
        self._has_pulled = True

    def end_step(self) -> None:
        if self._has_pulled:
            self._local_sgd.finish_sync()

    def accept_weights(self) -> None:
        self._local_sgd.finish_sync()

    def accept_edits(self, edits: WeightEdits) -> None:
        edits.accept_edits()

    def load_weights(self, values: Mapping[str, Tensor]) -> None:
        self._local_sgd.update_reference(values)

    @property
    def momenta(self) -> Mapping[str, Tensor]:
        return self._local_sgd.momenta

    def load_momenta(self, momenta: Mapping[str, TensorReader]) -> None:
        self._local_sgd.load_state(momenta)

    def merge_state(self, state: Tensor, data_ranks: Communicator) -> None:
        data_ranks.all_reduce(state)
        state.div_(data_ranks.size)
