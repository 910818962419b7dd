"""Memory log: what every rank holds in memory, predicted and measured, in the log of a run.

predicted  what the plan keeps from step to step, by kind (`plan/memory.py`): of the host that holds most, divided by
           its ranks; None where the model cannot be made without memory
kept       the same as this rank's process has allocated it (`torch_kit/memory.py`). What ranks share counts for the
           rank that has made it, so ranks of one host may differ, and their mean is to be compared with the prediction
peak       the largest resident set of this rank's process so far: with the interpreter, the libraries, activations,
           batches, and the shared pages that it has touched
device     on a GPU, the most that torch has allocated at one time
Law: memory is measured after step 3, from which on it does not grow, after each evaluation and at the end: never in a
step.
"""

from collections import Counter
from collections.abc import Mapping

import torch
from torch import nn

from fourfold.environment.host_limits import resident_bytes
from fourfold.model.weights import update_spec
from fourfold.optim.user_optimizer import build_optimizer
from fourfold.plan.lowering import lower
from fourfold.step.model_layout import laid_out_specs
from fourfold.step.train_step import TrainStep
from fourfold.torch_kit.memory import memory_use
from fourfold.trainer.run_logger import RunLogger
from fourfold.words.task import Task

FIRST_MEASURED_STEP = 3  # from here on memory does not grow


class MemoryLog:
    """Writes the memory of all ranks into a run's log.

    before_bytes  resident before the model was made; None: the system does not say
    predicted     see `predict_bytes`; None on all ranks but 0, and where the model cannot be made without memory
    """

    def __init__(
        self, step: TrainStep, logger: RunLogger, *, before_bytes: int | None, predicted: Mapping[str, float] | None
    ) -> None:
        self._step, self._logger, self._before_bytes, self._predicted = step, logger, before_bytes, predicted

    def log(self, step_number: int) -> None:
        """Log what all ranks hold after a step. Collective."""
        device = self._step.device
        own = {
            "kept_bytes": memory_use().total_bytes,
            "peak_bytes": resident_bytes("VmHWM"),
            "before_bytes": self._before_bytes,
            "device_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
        }
        ranks = self._step.all_gather_json(own)
        self._logger.write_record({"memory": {"step": step_number, "predicted": self._predicted, "ranks": ranks}})


def predict_bytes(task: Task, step: TrainStep, meta_model: nn.Module | None) -> dict[str, float] | None:
    """The bytes that a rank keeps from step to step, by kind; kinds without any are left out.

    Where hosts differ: of the one that holds most. Only rank 0 predicts, for it takes a trial step of the optimizer.
    """
    if step.rank != 0 or meta_model is None:
        return None
    # An optimizer may draw random numbers, which the training must not miss.
    with torch.random.fork_rng(devices=[]):
        optimizer = build_optimizer(task.optimizer, list(meta_model.parameters()))
        specs = laid_out_specs(meta_model, optimizer, task.tensor, step.plan.tensor_spec, step.plan.stage_spec)
        update = update_spec(meta_model, optimizer, clip=task.clip, counts_states=True)
    use = lower(step.plan, specs, step.topology, update).host_memory
    num_ranks = max(Counter(step.topology.hosts).values())
    return {name: num_bytes / num_ranks for name, num_bytes in use._asdict().items() if num_bytes}
