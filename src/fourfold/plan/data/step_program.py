"""The step program of the data axis: what one data rank does in one step, as a list of actions.

round   the reductions after one backward; only where gradients rest split does a step have more than one
Law: every data rank has the same program, so all of them begin the same collectives in the same order.
"""

from typing import NamedTuple

from fourfold.plan.data.zero import RESTING_LAYOUTS, RestingLayouts, layout_changes
from fourfold.words.layout import Change
from fourfold.words.program import GRAD_NORM, LOSS, TRUST_NORMS, USED_PARAMS, Action, Verb


class DataStepSpec(NamedTuple):
    """What a data rank's step consists of; `order` is the launch order recorded in the first step.

    `trust`: norms of single parameters are wanted, and parameters are split among ranks.
    """

    microbatches: int
    num_buckets: int
    resting_layouts: RestingLayouts = RESTING_LAYOUTS[0]
    has_clip: bool = False
    allows_unused: bool = False
    update: str = "after"
    launch_order: tuple[int, ...] = ()
    has_trust_ratios: bool = False
    sync: str = "step"
    """"step": gradients are reduced. "apart": they stay with their rank. "meet": they do, and weights are averaged."""


def lower_step(step: DataStepSpec) -> tuple[Action, ...]:
    """A data rank's step: forwards and backwards, reductions in launch order, then the updates.

    Reductions stand behind the backward that completes them, and a runtime may begin each one while that backward
    goes on, as soon as it is permitted and in this order. Where gradients rest split there is a round of reductions
    after every backward; the reduction of bucket b in round r has the index r × num_buckets + b.

    Where ranks keep their gradients there are no reductions; where they meet, the difference a bucket has made is
    pushed behind its update, and the averages are pulled at the end.

    `update = "in_backward"` puts each update behind the bucket's last reduction, and it too may begin while backward
    goes on (Jiang et al., "Optimizer Fusion", 2021: backward fusion). `update = "in_forward"` puts the updates by the
    gradient of the step before in front of the first forward, what is used first at the head; each may be put off until
    that forward comes to its bucket (the same: forward fusion).
    """
    launch = step.launch_order or tuple(range(step.num_buckets))
    moments = layout_changes(step.resting_layouts)
    gathers = moments.after_update != Change.NONE
    update = [
        [Action(Verb.UPDATE, 0, bucket), *([Action(Verb.GATHER, 0, bucket)] if gathers else [])]
        for bucket in range(step.num_buckets)
    ]
    push = [[Action(Verb.PUSH, 0, b)] if step.sync == "meet" else [] for b in range(step.num_buckets)]
    actions: list[Action] = []
    if step.update == "in_forward":
        actions += [action for bucket in reversed(launch) for action in update[bucket]]
    for index in range(step.microbatches):
        last = index == step.microbatches - 1
        actions.append(Action(Verb.FORWARD, 0, index))
        if last:
            actions.append(Action(Verb.MEASURE, 0, LOSS))
        actions.append(Action(Verb.BACKWARD, 0, index))
        if last or moments.after_backward != Change.NONE:
            first = index * step.num_buckets if moments.after_backward != Change.NONE else 0
            for bucket in launch:
                if step.sync == "step":
                    actions.append(Action(Verb.REDUCE, 0, first + bucket))
                if last and step.update == "in_backward":
                    actions += update[bucket]
    if step.allows_unused:
        actions.append(Action(Verb.MEASURE, 0, USED_PARAMS))
    if step.has_clip:
        actions.append(Action(Verb.MEASURE, 0, GRAD_NORM))
    if step.has_trust_ratios:
        actions.append(Action(Verb.MEASURE, 0, TRUST_NORMS))
    if step.update == "after":
        actions += [action for bucket in launch for action in update[bucket] + push[bucket]]
    else:
        actions += [action for bucket in launch for action in push[bucket]]
    if step.sync == "meet":
        actions += [Action(Verb.PULL, 0, bucket) for bucket in launch]
    return tuple(actions)
