"""Wrapper checks: what a DistributedOptimizer compares between ranks in every round.

round  one backward that reduces, on all ranks
Law: what is compared is compared on every rank in the same round, so that ranks that differ raise together, and none
waits for another.
"""

from torch import nn

from fourfold.comm.communicator import Communicator
from fourfold.optim.option_tracker import OptionTracker
from fourfold.proof.digests.batches import DuplicateBatches, InputDigests
from fourfold.proof.digests.weights import DriftChecker, DriftSchedule, replicated_tensors


class WrapperChecks:
    """The comparisons of one wrapped optimizer, on one rank."""

    def __init__(
        self,
        model: nn.Module,
        options: OptionTracker,
        data_ranks: Communicator,
        duplicate_batches: DuplicateBatches,
        drift_checker: DriftChecker,
    ) -> None:
        self._model, self._data_ranks = model, data_ranks
        self._duplicate_batches = duplicate_batches
        self._inputs = InputDigests(model if duplicate_batches.num_left else nn.Module())
        self.options = options
        """The options of the optimizer's groups, which the call of every round carries."""
        self._drift_checker, self._drift_schedule = drift_checker, DriftSchedule(drift_checker.every)

    def compare_batches(self) -> None:
        """Raise TaskError, on every rank, where all data ranks train on the same batches. Collective."""
        if not self._duplicate_batches.num_left:
            return
        try:
            self._duplicate_batches.compare(self._data_ranks.all_gather_json(self._inputs.pop()))
        finally:
            if not self._duplicate_batches.num_left:
                self._inputs.remove_hook()

    def compare_weights_if_due(self, num_steps: int, num_loads: int) -> None:
        """Compare the weights if `drift_check` says so after so many steps and loads of optimizer state. Collective."""
        if self._drift_schedule.is_due(num_steps, num_loads):
            self.compare_weights(num_steps)

    def compare_weights(self, num_steps: int) -> None:
        """Raise DivergenceError, on every rank, if the weights differ after so many steps. Collective."""
        tensors = replicated_tensors(self._model)
        self._drift_checker.compare(tensors, f"after step {num_steps}", update_kind=self.options.implementation())

    def restart_counting_loads(self) -> None:
        """All ranks have one rank's state: loads of optimizer state are counted from 0 again."""
        self._drift_schedule.num_loads = 0

    def remove_hook(self) -> None:
        """Stop looking at the model's inputs."""
        self._inputs.remove_hook()
