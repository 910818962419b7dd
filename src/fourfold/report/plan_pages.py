"""Plan pages: a plan, a decision of the planner, and what if there were more devices, each as one HTML file.

unit  the time of a forward on one stage; a backward takes two, its halves one each, and messages take none
Law: a page has every number of the text, under the same names. The drawing of a schedule has the actions of the
programs that would run, at the times of the printed timeline.
"""

from collections.abc import Callable, Sequence
from typing import Any

from fourfold.axes.pipeline.rules.spec import EQUAL_COSTS
from fourfold.plan.plan import Plan
from fourfold.plan.rank_program import lane_of
from fourfold.plan.simulate import TimedAction, Timeline, makespan, simulate
from fourfold.planner import plan_text
from fourfold.planner.plan_text import DEVICES, Curve, Point, curve_rows
from fourfold.planner.predict.facts import Workload
from fourfold.planner.predict.prediction import Prediction
from fourfold.planner.search.decision import Decision, Refused
from fourfold.report.document import (
    Block,
    Card,
    Part,
    Series,
    card,
    curves,
    document,
    fold,
    lanes,
    note,
    table,
    text,
)
from fourfold.report.step_timeline import timeline_keys, timeline_lanes
from fourfold.words.mesh import AXES, Mesh
from fourfold.words.program import Action, Verb
from fourfold.words.trace_events import COMPUTE_LANE
from fourfold.words.units import format_bytes, format_percent, format_si, format_step_seconds

# ---- fourfold show ---------------------------------------------------------------------------------------------------


STYLES = {
    Verb.FORWARD: ("forward", "forward"),
    Verb.BACKWARD: ("backward", "backward"),
    Verb.BACKWARD_INPUT: ("backward of inputs", "backward"),
    Verb.BACKWARD_WEIGHT: ("backward of weights", "update"),
}
# In the drawing's units: the name of an action fits into a unit of time.
UNIT_WIDTH, MARGINS, MIN_WIDTH = 36, 166, 1120


def describe_plan(plan: Plan, printed: str) -> dict[str, Any]:
    """The data of the page of a plan. `printed`: what `fourfold show` prints."""
    title = " × ".join(f"{axis} {plan.mesh.axis_size(axis)}" for axis in AXES if plan.mesh.axis_size(axis) > 1)
    does = card("What each rank does, sends and stores", {"kind": "printed", "text": printed}, wide=True)
    cards = [_timeline_card(plan) if plan.pp > 1 else None, does]
    return document(title or "one rank", "what fourfold show prints of a plan", cards)


def schedule_timeline(lists: Sequence[Sequence[Action]]) -> Timeline:
    """When each place on the pipeline axis runs its actions, in units."""
    program = {index: tuple(actions) for index, actions in enumerate(lists)}
    return simulate(program, lambda _, action: EQUAL_COSTS.of(action), mesh=Mesh(pp=len(lists)))


def _timeline_card(plan: Plan) -> Card:
    timeline = schedule_timeline(plan.undrained_lists)
    rows = {
        f"pp {index}": [Block(str(t.action), t.start, t.end, STYLES[t.action.verb][1]) for t in times]
        for index, times in timeline.items()
    }
    verbs = {timed.action.verb for times in timeline.values() for timed in times}
    end = makespan(timeline)
    width = max(MIN_WIDTH, MARGINS + UNIT_WIDTH * round(end))
    x = "time, in forwards of a stage"
    drawing = lanes(rows, end=end, title="Timeline", x=x, width=width, unit="forwards", decimals=0)
    several = "A few steps in a row. " if plan.is_asynchronous else ""
    under = f"F1.0: the forward of microbatch 0 on stage 1. {several}With equal stages; messages take no time."
    keys = [key for verb, key in STYLES.items() if verb in verbs]
    return card(f"Timeline of {plan.schedule}", drawing, note(under, keys), wide=True)


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


def describe_decision(decision: Decision, workload: Workload) -> dict[str, Any]:
    """The data of the page of `fourfold plan`."""
    under = ". ".join([*plan_text.ranking_notes(decision), ""]).strip()
    cards = [
        card("The best plans", _table(plan_text.ranking_rows(decision, workload)), note(under), wide=True),
        card("Why the first", table((), plan_text.reasons(decision), style="values"), wide=True),
        _terms_card(decision),
        _front_card(decision, workload),
        _memory_card(decision.answer, workload),
        _refused_card(decision.refused),
        _step_card(decision.answer),
    ]
    fewer = [words] if (words := plan_text.fewer_devices(decision)) else []
    considered = f"{decision.num_considered:,} plans considered"
    under = " · ".join(
        [*fewer, workload.machine, considered, plan_text.equal_words(decision), *plan_text.host_lines(decision)]
    )
    return document(f"Plan of {workload.task}", under, cards, figures=_tiles(decision.answer, workload))


def _tiles(best: Prediction, workload: Workload) -> list[tuple[str, str]]:
    share = workload.share_of_peak(best)
    return [
        (format_step_seconds(best.seconds), "a step"),
        (format_si(workload.units_per_second(best)), f"{workload.unit} a second"),
        (plan_text.UNKNOWN if share is None else format_percent(share), "of the peak of all devices"),
        (format_bytes(best.memory.total), "memory of a rank"),
        (format_percent(plan_text.bubble_fraction(best)), "of the step in the bubble"),
        (f"{best.plan.mesh.size:,}", "devices"),
    ]


def _table(rows: Sequence[Sequence[str]]) -> Part:
    head, *body = rows
    return table(head, body)


def _terms_card(decision: Decision) -> Card:
    plans = plan_text.compared(decision)
    longest = max(each.seconds for each in plans.values())
    unit = plan_text.unit_of(longest)
    rows = {name: _term_blocks(each, unit) for name, each in plans.items()}
    drawing = lanes(
        rows, end=longest * unit.factor, title="Where a step goes", x=f"time, {unit.text}", unit=unit.text,
        decimals=unit.digits,
    )  # fmt: skip
    keys = [(name, TERM_STYLES[name]) for name in plan_text.used_terms(list(plans.values()))]
    return card("Where a step goes", drawing, note("", keys), _table(plan_text.term_rows(plans)), wide=True)


def _term_blocks(prediction: Prediction, unit: plan_text.TimeUnit) -> list[Block]:
    blocks, at = [], 0.0
    for name, seconds in prediction.terms._asdict().items():
        if seconds > 0:
            blocks.append(Block(name, at * unit.factor, (at + seconds) * unit.factor, TERM_STYLES[name]))
            at += seconds
    return blocks


def _front_card(decision: Decision, workload: Workload) -> Card:
    fitting = [each for each in decision.baselines.values() if not isinstance(each, Refused)]
    unit = plan_text.unit_of(max(each.seconds for each in [*decision.front, *fitting, decision.answer]))

    def points(predictions: Sequence[Prediction]) -> list[tuple[float, float]]:
        return sorted((each.memory.total / GIB, unit.factor * each.seconds) for each in predictions)

    series = [
        Series("no plan is both faster and smaller", points(decision.front), 0, "linked"),
        Series("baselines", points(fitting), 1, "dots"),
        Series("the first", points([decision.answer]), 2, "dots"),
    ]
    limit = workload.memory_bytes
    if limit is not None and limit / GIB < 4 * max(x for x, _ in series[0].points or [(0.0, 0.0)]):
        series.append(Series("memory of a device", [(limit / GIB, 0.0)], kind="rule"))
    title, x = "Time against memory", "memory of a rank, GiB"
    rows = [
        (format_bytes(each.memory.total), format_step_seconds(each.seconds), plan_text.plan_words(each.plan))
        for each in sorted(decision.front, key=lambda each: each.memory.total)
    ]
    listed = fold(f"{len(rows)} plans", table(("memory", "step", "plan"), rows, style="compared"))
    return card(title, curves(series, x=x, y=f"step, {unit.text}", title=title, from_zero=True), listed)


def _memory_card(best: Prediction, workload: Workload) -> Card:
    rows = plan_text.memory_rows(best, workload.memory_bytes, most_places=MAX_COLUMNS)
    shown, places = len(rows) - 1, len(best.by_stage)
    under = f"Of {places} places on the pipeline axis: the first, the one that holds most, the last."
    columns = [tuple(row) for row in zip(*rows, strict=True)]
    return card("Memory of a rank", _table(columns), note(under if shown < places else ""))


def _refused_card(refused: Sequence[Refused]) -> Card | None:
    rows = [
        (plan_text.refusal(each), plan_text.nearest_changes(each) or plan_text.UNKNOWN, plan_text.plan_words(each.plan))
        for each in refused
    ]
    shown = table(("needs", "nearest change that fits", "plan"), rows)
    return card("Refused", shown, wide=True) if rows else None


def _step_card(best: Prediction) -> Card | None:
    """The simulated step of the first plan, a rank of each place on the pipeline axis."""
    if best.timeline is None:
        return None
    timeline, title = best.timeline, "One step, predicted"
    if sum(map(len, timeline.values())) > MAX_BLOCKS:
        timeline = {place: _computes(actions) for place, actions in timeline.items()}
    if sum(map(len, timeline.values())) > MAX_BLOCKS:
        return card(title, text("It has too many actions to be drawn."), wide=True)
    rows = timeline_lanes(timeline, name="rank" if best.plan.pp == 1 else "pp")
    drawing = lanes(rows, end=1e3 * makespan(best.timeline), title=title)
    return card(title, drawing, note("", timeline_keys(timeline, has_waits=False)), wide=True)


def _computes(actions: Sequence[TimedAction]) -> tuple[TimedAction, ...]:
    """The actions of the compute lane."""
    return tuple(timed for timed in actions if lane_of(timed.action) == COMPUTE_LANE)


# ---- fourfold plan with lists ----------------------------------------------------------------------------------------


CURVE_AXES = {"memory": ("memory of a device, GiB", 2.0**30), "network": ("network, GB/s", 1e9)}


def describe_curves(found: Sequence[Curve], *, title: str, under: str) -> dict[str, Any]:
    """The data of the page of `fourfold plan` with lists."""
    cards = [_chart(found, "Throughput", f"{found[0].unit} a second", lambda _, point: point.rate)]
    if found[0].key == DEVICES:
        cards.append(_chart(found, "Efficiency of a device", "of the first point, %", _percent_of_first))
    else:
        cards.append(_chart(found, "Step", "ms", lambda _, point: _milliseconds(point)))
    cards += [card(each.label[:1].upper() + each.label[1:], _table(curve_rows(each)), wide=True) for each in found]
    return document(title, under, cards)


def _percent_of_first(curve: Curve, point: Point) -> float | None:
    efficiency = curve.efficiency(point)
    return None if efficiency is None else 100 * efficiency


def _milliseconds(point: Point) -> float | None:
    return None if point.best is None else 1e3 * point.best.seconds


def _chart(found: Sequence[Curve], title: str, y: str, value: Callable[[Curve, Point], float | None]) -> Card:
    key = found[0].key
    name, factor = CURVE_AXES.get(key, (key, 1.0))
    series = []
    for number, curve in enumerate(found):
        pairs = ((point.value, value(curve, point)) for point in curve.points)
        points = sorted((x / factor, y) for x, y in pairs if y is not None)
        series.append(Series(curve.label, points, number, "linked"))
    drawing = curves(series, x=name, y=y, title=title, from_zero=True, legend=True)
    return card(title, drawing or text("No plan fits."))
