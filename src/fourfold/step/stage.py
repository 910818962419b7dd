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
from fourfold.step.loss_sum import Loss
from fourfold.step.objective import Objective, StageOutput


class Stage(NamedTuple):
    """One stage; today there is one, with all of the model and the loss."""

    forward: Callable[[Microbatch], StageOutput]
    """The outputs of a microbatch that is not empty."""
    forward_empty: Callable[[], None]
    """The forward of a rank without samples."""
    backward: Callable[[Tensor, Tensor | None], None]
    """`backward(output, upstream)` computes the gradients of a forward's output, or of a loss."""
    loss: Callable[[StageOutput, Microbatch], Loss] | None
    """The loss of the outputs; None before the last stage."""


def whole_model_stage(model: nn.Module, objective: Objective) -> Stage:
    """The only stage of a model that is not cut."""

    def loss(output: StageOutput, part: Microbatch) -> Loss:
        return objective.loss(output, part).loss

    return Stage(
        functools.partial(objective.forward, model),
        functools.partial(objective.dummy_forward, model),
        _backward,
        loss,
    )


def _backward(output: Tensor, upstream: Tensor | None) -> None:
    output.backward(upstream)
