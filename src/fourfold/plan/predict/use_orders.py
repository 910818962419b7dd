"""Use orders: in which order forward and backward gather sharded buckets, as the first step of a run learns it.

first use  of a bucket: in the first segment of its stage that has one of its parameters; in backward, in the last one
Law: a bucket with parameters of many blocks, as norms and biases have, is gathered when the first of these is used.
"""

import sys
from collections.abc import Mapping, Sequence

from fourfold.plan.data.step_program import UseOrders
from fourfold.plan.data.zero import layout_changes
from fourfold.plan.lowering import Blueprint, DataGroup
from fourfold.plan.predict.facts import SegmentFacts
from fourfold.plan.predict.stage_seconds import segments_by_parameter
from fourfold.plan.step_programs import StepRecord
from fourfold.words.layout import Change

EVERYWHERE = range(sys.maxsize)


def predicted_record(blueprint: Blueprint, segments: Sequence[Sequence[SegmentFacts]]) -> StepRecord:
    """What the first step learns of the gathers of weights. `segments`: by stage."""
    groups = {
        group.stage.stage: group
        for group in blueprint.groups
        if layout_changes(group.resting_layouts).before_use != Change.NONE
    }
    if not groups:
        return StepRecord()
    places = [segments_by_parameter(own) for own in segments]
    return StepRecord(use_orders={place: _use_orders(group, places) for place, group in groups.items()})


def _use_orders(group: DataGroup, places: Sequence[Mapping[str, range]]) -> UseOrders:
    """Buckets are numbered in reverse order of definition. A parameter that is in no segment is used all the time."""
    firsts, lasts = [], []
    for bucket, stage in zip(group.buckets, group.stage.bucket_stages, strict=True):
        uses = [places[stage].get(slot.name, EVERYWHERE) for slot in bucket.slots]
        firsts.append(min(each.start for each in uses))
        lasts.append(max(each.stop for each in uses))
    forward = tuple(sorted(range(len(firsts)), key=lambda bucket: (firsts[bucket], -bucket)))
    backward = tuple(sorted(range(len(firsts)), key=lambda bucket: (-lasts[bucket], bucket)))
    return UseOrders(forward, backward, forward)
