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
    return "\n".join([head, *(f"  {line}".rstrip() for line in [*lines, *notes])])
