"""The data axis: buckets, where their tensors rest, and the program of a step. No torch."""

from fourfold.plan.data.buckets import Bucket, ParamSpec, Slot, effective_bucket_bytes, make_buckets
from fourfold.plan.data.step_program import DataStepSpec, StepSync, lower_step
from fourfold.plan.data.zero import (
    NUM_GRAD_BUFFERS,
    RESTING_LAYOUTS,
    LayoutChanges,
    RestingLayouts,
    ShardGroups,
    grad_buffer_indices,
    layout_changes,
    step_sent_bytes,
)

__all__ = [
    "NUM_GRAD_BUFFERS",
    "RESTING_LAYOUTS",
    "Bucket",
    "DataStepSpec",
    "LayoutChanges",
    "ParamSpec",
    "RestingLayouts",
    "ShardGroups",
    "Slot",
    "StepSync",
    "effective_bucket_bytes",
    "grad_buffer_indices",
    "layout_changes",
    "lower_step",
    "make_buckets",
    "step_sent_bytes",
]
