"""Wrapper checks: what a DistributedOptimizer compares between ranks, at its build and in every round.

round  one backward that reduces, on all ranks
Law: what is compared is compared on every rank in the same round, so that ranks that differ raise together, and none
waits for another.
"""

from torch import nn
from torch.optim import Optimizer

from fourfold.parts.comm.communicator import Communicator
from fourfold.parts.data.flat_params import param_specs
from fourfold.parts.optim.option_tracker import OptionTracker
from fourfold.parts.optim.user_optimizer import group_indices
from fourfold.plan.plan import Plan
from fourfold.step.duplicate_batches import DuplicateBatches, InputFingerprints, NoFingerprints
from fourfold.step.memory_formats import shape_and_strides
from fourfold.step.rank_agreement import check_same_on_ranks
from fourfold.step.replica_drift import DriftChecker, DriftSchedule, replicated_tensors
from fourfold.step.weights import trainable_parameters

WRAPPER_HINT = (
    "the same seeds, hooks, edits and loaded state on every rank; optimizer.broadcast_state() copies one rank's to all"
)


class WrapperChecks:
    """The comparisons of one wrapped optimizer, on one rank."""

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        plan: Plan,
        world: Communicator,
        *,
        same_batches: str,
        drift_check: int,
    ) -> None:
        """Collective; `world` lies on the plan's mesh. Raises SettingError for a wrong `same_batches` or `drift_check`.

        Raises PlanError, on every rank, unless all ranks have the same parameters, plan, options and optimizer.
        """
        self._model, self._data_ranks = model, world.along("dp")
        self._duplicate_batches = DuplicateBatches(same_batches, data_ranks=range(plan.dp), is_log_rank=world.rank == 0)
        settings = {"same_batches": same_batches, "drift_check": drift_check}
        _check_same_build(optimizer, model, plan, world, settings)
        self._input_fingerprints = InputFingerprints(model) if self._duplicate_batches.num_left else NoFingerprints()
        self.options = OptionTracker(optimizer)
        """The options of the optimizer's groups, which the call of every round carries."""
        self._drift_checker = DriftChecker(
            world, drift_check, compares_frozen=not plan.batch_split.has_local_batch_norm, attempt=WRAPPER_HINT
        )
        self._drift_schedule = DriftSchedule(self._drift_checker.every)

    def compare_batches(self) -> None:
        """Raise TaskError, on every rank, where all data ranks train on the same batches. Collective."""
        if not self._duplicate_batches.num_left:
            return
        try:
            self._duplicate_batches.compare(self._data_ranks.all_gather_json(self._input_fingerprints.pop()))
        finally:
            if not self._duplicate_batches.num_left:
                self._input_fingerprints.remove_hook()

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
        self._input_fingerprints.remove_hook()


def _check_same_build(
    optimizer: Optimizer, model: nn.Module, plan: Plan, world: Communicator, settings: dict[str, str | int]
) -> None:
    """Raise PlanError unless every rank wraps the same optimizer, with the same settings. Collective."""
    trainable = trainable_parameters(model)
    groups = dict.fromkeys(trainable, -1) | group_indices(optimizer, trainable)
    specs = param_specs(trainable, groups)
    shapes = {name: shape_and_strides(p) for name, p in trainable.items()}
    check_same_on_ranks(world, specs, shapes, plan=plan, options=settings, optimizer=optimizer)
