"""Stage: the part of the model that a rank computes, and the loss on the last one.

outputs   what a stage's forward gives: the inputs of the next stage, or what the loss is computed of
upstream  the gradient of the outputs, which the next stage sends back; None behind the loss, whose gradient is 1
Law: the loss runs where its stage's forward runs, and the last stage keeps its loss, not its outputs.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor, nn

from fourfold.step.batch import Microbatch
from fourfold.step.batch_statistics import BatchStatistics
from fourfold.step.loss_sum import Loss
from fourfold.step.objective import Objective, StageOutput


class Stage(NamedTuple):
    """One stage; today there is one, with all of the model and the loss."""

    forward: Callable[[Microbatch], StageOutput]
    """The outputs of a microbatch that is not empty."""
    forward_empty: Callable[[], Tensor | None]
    """The forward of a rank without samples. Returns a loss whose backward other ranks need, or None."""
    evaluate_empty: Callable[[], None]
    """The same in an evaluation."""
    infer: Callable[[Microbatch], StageOutput]
    """The outputs of a microbatch, of this rank alone."""
    backward: Callable[[Tensor, Tensor | None], None]
    """`backward(output, upstream)` computes the gradients of a forward's output, or of a loss."""
    loss: Callable[[StageOutput, Microbatch], Loss] | None
    """The loss of the outputs; None before the last stage."""


def whole_model_stage(model: nn.Module, objective: Objective, statistics: BatchStatistics) -> Stage:
    """The only stage of a model that is not cut."""

    def forward(part: Microbatch) -> StageOutput:
        with statistics.in_forward(has_samples=True):
            return objective.forward(model, part)

    def forward_empty() -> Tensor | None:
        with statistics.in_forward(has_samples=False):
            return statistics.run_empty(model, objective)

    def evaluate_empty() -> None:
        with statistics.in_forward(has_samples=False):
            statistics.evaluate_empty(model, objective)

    def backward(output: Tensor, upstream: Tensor | None) -> None:
        with statistics.in_backward():
            output.backward(upstream)

    def loss(output: StageOutput, part: Microbatch) -> Loss:
        return objective.loss(output, part).loss

    infer = functools.partial(objective.forward, model)
    return Stage(forward, forward_empty, evaluate_empty, infer, backward, loss)
