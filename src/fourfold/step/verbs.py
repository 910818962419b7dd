"""Verbs: what each action of a program does, one function for each.

kept  what both ends of an edge remember of a message until the gradients come back: `comm/edge_compression.py`
Law: a verb does what its action says. What it depends on is in the step; it decides nothing about other actions.
Law: a microbatch without samples has no messages; all stages know its size.
Law: what a backward or its second half completes is launched while it runs, in the program's order of buckets.
"""

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from fourfold.axes.data.work.gradients import LaunchSink, launch_complete, num_ranks_with_grad
from fourfold.comm.reduce.protocol import shard_addend
from fourfold.model.objective import StageOutput
from fourfold.step.stage import Chunk, Stage
from fourfold.step.step_state import StepState, UpdateArgs
from fourfold.torch_kit.grad_hooks import GradSink
from fourfold.torch_kit.tensor_tree import tree_leaves
from fourfold.words.errors import Problem, TaskError
from fourfold.words.program import (
    GRAD_NORM,
    LOSS,
    NOMINAL_COUNT,
    TRUST_NORMS,
    USED_PARAMS,
    Action,
    Verb,
    bucket_of,
)

# ---- backward ------------------------------------------------------------------------------------------------------


def launch_next(step: StepState, *, may_wait: bool) -> int | None:
    """Launch the next complete bucket of the stage; returns it, or None."""
    stage = step.parts.stage
    factor = stage.scaling.sum_factor(step.poll_grad_scale())
    return stage.gradients.launch_next(factor, may_wait=may_wait)


def _launch_sink(step: StepState) -> LaunchSink:
    return LaunchSink(step.stage.gradients, functools.partial(launch_next, step, may_wait=False))


def backward(step: StepState, action: Action) -> None:
    """The gradients of a microbatch; buckets that are complete are launched on the way."""
    run_backward(step, action, _launch_sink(step))


def run_backward(step: StepState, action: Action, sink: GradSink) -> None:
    """The gradients of a microbatch; `sink` takes them."""
    _begin_backward(step, action)
    _differentiate(step, action, step.stage.grad_hooks.calling(sink))
    _end_backward(step, action)


def backward_input(step: StepState, action: Action) -> None:
    """The first half of a backward: the gradients that the stage before waits for."""
    stage = step.stage
    with stage.halves.first_half(stage.grad_hooks) as pending:
        _differentiate(step, action, contextlib.nullcontext())
    step.pending[action.stage, action.index] = pending


def backward_weight(step: StepState, action: Action) -> None:
    """The second half; buckets that are complete are launched on the way."""
    run_backward_weight(step, action, _launch_sink(step))


def run_backward_weight(step: StepState, action: Action, sink: GradSink) -> None:
    """The second half of a backward; `sink` takes the gradients."""
    _begin_backward(step, action)
    step.stage.halves.second_half(step.pending.pop((action.stage, action.index)), sink)
    _end_backward(step, action)


def _differentiate(step: StepState, action: Action, taking: AbstractContextManager[object]) -> None:
    """Run autograd from what a forward has left. Within `taking`, the gradients of weights are taken."""
    stage, key = step.stage, (action.stage, action.index)
    with stage.weights.unsharded("backward", action.stage):
        if action.index in step.losses:
            loss = step.parts.division.mean_of(step.losses.pop(action.index), step.nominal_count)
            if not loss.requires_grad:
                raise TaskError(_no_grad_problem())
            with taking:
                stage.chunks[action.stage].backward([step.parts.loss_scale.scale(loss)], None)
        elif outputs := [each for each in step.boundary.pop(key, []) if each.requires_grad]:
            with taking:
                stage.chunks[action.stage].backward(outputs, step.upstream.pop(key))
        elif (loss := step.empty_losses.pop(action.index, None)) is not None:
            _backward_empty(stage, stage.chunks[action.stage], loss)


def _begin_backward(step: StepState, action: Action) -> None:
    """The gradients of a microbatch come now."""
    stage = step.stage
    # The first stage of a pipeline is sent gradients of tied weights.
    if step.parts.objective.is_batch_split and step.parts.pp == 1:
        stage.gradients.check_untouched()
    stage.rounds.begin_backward(stage.gradients, stage.buckets_of(action.stage), action.index, step.last_nonempty)


def _end_backward(step: StepState, action: Action) -> None:
    """All gradients of a microbatch are there: at the end of a round, launch what is left."""
    stage, index, num_microbatches = step.stage, action.index, len(step.microbatches)
    buckets = stage.buckets_of(action.stage)
    if index == num_microbatches - 1 and step.last_nonempty >= 0:
        stage.gradients.check_all_reached(buckets)
    if stage.rounds.ends_with(index, num_microbatches):
        stage.gradients.countdown.complete(buckets)


def _backward_empty(stage: Stage, chunk: Chunk, loss: Tensor) -> None:
    """Backward of a rank without samples, because other ranks need it within theirs; its gradients are dropped."""
    if loss.requires_grad:
        chunk.backward([loss], [torch.zeros_like(loss)])
        stage.gradients.drop_grads()


def reduce(step: StepState, action: Action) -> None:
    """Launch a bucket, unless backward has: with those before it in program order, which backward has completed."""
    stage = step.stage
    bucket = bucket_of(action, stage.num_buckets)
    while not stage.gradients.countdown.is_launched(bucket):
        launched = launch_next(step, may_wait=True)
        assert launched is not None, f"bucket {bucket} is needed before the backward that completes it"


def _no_grad_problem() -> Problem:
    need = "one that depends on trainable parameters through differentiable operations"
    attempt = "no .detach(), .item(), argmax or torch.no_grad() between parameters and loss"
    return Problem("a loss without a gradient", need, attempt)


# ---- messages ------------------------------------------------------------------------------------------------------


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
        key = action.stage, action.index
        step.upstream[key] = step.parts.compression.unpack_gradients(edge.receive(), step.kept.pop(key))


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
    with step.stage.weights.unsharded("tie", action.stage):
        step.parts.tied.copy_forward()


def tie_gradient(step: StepState, action: Action) -> None:
    """Add the gradients of the copies to those of the tied weights."""
    step.parts.tied.add_gradients()


# ---- verbs ---------------------------------------------------------------------------------------------------------


VerbFunction = Callable[[StepState, Action], None]


def forward(step: StepState, action: Action) -> None:
    """A microbatch through the stage and its loss."""
    stage, part = step.stage, step.microbatches[action.index]
    with stage.weights.unsharded("forward", action.stage, step.unshard_sink):
        if part.num_samples:
            end_forward(step, action, stage.chunks[action.stage].forward(part, received(step, action)))
        elif (loss := stage.chunks[action.stage].forward_empty()) is not None:
            step.empty_losses[action.index] = loss


def end_forward(step: StepState, action: Action, output: StageOutput) -> None:
    """Keep what comes next: the loss on the last stage, before it the outputs, which the next stage needs."""
    loss = step.stage.chunks[action.stage].loss
    if loss is None:
        step.boundary[action.stage, action.index] = list(tree_leaves(output.outputs))
    else:
        step.add_loss(action.index, loss(output, step.microbatches[action.index]))


def unshard(step: StepState, action: Action) -> None:
    """The next forward or backward unshards a bucket's weights, when it is about to use them."""
    stage = step.stage
    stage.weights.storage.plan_unshard(bucket_of(action, stage.num_buckets), action.index)


# ---- measures -------------------------------------------------------------------------------------------


def measure(step: StepState, action: Action) -> None:
    """Sum scalars over ranks."""
    MEASURES[action.index](step, action)


def _measure_nominal_count(step: StepState, action: Action) -> None:
    """In the first step: the count of its first microbatch stands for that of every microbatch of every step."""
    by_rank = step.parts.count_ranks.all_gather_json(float(step.losses[0].count) if 0 in step.losses else 0.0)
    step.nominal_count = max(1.0, step.parts.local.scope.nominal_count(sum(by_rank)) * len(step.microbatches))


def _measure_loss(step: StepState, action: Action) -> None:
    """Begin to sum the totals; who needs them waits."""
    step.parts.scalars.all_reduce_async(LOSS, step.local_totals())


def _measure_used_params(step: StepState, action: Action) -> None:
    """On how many ranks each parameter has a gradient."""
    stage = step.stage
    step.num_ranks_with_grad = num_ranks_with_grad(stage.gradients.countdown, stage.scalars)


def _measure_grad_norm(step: StepState, action: Action) -> None:
    """The norm of the gradient, with every weight once; then clip."""
    step.read_totals()
    parts = step.parts
    squares = _own_squares(step)
    factor = step.stage.scaling.update_factor(step.grad_scale)
    squares = parts.local.scope.scaled_squares(squares, factor)
    parts.scalars.all_reduce_async(GRAD_NORM, squares.reshape(1))
    total = parts.scalars.wait(GRAD_NORM)[0]
    _clip(step, *parts.local.scope.norms(total, squares, factor))


def _own_squares(step: StepState) -> Tensor:
    """The squared norm of this rank's part of a stage's gradient; 0 if another replica adds the same part."""
    stage = step.stage
    wait_all(step)
    flats = list(itertools.chain(*map(stage.gradients.local_grads, range(stage.num_buckets))))
    # In two bytes each bucket's norm would be rounded, and in fp16 a norm above 65,504 would be infinite.
    dtypes = [torch.promote_types(flat.dtype, torch.float32) for flat in flats]
    norms = [torch.linalg.vector_norm(flat, dtype=dtype) for flat, dtype in zip(flats, dtypes, strict=True)]
    none = torch.zeros((), dtype=torch.float64, device=step.parts.device)  # of a stage whose weights are all frozen
    squares = torch.stack(norms).double().square().sum() if norms else none
    return shard_addend(stage.reducer, squares)


def _clip(step: StepState, norm: float, global_norm: float) -> None:
    """Clip. `norm` is of the gradient that this rank updates with, `global_norm` is the same on all ranks."""
    step.grad_norm = global_norm
    if step.bad_reason is None and not math.isfinite(global_norm):
        step.overflowed = step.parts.loss_scale.can_decrease
        if not step.overflowed:
            step.bad_reason = f"the gradient norm is {global_norm}"
    if not step.is_skipped:
        # 1e-6 as in torch.nn.utils.clip_grad_norm_.
        coefficient = min(step.parts.max_norm / (norm + 1e-6), 1.0)
        step.grad_scale *= step.stage.scaling.clip(coefficient, step.stage.reducer)


def _measure_trust_norms(step: StepState, action: Action) -> None:
    """Begin the layer-wise updates of all buckets: they need the norms of parameters that are split among ranks."""
    stage = step.stage
    step.read_totals()
    wait_all(step)
    if step.is_skipped:
        return
    counts = step.num_ranks_with_grad
    local = [
        stage.optimizer.begin_layerwise_update(bucket, used=stage.used_slots(bucket, counts), factor=step.grad_scale)
        for bucket in range(stage.num_buckets)
    ]
    none = torch.zeros(0, 2, dtype=torch.float64)  # of a stage whose weights are all frozen
    total = stage.sum_norms(torch.cat(local or [none]).flatten().to(step.parts.device))
    by_bucket = total.view(-1, 2).split([len(parameters) for parameters in stage.parameters])
    step.squared_norms = dict(enumerate(by_bucket))


# ---- updates --------------------------------------------------------------------------------------------


def wait_all(step: StepState) -> None:
    """Wait for the reductions of all buckets of the stage; the totals are known."""
    for bucket in range(step.stage.num_buckets):
        wait_bucket(step, bucket)


def wait_bucket(step: StepState, bucket: int) -> None:
    """Wait for a bucket's reduction; the totals are known."""
    stage = step.stage
    factor = stage.scaling.sum_factor(step.grad_scale)
    assert factor is not None
    if not stage.gradients.countdown.is_launched(bucket):  # as in local steps, whose programs have no reductions
        launch_complete(stage.gradients, factor)
    stage.reducer.wait_reduce(bucket, factor)
    stage.gradients.record_done(bucket)


def update(step: StepState, action: Action) -> None:
    """Update a bucket's weights once its reduction has ended; other buckets may still be reduced."""
    if is_update_due(step, action.index):
        update_bucket(step, action)
    step.stage.gradients.free_grads(action.index)


def is_update_due(step: StepState, bucket: int) -> bool:
    """Whether the step updates weights; waits for the totals, and for this bucket's reduction."""
    step.read_totals()
    wait_bucket(step, bucket)
    return not step.is_skipped


def update_bucket(step: StepState, action: Action) -> None:
    """Update a bucket that is reduced."""
    if not step.has_begun_updates:
        begin_updates(step)
    run_optimizer(step.stage, action.index, step.update_args)


def begin_updates(step: StepState) -> None:
    """Before the first update of a step: the optimizer's pre-hooks see all gradients as the update will use them."""
    step.has_begun_updates = True
    total = step.read_totals().count
    step.parts.local.sgd.add_loss_counts(step.trained_count, total)
    stage = step.stage
    if stage.step_hooks.has_any_hook:
        wait_all(step)
        factor = step.stage.scaling.update_factor(step.grad_scale)
        counts = step.num_ranks_with_grad
        step.num_ranks_with_grad = stage.step_hooks.run_pre_hooks(stage.reducer, counts, factor)
        step.has_called_hooks = True


def run_optimizer(stage: Stage, bucket: int, args: UpdateArgs) -> None:
    """Update a bucket, or this rank's shard of it."""
    stage.optimizer.update(
        bucket,
        used=stage.used_slots(bucket, args.num_ranks_with_grad),
        factor=args.grad_scale,
        squared_norms=args.squared_norms.get(bucket),
        gradient=stage.step_hooks.bucket_grads[bucket],
    )
    # So autograd refuses saved tensors of the old weights, instead of computing with the new ones.
    stage.weights.edits.increment_version(bucket)


def gather(step: StepState, action: Action) -> None:
    """Start to all-gather a bucket's new weights."""
    stage = step.stage
    stage.gatherer.all_gather_async(action.index, stage.weights.flats[action.index])


def push(step: StepState, action: Action) -> None:
    """Local SGD: start to sum the ranks' changes of a bucket's weights."""
    step.parts.local.sgd.push(action.index)


def pull(step: StepState, action: Action) -> None:
    """Local SGD: take a bucket's new weights from the sum."""
    step.parts.local.sgd.pull(action.index)
    step.has_pulled = True
    step.stage.weights.edits.increment_version(action.index)


MEASURES: Mapping[int, VerbFunction] = {
    LOSS: _measure_loss,
    GRAD_NORM: _measure_grad_norm,
    USED_PARAMS: _measure_used_params,
    TRUST_NORMS: _measure_trust_norms,
    NOMINAL_COUNT: _measure_nominal_count,
}
# Of a training step; what the timing of updates replaces is in `update_timing.py`.
VERBS: Mapping[Verb, VerbFunction] = {
    Verb.FORWARD: forward,
    Verb.UNSHARD: unshard,
    Verb.BACKWARD: backward,
    Verb.BACKWARD_INPUT: backward_input,
    Verb.BACKWARD_WEIGHT: backward_weight,
    Verb.SEND_FORWARD: send_forward,
    Verb.RECEIVE_FORWARD: receive_forward,
    Verb.SEND_BACKWARD: send_backward,
    Verb.RECEIVE_BACKWARD: receive_backward,
    Verb.TIE: tie,
    Verb.TIE_GRADIENT: tie_gradient,
    Verb.MEASURE: measure,
    Verb.REDUCE: reduce,
    Verb.UPDATE: update,
    Verb.GATHER: gather,
    Verb.PUSH: push,
    Verb.PULL: pull,
}


# ---- evaluation ----------------------------------------------------------------------------------------------------


def evaluate(step: StepState, action: Action) -> None:
    """The outputs and the loss of a batch, without training."""
    stage, part = step.stage, step.microbatches[action.index]
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
    stage, part = step.stage, step.microbatches[action.index]
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
