"""Place forms: what the data axis adds to the forwards and backwards of a place, in closed form.

extras  of each microbatch: waits for gathered weights, reductions after every backward, what messages slow down
tail    from the last backward on: reductions that nothing hides; then updates and gathers
Law: with one bucket, or with messages that are hidden as a whole, these are the simulated times.
"""

import math
from typing import NamedTuple

from fourfold.plan.plan import Plan
from fourfold.plan.predict.action_costs import slowed
from fourfold.plan.predict.bucket_table import Extras, PlaceData, Wait
from fourfold.plan.predict.stage_table import PlaceCompute

ROUNDING = 1e-9


class Tail(NamedTuple):
    """Seconds behind the last backward until the gradients of the first bucket are there, and those of all."""

    first: float
    all: float


def divides_backward(plan: Plan) -> bool:
    """As the plan's own property, but without making the lists of zero-bubble, which takes long."""
    return plan.pp > 1 and (plan.schedule == "zero-bubble" or (plan.schedule == "written" and plan.divides_backward))


def has_rounds(plan: Plan) -> bool:
    """Whether gradients are reduced after every backward."""
    return plan.zero >= 2 and plan.num_shards > 1


def extras(plan: Plan, compute: PlaceCompute, data: PlaceData, slowdown: float) -> Extras:
    """What a microbatch takes in addition, except for the reductions of the last backward."""
    if not (data.unshard.own or data.unshard.sent or has_rounds(plan)):
        return data.plain_extras
    forward, backward = compute.forward_seconds, compute.backward_seconds
    # All buckets of the first segment of a stage are waited for; then others come while those before them are used.
    own, sent = data.unshard.own, data.unshard.sent
    in_front = min(1.0, plan.interleave / max(1, min(data.num_buckets, compute.num_segments)))
    waits = [
        own + slowed(slowdown, sent, phase) + max(in_front * sent, sent - (1.0 - in_front) * phase)
        for phase in (forward, backward)
    ]
    if has_rounds(plan):
        waits[1] += data.reduce.own + slowed(slowdown, data.reduce.sent, (1.0 - in_front) * backward + forward)
    return Extras(waits[0], waits[1], data.gradients[1])


def tail(plan: Plan, compute: PlaceCompute, data: PlaceData, extra: Extras, slowdown: float) -> Tail:
    """The reductions that follow the last backward of a place."""
    if plan.sync == "local":
        return Tail(0.0, 0.0)
    # The last backward is that of the first stage; its buckets are ready one after the other.
    backward, share = compute.first_stage[divides_backward(plan)], 1.0 / plan.interleave
    num_segments = max(1.0, compute.num_segments // plan.interleave)
    window = backward * _ready(data.waits[0], num_segments)
    earliest = -math.inf
    if data.unshard.sent:  # gathers of the same phase go first
        earliest = data.unshard.sent - (compute.backward_seconds + extra.backward)
    own = 0.0 if has_rounds(plan) else data.reduce.own + slowed(slowdown, data.reduce.sent * share, window)
    if not data.reduce.sent:
        return Tail(own, own)
    late = max(each.sent * share - _ready(each, num_segments) * backward for each in data.waits)
    first = max(0.0, data.reduce.first - window, earliest + data.reduce.first)
    return Tail(own + first, own + max(late, earliest + data.reduce.sent))


def _ready(wait: Wait, num_segments: float) -> float:
    """The fraction of a backward that is left when a bucket is ready: whole segments."""
    return math.floor(wait.fraction_left * num_segments + ROUNDING) / num_segments


def update_seconds(plan: Plan, compute: PlaceCompute, data: PlaceData, reduced: Tail) -> float:
    """From the last backward to the end of the step: buckets are updated in turn, as their gradients come.

    New weights are gathered as they are updated; with local steps, changes are summed so, in some of the steps. Updates
    that stand in front of a forward let it begin while weights are gathered that it uses later.
    """
    (update, first, last), gather = data.updates, data.gather
    updated = max(reduced.first + update, reduced.all + last)
    if plan.sync == "local":
        pushed = max(updated + data.push.last, reduced.first + first + data.push.sent)
        averaged = pushed - updated + data.push.own + data.pull_seconds
        return updated + averaged / plan.sync_interval
    if plan.update == "in_forward":  # in the next step, when all gradients are there
        window = compute.forward_seconds / plan.interleave * (1.0 - 1.0 / max(1, data.num_buckets))
        gathered = first + max(gather.first, gather.sent - window) if gather.sent else 0.0
        return reduced.all + max(update, gathered) + gather.own
    gathered = max(updated + gather.last, reduced.first + first + gather.sent) if gather.sent else updated
    return gathered + gather.own
