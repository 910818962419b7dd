"""Sent bytes: what a rank sends in a step, by axis.

Law: the bytes of an axis are those of the collectives and messages that its program and its segments have.
"""

from fourfold.plan.predict.action_costs import Job
from fourfold.plan.predict.edges import message_bytes
from fourfold.plan.predict.facts import Collective
from fourfold.plan.predict.stage_seconds import stage_segments
from fourfold.words.layout import collective_sent_bytes
from fourfold.words.mesh import AXES


def sent_bytes(job: Job) -> dict[str, float]:
    """By axis, on the place that sends most on it; local steps on average."""
    plan = job.blueprint.plan
    samples = float(sum(job.microbatch_sizes))
    by_stage = [_segment_bytes(job, stage, samples) for stage in range(plan.num_stages)]
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


def _segment_bytes(job: Job, stage: int, samples: float) -> dict[str, float]:
    plan = job.blueprint.plan
    segments = stage_segments(
        job.facts, job.stage_blocks[stage], is_first=stage == 0, is_last=stage == plan.num_stages - 1
    )
    collectives = [each for segment in segments for each in segment.collectives]
    sizes = {"tp": plan.tp, "sp": plan.sp}
    return {
        axis: sum(_sent(each, sizes[axis], samples, plan.recompute) for each in collectives if each.axis == axis)
        for axis in sizes
    }


def _sent(collective: Collective, size: int, samples: float, recompute: str) -> float:
    times = collective.forward + collective.backward + collective.repeats(recompute)
    return times * collective_sent_bytes(
        collective.change, whole_bytes=round(collective.whole_bytes * samples), size=size
    )
