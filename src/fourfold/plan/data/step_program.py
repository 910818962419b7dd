"""The step program of the data axis: what one data rank does in one step, as a list of actions.

round   the reductions after one backward; only where gradients rest split does a step have more than one
Law: every data rank has the same program, so all of them begin the same collectives in the same order.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple

from fourfold.plan.data.zero import RESTING_LAYOUTS, RestingLayouts, layout_changes
from fourfold.words.layout import Change
from fourfold.words.program import GRAD_NORM, LOSS, TRUST_NORMS, USED_PARAMS, Action, Verb


class StepSync(StrEnum):
    """What ranks exchange in a step."""

    GRADIENTS = "gradients"  # every bucket is reduced
    NOTHING = "nothing"  # a local step of local SGD
    WEIGHTS = "weights"  # a local step of local SGD, after which the weights are averaged


class DataStepSpec(NamedTuple):
    """What a data rank's step consists of.

    launch_order      the order of reductions, as recorded in the first step; empty: by bucket number
    has_trust_ratios  the optimizer needs norms of single parameters, and parameters are split among ranks
    """

    microbatches: int
    num_buckets: int
    resting_layouts: RestingLayouts = RESTING_LAYOUTS[0]
    has_clip: bool = False
    allows_unused: bool = False
    update: str = "after"
    launch_order: tuple[int, ...] = ()
    has_trust_ratios: bool = False
    sync: StepSync = StepSync.GRADIENTS


def lower_step(step: DataStepSpec) -> tuple[Action, ...]:
    """The program of a data rank's step: forwards and backwards, reductions in launch order, then updates.

    Reductions stand after the backward that completes them. A runtime may begin each one while that backward still
    runs, as soon as its bucket is ready, in this order. Where gradients rest split, every backward has its own round of
    reductions; the reduction of bucket b in round r has the index r × num_buckets + b.

    A step that averages weights has no reductions: the change of a bucket is pushed after its update, and the averages
    are pulled at the end of the step.

    `update = "in_backward"` puts each update after the last reduction of its bucket; it too may begin while backward
    runs (backward fusion: Jiang et al., "Optimizer Fusion", 2021). `update = "in_forward"` puts the updates of the step
    before in front of the first forward, in the order in which forward uses the buckets; each may be deferred until
    that forward reaches its bucket (forward fusion: ibid.).
    """
    launch_order = step.launch_order or tuple(range(step.num_buckets))
    updates = {bucket: _update(step, bucket) for bucket in launch_order}
    pushes = {
        bucket: [Action(Verb.PUSH, 0, bucket)] if step.sync == StepSync.WEIGHTS else [] for bucket in launch_order
    }
    actions: list[Action] = []
    if step.update == "in_forward":
        actions += [action for bucket in reversed(launch_order) for action in updates[bucket]]
    for microbatch in range(step.microbatches):
        actions += _forward_backward(step, microbatch)
        actions += _reductions(step, microbatch, launch_order, updates)
    actions += _measures(step)
    for bucket in launch_order:
        actions += (updates[bucket] if step.update == "after" else []) + pushes[bucket]
    if step.sync == StepSync.WEIGHTS:
        actions += [Action(Verb.PULL, 0, bucket) for bucket in launch_order]
    return tuple(actions)


def _update(step: DataStepSpec, bucket: int) -> list[Action]:
    gathers = layout_changes(step.resting_layouts).after_update != Change.NONE
    return [Action(Verb.UPDATE, 0, bucket), *([Action(Verb.GATHER, 0, bucket)] if gathers else [])]


def _forward_backward(step: DataStepSpec, microbatch: int) -> list[Action]:
    measure = [Action(Verb.MEASURE, 0, LOSS)] if microbatch == step.microbatches - 1 else []
    return [Action(Verb.FORWARD, 0, microbatch), *measure, Action(Verb.BACKWARD, 0, microbatch)]


def _reductions(
    step: DataStepSpec, microbatch: int, launch_order: tuple[int, ...], updates: Mapping[int, list[Action]]
) -> list[Action]:
    """The round of reductions after a backward, with the updates that are fused into it; empty between rounds."""
    is_last = microbatch == step.microbatches - 1
    every_backward = layout_changes(step.resting_layouts).after_backward != Change.NONE
    if not (is_last or every_backward):
        return []
    first = microbatch * step.num_buckets if every_backward else 0
    actions = []
    for bucket in launch_order:
        if step.sync == StepSync.GRADIENTS:
            actions.append(Action(Verb.REDUCE, 0, first + bucket))
        if is_last and step.update == "in_backward":
            actions += updates[bucket]
    return actions


def _measures(step: DataStepSpec) -> list[Action]:
    wanted = {USED_PARAMS: step.allows_unused, GRAD_NORM: step.has_clip, TRUST_NORMS: step.has_trust_ratios}
    return [Action(Verb.MEASURE, 0, scalars) for scalars, is_wanted in wanted.items() if is_wanted]
