"""Messages: what a stage sends to its neighbours and receives from them, as verbs.

kept  what both ends of an edge remember of a message until the gradients come back: `comm/edge_compression.py`
Law: a microbatch without samples has no messages; all stages know its size.
"""

import torch
from torch import Tensor

from fourfold.step.step_state import StepState
from fourfold.words.program import Action


def received(step: StepState, action: Action) -> list[Tensor]:
    """What the stage before has sent of this microbatch; nothing on the first stage."""
    return step.received.get((action.stage, action.index), [])


def receive_forward(step: StepState, action: Action) -> None:
    """The activations of a microbatch, from the stage before; of one without samples there are none."""
    edge = step.parts.edges.from_previous
    if step.microbatches[action.index].num_samples and edge is not None:
        tensors, kept = step.parts.compression.unpack(edge.receive())
        step.received[action.stage, action.index] = tensors
        step.kept[action.stage - 1, action.index] = kept


def send_forward(step: StepState, action: Action) -> None:
    """The outputs of a microbatch, to the next stage."""
    edge = step.parts.edges.to_next
    if step.microbatches[action.index].num_samples and edge is not None:
        message, kept = step.parts.compression.pack(step.boundary[action.stage, action.index])
        step.kept[action.stage, action.index] = kept
        edge.send(message)


def receive_backward(step: StepState, action: Action) -> None:
    """The gradients of a microbatch's outputs, from the next stage."""
    edge = step.parts.edges.from_next
    if step.microbatches[action.index].num_samples and edge is not None:
        place = action.stage, action.index
        step.upstream[place] = step.parts.compression.unpack_gradients(edge.receive(), step.kept.pop(place))


def send_backward(step: StepState, action: Action) -> None:
    """The gradients of what was received, to the stage before."""
    edge = step.parts.edges.to_previous
    if step.microbatches[action.index].num_samples and edge is not None:
        # No name is left for what was received: its slot is free before the stage before gets the gradient.
        gradients = [
            torch.zeros_like(each) if each.grad is None else each.grad
            for each in step.received.pop((action.stage, action.index))
            if each.requires_grad
        ]
        kept = step.kept.pop((action.stage - 1, action.index))
        edge.send(step.parts.compression.pack_gradients(gradients, kept))


def tie(step: StepState, action: Action) -> None:
    """Copy the tied weights to the stage that uses them too."""
    with step.stage(action.stage).weights.unsharded("tie", action.stage):
        step.parts.tied.copy_forward()


def tie_gradient(step: StepState, action: Action) -> None:
    """Add the gradients of the copies to those of the tied weights."""
    step.parts.tied.add_gradients()
