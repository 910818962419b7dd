"""Describe the pipeline axis: which blocks each stage has, and the timeline of its schedule.

cell  the action that begins in a unit; `──` where it goes on, `·` where the index waits
unit  a forward of a stage
Law: the timeline is that of the programs that would run, with equal blocks: a backward takes as long as two forwards.
Law: a row's cells without marks are the index's compute actions in order.
"""

from collections.abc import Sequence

from torch import nn

from fourfold.axes.pipeline.rules.edges import EdgeSpec, edge_bytes, edge_note
from fourfold.axes.pipeline.rules.in_flight import peak_in_flight
from fourfold.axes.pipeline.rules.schedules import num_stashed, simulated_bubble, staleness
from fourfold.axes.pipeline.rules.spec import EQUAL_COSTS, owner_of
from fourfold.axes.pipeline.work.chain import map_stages
from fourfold.plan.lowering import Blueprint
from fourfold.plan.plan import NUM_SHOWN_BATCHES, Plan
from fourfold.plan.precision import compute_specs
from fourfold.plan.simulate import TimedAction, simulate
from fourfold.words.mesh import Mesh
from fourfold.words.program import Action
from fourfold.words.terminal_text import INDENT, table_lines, terminal_width
from fourfold.words.units import format_bytes, format_count

# ---- timeline ------------------------------------------------------------------------------------------------------

GOES_ON, WAITS, MORE = "─", "·", "…"


def timeline_text(lists: Sequence[Sequence[Action]], *, width: int | None = None) -> str:
    """A line per index: `0  F0 F1 ·  ·  B0 ── B1 ──`. With several stages on an index, an action names its stage:
    `F4.1` is the forward of microbatch 1 on stage 4.

    `lists`: with or without messages, which take no time. `width`: of a line, in characters; what is longer is cut.
    """
    program = {index: tuple(actions) for index, actions in enumerate(lists)}
    timeline = simulate(program, lambda _, action: EQUAL_COSTS.of(action), mesh=Mesh(pp=len(lists)))
    has_stages = any(action.stage >= len(lists) for actions in lists for action in actions)
    rows = [
        _cells([timed for timed in times if EQUAL_COSTS.of(timed.action)], has_stages) for times in timeline.values()
    ]
    cell_width = max((len(cell) for row in rows for cell in row), default=1)
    head_width = len(str(len(rows) - 1))
    return "\n".join(_line(f"{index:>{head_width}}", row, cell_width, width) for index, row in enumerate(rows))


def _cells(times: Sequence[TimedAction], has_stages: bool) -> list[str]:
    """What an index does in each unit, up to the end of its last action."""
    row: list[str] = []
    for action, start, end in times:
        first, stop = round(start), round(end)
        row += [WAITS] * (first - len(row))
        name = str(action) if has_stages else f"{action.verb.value}{action.index}"
        row += [name, *[GOES_ON] * (stop - first - 1)]
    return row


def _line(head: str, row: Sequence[str], cell_width: int, width: int | None) -> str:
    cells = [cell * cell_width if cell == GOES_ON else cell.ljust(cell_width) for cell in row]
    room = len(cells) if width is None else max(0, (width - len(head) - 1) // (cell_width + 1))
    if len(cells) > room:
        cells = [*cells[: max(0, room - 1)], MORE]
    return f"{head}  {' '.join(cells)}".rstrip()


# ---- description ---------------------------------------------------------------------------------------------------


WIDTH = 112
ROW = 1024  # elements: the row by which bytes are shown
CONV1D = "Conv1D"  # of transformers, a linear layer whose weight is [in, out]


def _deferred_notes(model: nn.Module, num_deferred: int) -> list[str]:
    """Which part of the weights' gradients W makes, and what it costs."""
    products = (m for m in model.modules() if isinstance(m, nn.Linear) or type(m).__name__ == CONV1D)
    weights = {id(m.weight) for m in products if hasattr(m, "weight")}
    trained = [p for p in model.parameters() if p.requires_grad]
    share = sum(p.numel() for p in trained if id(p) in weights) / max(1, sum(p.numel() for p in trained))
    return [
        f"W: the gradients of {share:.0%} of the parameters, those of linear layers; I makes the others",
        f"between I and W: {num_deferred} microbatches at most, which keep the gradients of linear layers' outputs too",
    ]


def _norm_notes(blueprint: Blueprint) -> list[str]:
    """What a sum over all stages before their updates costs a schedule whose stages end one after the other."""
    lists = blueprint.plan.undrained_lists
    alone, together = (f"{simulated_bubble(lists, ends_together=each):.0%}" for each in (False, True))
    if alone == together:
        return []
    if _has_norm(blueprint):
        return [f"clip or fp16: all stages wait for one sum before their updates; without it the bubble is {alone}"]
    return [f"with clip, fp16 or skip_nan, all stages would wait for one sum before their updates: bubble {together}"]


def _has_norm(blueprint: Blueprint) -> bool:
    return blueprint.step_spec(blueprint.groups[0]).has_clip


def _stale_notes(blueprint: Blueprint) -> list[str]:
    """How old the weights are that batches use, and what keeping them costs."""
    plan = blueprint.plan
    spec, stages = plan.pipeline_spec, range(plan.pp)
    missed = ", ".join(str(staleness(plan.schedule, spec, stage)) for stage in stages)
    versions = ", ".join(str(num_stashed(plan.schedule, spec, stage)) for stage in stages)
    return [
        f"{NUM_SHOWN_BATCHES} batches in a row, then a drain; a stage updates after the last B of a batch",
        f"staleness: a batch uses weights that miss {missed} updates, by stage; training differs from 1f1b",
        f"stashed: {versions} versions of the weights, by stage",
    ]


def format_pipeline(model: nn.Module, blueprint: Blueprint) -> str:
    """The stages of a model, and the timeline of a step."""
    plan = blueprint.plan
    lists, stages = plan.undrained_lists, map_stages(model, plan.stage_spec)
    peaks = [peak_in_flight(actions) for actions in lists]
    rows = [("stage", "ranks", "blocks", "parameters", "weights", "in flight")]
    for stage, blocks in enumerate(stages.blocks):
        specs = [spec for spec in blueprint.specs if spec.stage == stage]
        names = stages.chain.blocks
        shown = names[blocks.start] + (f" to {names[blocks.stop - 1].rpartition('.')[2]}" if len(blocks) > 1 else "")
        rows.append(
            (
                str(stage),
                f"pp {owner_of(stage, plan.pp)}",
                shown,
                format_count(sum(spec.num_elements for spec in specs)),
                format_bytes(sum(spec.num_bytes for spec in specs)),
                str(peaks[owner_of(stage, plan.pp)].by_stage[stage]),
            )
        )
    bubble = "no bubble until it is drained"
    if not plan.is_asynchronous:
        bubble = f"bubble {simulated_bubble(lists, ends_together=_has_norm(blueprint)):.0%}"
    microbatches = "1 microbatch" if plan.microbatches == 1 else f"{plan.microbatches} microbatches"
    head = f"pipeline   {plan.schedule}, {microbatches}; {bubble}"
    lines = [
        *table_lines(rows, "><<>>>"),
        "",
        *timeline_text(lists, width=min(WIDTH, terminal_width() - INDENT)).splitlines(),
    ]
    notes = ["F forward, B backward of a microbatch; a row for each place on the pipeline axis; · waits"]
    notes.append("in flight: the most microbatches whose activations a stage holds at a time")
    if plan.divides_backward:
        notes[0] = "F forward; I backward of inputs, W of weights; a row for each place on the pipeline axis; · waits"
        notes += [*_deferred_notes(model, max(peak.deferred for peak in peaks)), *_norm_notes(blueprint)]
    if plan.is_asynchronous:
        notes += _stale_notes(blueprint)
    notes += _edge_lines(plan, max(each.element_bytes for each in compute_specs(blueprint.specs, plan.precision)))
    return "\n".join([head, *(f"  {line}".rstrip() for line in [*lines, *notes])])


def _edge_lines(plan: Plan, element_bytes: int) -> list[str]:
    """What compressed edges send, of rows without zeros, and what a user must know of them."""
    spec, note = plan.edge_spec, edge_note(plan.edge_spec)
    if note is None:
        return []
    dense = edge_bytes(EdgeSpec(), ROW, ROW, element_bytes)
    coded = edge_bytes(spec, ROW, ROW, element_bytes) if spec.codes((ROW, ROW), element_bytes, is_float=True) else dense
    sent = " and ".join(f"{part / ROW:,.0f} bytes {way}" for part, way in zip(coded, ("forward", "back"), strict=True))
    times = f"{dense.both / coded.both:.3g} times less than without"
    return [note, f"a row of {ROW:,} elements of {element_bytes} bytes is sent in {sent}, {times}"]
