"""Sent bytes: what a rank sends in a step, by axis.

Law: the bytes of an axis are those of the collectives and messages that its program and its segments have.
"""

from collections.abc import Sequence

from fourfold.plan.plan import Plan
from fourfold.plan.predict.action_costs import Job
from fourfold.plan.predict.edges import message_bytes
from fourfold.plan.predict.facts import Collective, SegmentFacts
from fourfold.words.layout import collective_sent_bytes
from fourfold.words.mesh import AXES


def sent_bytes(job: Job) -> dict[str, float]:
    """By axis, on the place that sends most on it; local steps on average."""
    plan = job.blueprint.plan
    samples = float(sum(job.microbatch_sizes))
    by_stage = [_segment_bytes(plan, segments, samples) for segments in job.segments]
    sent: dict[str, float] = dict.fromkeys(AXES, 0.0)
    for axis in ("sp", "tp"):
        by_place = [sum(by_stage[stage][axis] for stage in range(p, plan.num_stages, plan.pp)) for p in range(plan.pp)]
        sent[axis] = max(by_place)
    if plan.mesh.dp * plan.mesh.sp > 1:
        sent["dp"] = job.blueprint.sent_bytes / plan.sync_interval
    if plan.pp > 1:
        each = message_bytes(plan, job.facts, 1.0)
        # A place in the middle sends forward and back; of two places, each sends in one direction only.
        crossings = plan.interleave * (each.both if plan.pp > 2 or plan.interleave > 1 else max(each))
        sent["pp"] = samples * crossings
    return sent


def _segment_bytes(plan: Plan, segments: Sequence[SegmentFacts], samples: float) -> dict[str, float]:
    """By axis inside of segments, what a rank sends for one stage."""
    collectives = [each for segment in segments for each in segment.collectives]
    sizes = {"tp": plan.tp, "sp": plan.sp}
    return {
        axis: sum(_sent(each, size, samples, plan.recompute) for each in collectives if each.axis == axis)
        for axis, size in sizes.items()
    }


def _sent(collective: Collective, size: int, samples: float, recompute: str) -> float:
    times = collective.forward + collective.backward + collective.repeats(recompute)
    return times * collective_sent_bytes(
        collective.change, whole_bytes=round(collective.whole_bytes * samples), size=size
    )
