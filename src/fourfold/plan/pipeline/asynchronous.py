"""Asynchronous schedules: 1F1B that is not drained between batches, so that no index waits once it is filled.

version  of a stage's weights: how many updates they have seen; batch t of synchronous training uses version t
stash    the versions that a stage keeps: those that its microbatches in flight use, and the newest one
drain    the backwards that are left after the last batch's forwards
Law: the steps of all batches and the drain are the whole list in order, and no step waits for a later one.
Sources: PipeDream (Narayanan et al., SOSP 2019): with stage k of n counted from 1, batch t uses w_k(t − n + k).
PipeDream-2BW (Narayanan et al., 2006.09503): batch t uses w(t − 1) on every stage.
"""

from fourfold.plan.pipeline.spec import ComputeLists, PipelineSpec
from fourfold.plan.pipeline.synchronous import one_f_one_b
from fourfold.words.program import Action, Verb

ASYNCHRONOUS = ("pipedream", "2bw")


def undrained(spec: PipelineSpec) -> ComputeLists:
    """1F1B over the microbatches of all batches in a row. A stage updates its weights after a batch's last backward."""
    return one_f_one_b(spec._replace(microbatches=spec.num_batches * spec.microbatches))


def batch_actions(spec: PipelineSpec, batch: int) -> ComputeLists:
    """What each index does in the step of a batch, counted from 0: its forwards, each with the backward that follows it
    in `undrained`. In the first steps some have none yet.
    """
    microbatches = range(batch * spec.microbatches, (batch + 1) * spec.microbatches)
    return tuple(
        tuple(action for i in microbatches for action in _forward_and_backward(stage, i, spec.pp - 1 - stage))
        for stage in range(spec.pp)
    )


def steady_actions(spec: PipelineSpec) -> ComputeLists:
    """What each index does in a step once the pipeline is filled. Microbatches are numbered within their batches: a
    backward is of the oldest microbatch in flight.
    """
    filled = spec.pp  # batches after which all indexes have as many in flight as they ever have
    return tuple(
        tuple(Action(each.verb, each.stage, each.index % spec.microbatches) for each in actions)
        for actions in batch_actions(spec, filled)
    )


def warm_up(spec: PipelineSpec, stage: int) -> int:
    """How many microbatches a stage has in flight between steps."""
    return spec.pp - 1 - stage


def batches_in_flight(spec: PipelineSpec) -> int:
    """How many batches the first stage has begun and not ended, between steps."""
    return -(-warm_up(spec, 0) // spec.microbatches)


def drain_actions(spec: PipelineSpec, num_batches: int) -> ComputeLists:
    """The backwards that are left after the steps of so many batches."""
    total = num_batches * spec.microbatches
    return tuple(
        tuple(Action(Verb.BACKWARD, stage, i) for i in range(max(0, total - (spec.pp - 1 - stage)), total))
        for stage in range(spec.pp)
    )


def _forward_and_backward(stage: int, microbatch: int, warm_up: int) -> list[Action]:
    forward = Action(Verb.FORWARD, stage, microbatch)
    return [forward, Action(Verb.BACKWARD, stage, microbatch - warm_up)] if microbatch >= warm_up else [forward]


def staleness(schedule: str, spec: PipelineSpec, stage: int) -> int:
    """How many updates a stage's weights miss in the forwards and backwards of a batch."""
    return {"pipedream": spec.pp - 1 - stage, "2bw": 1}.get(schedule, 0)


def weight_version(schedule: str, spec: PipelineSpec, stage: int, batch: int) -> int:
    """The version of a stage's weights that a batch uses in forward and backward; stages and batches count from 0."""
    return max(0, batch - staleness(schedule, spec, stage))


def num_stashed(schedule: str, spec: PipelineSpec, stage: int) -> int:
    """How many versions of its weights a stage keeps, the newest one included."""
    return {"pipedream": spec.pp - stage, "2bw": 2}.get(schedule, 1)
