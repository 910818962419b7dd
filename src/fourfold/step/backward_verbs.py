"""Verbs of a backward: whole or in two halves, and the reductions that it completes.

Law: what a backward or its second half completes is launched while it runs, in the program's order of buckets.
"""

import contextlib
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from fourfold.step.stage import Stage
from fourfold.step.step_parts import StageParts
from fourfold.step.step_state import StepState
from fourfold.torch_kit.grad_hooks import GradSink
from fourfold.words.errors import Problem, TaskError
from fourfold.words.program import Action, bucket_of


class LaunchSink:
    """Takes the gradients of one backward, and launches the buckets that they complete."""

    def __init__(self, step: StepState, stage: StageParts) -> None:
        self._step, self._stage = step, stage

    def on_grad(self, param_index: int) -> None:
        if self._stage.gradients.store(param_index):
            while launch_next(self._step, self._stage, may_wait=False) is not None:
                pass


def launch_next(step: StepState, stage: StageParts, *, may_wait: bool) -> int | None:
    """Launch the next complete bucket of a stage; returns it, or None."""
    factor = step.parts.scaling.sum_factor(step.poll_grad_scale())
    return stage.gradients.launch_next(factor, may_wait=may_wait)


def backward(step: StepState, action: Action) -> None:
    """The gradients of a microbatch; buckets that are complete are launched on the way."""
    run_backward(step, action, LaunchSink(step, step.stage(action.stage)))


def run_backward(step: StepState, action: Action, sink: GradSink) -> None:
    """The gradients of a microbatch; `sink` takes them."""
    stage = step.stage(action.stage)
    _begin_backward(step, action)
    _differentiate(step, action, stage.grad_hooks.calling(sink))
    _end_backward(step, action)


def backward_input(step: StepState, action: Action) -> None:
    """The first half of a backward: the gradients that the stage before waits for."""
    stage = step.stage(action.stage)
    with stage.halves.first_half(stage.grad_hooks) as pending:
        _differentiate(step, action, contextlib.nullcontext())
    step.pending[action.stage, action.index] = pending


def backward_weight(step: StepState, action: Action) -> None:
    """The second half; buckets that are complete are launched on the way."""
    run_backward_weight(step, action, LaunchSink(step, step.stage(action.stage)))


def run_backward_weight(step: StepState, action: Action, sink: GradSink) -> None:
    """The second half of a backward; `sink` takes the gradients."""
    stage = step.stage(action.stage)
    _begin_backward(step, action)
    stage.halves.second_half(step.pending.pop((action.stage, action.index)), sink)
    _end_backward(step, action)


def _differentiate(step: StepState, action: Action, taking: AbstractContextManager[object]) -> None:
    """Run autograd from what a forward has left. Within `taking`, the gradients of weights are taken."""
    stage, place = step.stage(action.stage), (action.stage, action.index)
    with stage.weights.unsharded("backward", action.stage):
        if action.index in step.losses:
            loss = step.losses.pop(action.index).total / step.known_nominal_count
            if not loss.requires_grad:
                raise TaskError(_no_grad_problem())
            with taking:
                stage.chunks[action.stage].backward([step.parts.loss_scale.scale(loss)], None)
        elif outputs := [each for each in step.boundary.pop(place, []) if each.requires_grad]:
            with taking:
                stage.chunks[action.stage].backward(outputs, step.upstream.pop(place))
        elif (loss := step.empty_losses.pop(action.index, None)) is not None:
            _backward_empty(stage, stage.chunks[action.stage], loss)


def _begin_backward(step: StepState, action: Action) -> None:
    """The gradients of a microbatch come now."""
    stage = step.stage(action.stage)
    stage.rounds.begin_backward(stage.gradients, stage.buckets_of(action.stage), action.index, step.last_nonempty)


def _end_backward(step: StepState, action: Action) -> None:
    """All gradients of a microbatch are there: at the end of a round, launch what is left."""
    stage, index, num_microbatches = step.stage(action.stage), action.index, len(step.microbatches)
    buckets = stage.buckets_of(action.stage)
    if index == num_microbatches - 1 and step.last_nonempty >= 0:
        stage.gradients.check_all_reached(buckets)
    if stage.rounds.ends_with(index, num_microbatches):
        stage.gradients.countdown.complete(buckets)
        step.parts.sync.end_backward(stage.gradients, step.parts.scaling.sum_factor(step.poll_grad_scale()))


def _backward_empty(stage: StageParts, chunk: Stage, loss: Tensor) -> None:
    """Backward of a rank without samples, because other ranks need it within theirs; its gradients are dropped."""
    if loss.requires_grad:
        chunk.backward([loss], [torch.zeros_like(loss)])
        stage.gradients.drop_grads()


def reduce(step: StepState, action: Action) -> None:
    """Launch a bucket, unless backward has: with those before it in program order, which backward has completed."""
    stage = step.stage(action.stage)
    while not stage.gradients.countdown.is_launched(bucket_of(action, stage.num_buckets)):
        launched = launch_next(step, stage, may_wait=True)
        assert launched is not None, f"{action} before the backward that completes its bucket"


def _no_grad_problem() -> Problem:
    need = "one that depends on trainable parameters through differentiable operations"
    attempt = "no .detach(), .item(), argmax or torch.no_grad() between parameters and loss"
    return Problem("a loss without a gradient", need, attempt)
