"""Plan pages: a plan, a decision of the planner, and what if there were more devices, each as one HTML file.

unit  the time of a forward on one stage; a backward takes two, its halves one each, and messages take none
Law: a page has every number of the text, under the same names. The drawing of a schedule has the actions of the
programs that would run, at the times of the printed timeline.
"""

from collections.abc import Callable, Sequence
from html import escape

from fourfold.axes.pipeline.rules.spec import EQUAL_COSTS
from fourfold.plan.plan import Plan
from fourfold.plan.rank_program import lane_of
from fourfold.plan.simulate import TimedAction, Timeline, makespan, simulate
from fourfold.planner.plan_curves import DEVICES, Curve, Point, curve_rows
from fourfold.planner.plan_text import (
    UNKNOWN,
    TimeUnit,
    bubble_fraction,
    compared,
    equal_words,
    fewer_devices,
    host_lines,
    memory_rows,
    nearest_changes,
    plan_words,
    ranking_notes,
    ranking_rows,
    reasons,
    refusal,
    term_rows,
    unit_of,
    used_terms,
)
from fourfold.planner.predict.prediction import Prediction
from fourfold.planner.predict.workload import Workload
from fourfold.planner.search.decision import Decision, Refused
from fourfold.report.html_page import render_card, render_page, render_row, render_table, render_text
from fourfold.report.step_timeline import timeline_lanes, timeline_legend
from fourfold.report.svg import Block, Lane, Series, lane_chart, line_figure
from fourfold.words.mesh import AXES, Mesh
from fourfold.words.program import Action, Verb
from fourfold.words.trace_events import COMPUTE_LANE
from fourfold.words.units import format_bytes, format_percent, format_si, format_step_seconds

# ---- fourfold show ---------------------------------------------------------------------------------------------------


STYLES = {
    Verb.FORWARD: ("forward", "forward"),
    Verb.BACKWARD: ("backward", "backward"),
    Verb.BACKWARD_INPUT: ("backward", "backward of inputs"),
    Verb.BACKWARD_WEIGHT: ("update", "backward of weights"),
}
# In the drawing's units: the name of an action fits into a unit of time.
UNIT_WIDTH, MARGINS, MIN_WIDTH = 36, 166, 1120


def render_plan(plan: Plan, text: str) -> str:
    """The page of a plan. `text`: what `fourfold show` prints."""
    title = " × ".join(f"{axis} {plan.mesh.axis_size(axis)}" for axis in AXES if plan.mesh.axis_size(axis) > 1)
    printed = f"<h2>What each rank does, sends and stores</h2><pre>{render_text(text)}</pre>"
    cards = [render_card(_timeline_card(plan), wide=True) if plan.pp > 1 else "", render_card(printed, wide=True)]
    body = f'<div class="cards">{"".join(cards)}</div>'
    return render_page(title or "one rank", "what fourfold show prints of a plan", body)


def schedule_timeline(lists: Sequence[Sequence[Action]]) -> Timeline:
    """When each place on the pipeline axis runs its actions, in units."""
    program = {index: tuple(actions) for index, actions in enumerate(lists)}
    return simulate(program, lambda _, action: EQUAL_COSTS.of(action), mesh=Mesh(pp=len(lists)))


def _timeline_card(plan: Plan) -> str:
    timeline = schedule_timeline(plan.undrained_lists)
    rows = [
        Lane(f"pp {index}", [Block(str(t.action), t.start, t.end, STYLES[t.action.verb][0]) for t in times])
        for index, times in timeline.items()
    ]
    verbs = {timed.action.verb for times in timeline.values() for timed in times}
    keys = [f'<span class="key {style}"></span>{name}' for verb, (style, name) in STYLES.items() if verb in verbs]
    end = makespan(timeline)
    width = max(MIN_WIDTH, MARGINS + UNIT_WIDTH * round(end))
    drawing = lane_chart(
        rows, end=end, title="Timeline", x="time, in forwards of a stage", width=width, unit="forwards", decimals=0
    )
    several = "A few steps in a row. " if plan.is_asynchronous else ""
    note = f"F1.0: the forward of microbatch 0 on stage 1. {several}With equal stages; messages take no time."
    return (
        f"<h2>Timeline of {escape(plan.schedule)}</h2>"
        f'<div class="scroll"><div style="min-width: {width}px">{drawing}</div></div>'
        f'<p class="note">{"".join(keys)} · {escape(note)}</p>'
    )


# ---- fourfold plan ---------------------------------------------------------------------------------------------------


TERM_STYLES = {
    "compute": "forward",
    "recompute": "backward",
    "tensor": "unshard",
    "context": "data",
    "bubble": "wait",
    "exposed": "reduce",
    "update": "update",
    "overhead": "measure",
}
MAX_BLOCKS = 3000  # of a drawn step
MAX_COLUMNS = 4  # of the table of memory
GIB = 2**30


def render_decision(decision: Decision, workload: Workload) -> str:
    """The page of `fourfold plan`."""
    cards = [
        render_card(_ranking_card(decision, workload), wide=True),
        render_card(_reasons_card(decision), wide=True),
        render_card(_terms_card(decision), wide=True),
        render_card(_front_card(decision, workload)),
        render_card(_memory_card(decision.answer, workload)),
        render_card(_refused_card(decision.refused), wide=True),
        render_card(_step_card(decision.answer), wide=True),
    ]
    body = f'{_tiles(decision.answer, workload)}<div class="cards">{"".join(cards)}</div>'
    fewer = [text] if (text := fewer_devices(decision)) else []
    considered = f"{decision.num_considered:,} plans considered"
    under = " · ".join([*fewer, workload.machine, considered, equal_words(decision), *host_lines(decision)])
    return render_page(f"Plan of {workload.task}", under, body)


def _tiles(best: Prediction, workload: Workload) -> str:
    share = workload.share_of_peak(best)
    tiles = [
        (format_step_seconds(best.seconds), "a step"),
        (format_si(workload.units_per_second(best)), f"{workload.unit} a second"),
        (UNKNOWN if share is None else format_percent(share), "of the peak of all devices"),
        (format_bytes(best.memory.total), "memory of a rank"),
        (format_percent(bubble_fraction(best)), "of the step in the bubble"),
        (f"{best.plan.mesh.size:,}", "devices"),
    ]
    cells = (f"<div><b>{render_text(value)}</b><span>{render_text(name)}</span></div>" for value, name in tiles)
    return f'<div class="figures" style="--columns: {len(tiles)}">{"".join(cells)}</div>'


def _table(rows: Sequence[Sequence[str]], style: str) -> str:
    head, *body = rows
    return render_table(head, [render_row(row) for row in body], style=style)


def _ranking_card(decision: Decision, workload: Workload) -> str:
    note = ". ".join([*ranking_notes(decision), ""]).strip()
    table = _table(ranking_rows(decision, workload), "plans")
    return f'<h2>The best plans</h2>{table}<p class="note">{render_text(note)}</p>'


def _reasons_card(decision: Decision) -> str:
    rows = "".join(
        f"<tr><th>{render_text(name)}</th><td>{render_text(text)}</td></tr>" for name, text in reasons(decision)
    )
    return f'<h2>Why the first</h2><table class="words reasons">{rows}</table>'


def _terms_card(decision: Decision) -> str:
    plans = compared(decision)
    longest = max(each.seconds for each in plans.values())
    unit = unit_of(longest)
    lanes = [Lane(name, _term_blocks(each, unit)) for name, each in plans.items()]
    drawing = _time_chart(lanes, longest, unit, title="Where a step goes")
    keys = "".join(f'<span class="key {TERM_STYLES[name]}"></span>{name}' for name in used_terms(list(plans.values())))
    table = _table(term_rows(plans), "memory")
    return f'<h2>Where a step goes</h2><div class="scroll">{drawing}</div><p class="note">{keys}</p>{table}'


def _time_chart(lanes: Sequence[Lane], longest: float, unit: TimeUnit, *, title: str) -> str:
    end, x = longest * unit.factor, f"time, {unit.text}"
    return lane_chart(lanes, end=end, title=title, x=x, unit=unit.text, decimals=unit.digits)


def _term_blocks(prediction: Prediction, unit: TimeUnit) -> list[Block]:
    blocks, at = [], 0.0
    for name, seconds in prediction.terms._asdict().items():
        if seconds > 0:
            blocks.append(Block(name, at * unit.factor, (at + seconds) * unit.factor, TERM_STYLES[name]))
            at += seconds
    return blocks


def _front_card(decision: Decision, workload: Workload) -> str:
    fitting = [each for each in decision.baselines.values() if not isinstance(each, Refused)]
    unit = unit_of(max(each.seconds for each in [*decision.front, *fitting, decision.answer]))

    def points(predictions: Sequence[Prediction]) -> list[tuple[float, float]]:
        return sorted((each.memory.total / GIB, unit.factor * each.seconds) for each in predictions)

    series = [
        Series("no plan is both faster and smaller", points(decision.front), 0, "linked"),
        Series("baselines", points(fitting), 1, "dots"),
        Series("the first", points([decision.answer]), 2, "dots"),
    ]
    limit = workload.memory_bytes
    if limit is not None and limit / GIB < 4 * max(x for x, _ in series[0].points or [(0.0, 0.0)]):
        series.append(Series("memory of a device", [(limit / GIB, 0.0)], 0, "rule"))
    drawing = line_figure(
        series, x="memory of a rank, GiB", y=f"step, {unit.text}", title="Time against memory", from_zero=True
    )
    rows = "".join(
        render_row([format_bytes(each.memory.total), format_step_seconds(each.seconds), plan_words(each.plan)])
        for each in sorted(decision.front, key=lambda each: each.memory.total)
    )
    head = render_row(["memory", "step", "plan"], "th")
    table = f'<div class="scroll"><table class="listed plans">{head}{rows}</table></div>'
    return (
        f"<h2>Time against memory</h2>{drawing}<details><summary>{len(decision.front)} plans</summary>{table}</details>"
    )


def _memory_card(best: Prediction, workload: Workload) -> str:
    rows = memory_rows(best, workload.memory_bytes, most_places=MAX_COLUMNS)
    columns = [tuple(row) for row in zip(*rows, strict=True)]
    shown, places = len(rows) - 1, len(best.by_stage)
    note = f"Of {places} places on the pipeline axis: the first, the one that holds most, the last."
    text = f'<p class="note">{note}</p>' if shown < places else ""
    return f"<h2>Memory of a rank</h2>{_table(columns, 'memory')}{text}"


def _refused_card(refused: Sequence[Refused]) -> str:
    if not refused:
        return ""
    rows = [("needs", "nearest change that fits", "plan")]
    rows += [(refusal(each), nearest_changes(each) or UNKNOWN, plan_words(each.plan)) for each in refused]
    return f"<h2>Refused</h2>{_table(rows, 'plans leads')}"


def _step_card(best: Prediction) -> str:
    """The simulated step of the first plan, a rank of each place on the pipeline axis."""
    if best.timeline is None:
        return ""
    timeline = best.timeline
    if sum(map(len, timeline.values())) > MAX_BLOCKS:
        timeline = {place: _computes(actions) for place, actions in timeline.items()}
    if sum(map(len, timeline.values())) > MAX_BLOCKS:
        return "<h2>One step, predicted</h2><p>It has too many actions to be drawn.</p>"
    lanes = timeline_lanes(timeline, name="rank" if best.plan.pp == 1 else "pp")
    drawing = lane_chart(lanes, end=1e3 * makespan(best.timeline), title="One step, predicted", x="time, ms")
    legend = timeline_legend(timeline, has_waits=False)
    return f'<h2>One step, predicted</h2><div class="scroll">{drawing}</div><p class="note">{legend}</p>'


def _computes(actions: Sequence[TimedAction]) -> tuple[TimedAction, ...]:
    """The actions of the compute lane."""
    return tuple(timed for timed in actions if lane_of(timed.action) == COMPUTE_LANE)


# ---- fourfold plan with lists ----------------------------------------------------------------------------------------


CURVE_AXES = {"memory": ("memory of a device, GiB", 2.0**30), "network": ("network, GB/s", 1e9)}


def render_curves(curves: Sequence[Curve], *, title: str, under: str) -> str:
    """The page of `fourfold plan` with lists."""
    unit = curves[0].unit
    cards = [render_card(_chart(curves, "Throughput", f"{unit} a second", lambda _, point: point.rate))]
    if curves[0].key == DEVICES:
        cards.append(render_card(_chart(curves, "Efficiency of a device", "of the first point, %", _percent_of_first)))
    else:
        cards.append(render_card(_chart(curves, "Step", "ms", lambda _, point: _milliseconds(point))))
    cards += [render_card(_table_card(curve), wide=True) for curve in curves]
    return render_page(title, under, f'<div class="cards">{"".join(cards)}</div>')


def _percent_of_first(curve: Curve, point: Point) -> float | None:
    efficiency = curve.efficiency(point)
    return None if efficiency is None else 100 * efficiency


def _milliseconds(point: Point) -> float | None:
    return None if point.best is None else 1e3 * point.best.seconds


def _chart(curves: Sequence[Curve], title: str, y: str, value: Callable[[Curve, Point], float | None]) -> str:
    key = curves[0].key
    name, factor = CURVE_AXES.get(key, (key, 1.0))
    series = []
    for number, curve in enumerate(curves):
        pairs = ((point.value, value(curve, point)) for point in curve.points)
        points = sorted((x / factor, y) for x, y in pairs if y is not None)
        series.append(Series(curve.label, points, number, "linked"))
    drawing = line_figure(series, x=name, y=y, title=title, from_zero=True, legend=True)
    return f"<h2>{title}</h2>{drawing or '<p>No plan fits.</p>'}"


def _table_card(curve: Curve) -> str:
    head, *rows = curve_rows(curve)
    table = render_table(head, [render_row(row) for row in rows], style="plans")
    return f"<h2>{render_text(curve.label[:1].upper() + curve.label[1:])}</h2>{table}"
