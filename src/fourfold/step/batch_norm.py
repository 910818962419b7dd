"""Batch statistics: which normalizations use those of a batch, and which use frozen ones.

frozen   in evaluation mode, with running statistics: each sample is normalized by itself
Law: what was frozen when a step was built is frozen in each of its steps, or the step is refused.
"""

from torch import nn

from fourfold.parts.torch_private import BatchNormBase
from fourfold.plan.plan import Plan
from fourfold.words.errors import Problem

FREEZE_HINT = "frozen statistics (norm.eval() after model.train())"


def uses_batch_stats(norm: nn.Module) -> bool:
    """Whether a batch normalization takes its statistics from the batch, in the mode in which it is."""
    return isinstance(norm, BatchNormBase) and (norm.training or norm.running_mean is None)


class FrozenBatchNorms:
    """The batch normalizations of a model that are frozen now, where another mode would be another training."""

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        self._num_parts = plan.reduce_group_size * plan.microbatches
        matters = plan.batch_norm == "refuse" and self._num_parts > 1
        modules = model.named_modules() if matters else ()
        self._frozen = [(name, m) for name, m in modules if isinstance(m, BatchNormBase) and not uses_batch_stats(m)]

    def problems(self) -> list[Problem]:
        """Which of them are frozen no more."""
        names = [name or "the model" for name, norm in self._frozen if norm.training]
        if not names:
            return []
        some = f"{', '.join(names[:3])}{' …' if len(names) > 3 else ''}"
        got = f"batch normalization at {some} in training mode, whose statistics were frozen at the build"
        need = f"no statistics over a batch that is cut in {self._num_parts}"
        attempt = "norm.eval() after each model.train(), or a train() of the model that keeps its norms frozen"
        return [Problem(got, need, attempt)]
