"""Verbs of programs without a backward: of an evaluation, and of a forward that has no loss."""

from collections.abc import Mapping

from fourfold.step.messages import receive_forward, received, send_forward, tie
from fourfold.step.step_state import StepState
from fourfold.step.verbs import VerbFunction, end_forward, measure, unshard
from fourfold.torch_kit.tensor_tree import tree_leaves
from fourfold.words.program import Action, Verb


def evaluate(step: StepState, action: Action) -> None:
    """The outputs and the loss of a batch, without training."""
    stage, part = step.stage(action.stage), step.microbatches[action.index]
    with stage.weights.unsharded("evaluate", action.stage):
        if part.num_samples:
            output = stage.chunks[action.stage].forward(part, received(step, action))
            end_forward(step, action, output)
            if stage.chunks[action.stage].loss is not None:
                step.outputs[action.index] = output.outputs
        else:
            stage.chunks[action.stage].evaluate_empty()


def infer(step: StepState, action: Action) -> None:
    """The outputs of a batch that may have no targets, on one rank; weights are whole already."""
    stage, part = step.stage(action.stage), step.microbatches[action.index]
    step.outputs[action.index] = outputs = stage.chunks[action.stage].infer(part, received(step, action)).outputs
    step.boundary[action.stage, action.index] = list(tree_leaves(outputs))


EVALUATION: Mapping[Verb, VerbFunction] = {
    Verb.TIE: tie,
    Verb.FORWARD: evaluate,
    Verb.SEND_FORWARD: send_forward,
    Verb.RECEIVE_FORWARD: receive_forward,
    Verb.UNSHARD: unshard,
    Verb.MEASURE: measure,
}
INFERENCE: Mapping[Verb, VerbFunction] = {
    Verb.TIE: tie,
    Verb.FORWARD: infer,
    Verb.SEND_FORWARD: send_forward,
    Verb.RECEIVE_FORWARD: receive_forward,
}
