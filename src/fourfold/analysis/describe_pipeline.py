"""Describe the pipeline axis: which blocks each stage has, and the timeline of its schedule.

Law: the timeline is that of the programs that would run, with equal blocks: a backward takes as long as two forwards.
"""

from torch import nn

from fourfold.plan.lowering import Blueprint
from fourfold.plan.pipeline.bubble import simulated_bubble
from fourfold.plan.pipeline.in_flight import peak_in_flight
from fourfold.plan.pipeline.timeline_text import timeline_text
from fourfold.step.pipeline.chain import map_stages
from fourfold.words.text_table import align_columns
from fourfold.words.units import format_bytes, format_count

WIDTH = 112
CONV1D = "Conv1D"  # of transformers, a linear layer whose weight is [in, out]


def _deferred_notes(model: nn.Module, blueprint: Blueprint, num_deferred: int) -> list[str]:
    """Which part of the weights' gradients W makes, and what it costs."""
    weights = {id(m.weight) for m in model.modules() if hasattr(m, "weight") and _has_product(m)}
    trained = [p for p in model.parameters() if p.requires_grad]
    share = sum(p.numel() for p in trained if id(p) in weights) / max(1, sum(p.numel() for p in trained))
    notes = [
        f"W: the gradients of {share:.0%} of the parameters, those of linear layers; I makes the others",
        f"between I and W: {num_deferred} microbatches at most, which keep the gradients of linear layers' outputs too",
    ]
    if blueprint.step_spec(blueprint.groups[0]).has_clip:
        notes.append("clip and loss scale: all stages wait for the norm before their updates, so the bubble is longer")
    return notes


def _has_product(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == CONV1D


def format_pipeline(model: nn.Module, blueprint: Blueprint) -> str:
    """The stages of a model, and the timeline of a step."""
    plan = blueprint.plan
    lists, stages = plan.compute_lists, map_stages(model, plan.stage_spec)
    peaks = [peak_in_flight(actions) for actions in lists]
    rows = [("stage", "ranks", "blocks", "parameters", "weights", "in flight")]
    for stage, blocks in enumerate(stages.blocks):
        specs = [spec for spec in blueprint.specs if spec.stage == stage]
        names = stages.chain.blocks
        shown = names[blocks.start] + (f" to {names[blocks.stop - 1].rpartition('.')[2]}" if len(blocks) > 1 else "")
        rows.append(
            (
                str(stage),
                f"pp {stage % plan.pp}",
                shown,
                format_count(sum(spec.num_elements for spec in specs)),
                format_bytes(sum(spec.num_bytes for spec in specs)),
                str(peaks[stage % plan.pp].by_stage[stage]),
            )
        )
    head = f"pipeline   {plan.schedule}, {plan.microbatches} microbatches; bubble {simulated_bubble(lists):.0%}"
    lines = [*align_columns(rows, "><<>>>"), "", *timeline_text(lists, width=WIDTH).splitlines()]
    notes = ["F forward, B backward of a microbatch; a row for each place on the pipeline axis; · waits"]
    notes.append("in flight: microbatches whose activations a stage holds at a time, at most")
    if plan.divides_backward:
        notes[0] = "F forward; I backward of inputs, W of weights; a row for each place on the pipeline axis; · waits"
        notes += _deferred_notes(model, blueprint, max(peak.deferred for peak in peaks))
    return "\n".join([head, *(f"  {line}".rstrip() for line in [*lines, *notes])])
