"""Step timeline: one step of a run, drawn as measured, as simulated at the measured costs, and as predicted.

Law: the timelines of a drawing share one time axis, which starts where the first rank asks for its batch, else at the
first action of the step; the legend names exactly what is drawn. A table joins two timelines by the name of the action,
and says by how much each is off. Measured and simulated times join by (rank, action).
"""

import statistics
from collections.abc import Sequence

from fourfold.plan.rank_program import SENDS, lane_of
from fourfold.plan.simulate import TimedAction, Timeline, makespan
from fourfold.planner.predict.prediction import (
    ActionDifference,
    RecordedPrediction,
    by_category,
    compare_prediction,
    timeline_by_rank,
)
from fourfold.report.document import Block, Card, Part, bars, card, fold, lanes, note, table, text
from fourfold.trace.cost import measure_costs
from fourfold.trace.step_comparison import (
    Difference,
    compare_timelines,
    measured_seconds,
    measured_timeline,
    median_step,
    simulated_seconds,
    simulated_timeline,
)
from fourfold.trace.trace_file import DATA_SPAN, Trace, is_action, merged_waits
from fourfold.trace.utilization import (
    AVERAGE_TIME,
    BACKGROUND_TIMES,
    CATEGORIES,
    COMPUTE_CATEGORIES,
    DATA_TIME,
    GATHER_TIME,
    OTHER_TIME,
    REDUCE_TIME,
    UNSHARD_TIME,
    WAITING_TIME,
    seconds_by_category,
)
from fourfold.words.program import Verb
from fourfold.words.trace_events import COMPUTE_LANE, DATA_LANE, LANES, READY_EVENT, REDUCE_LANE
from fourfold.words.units import format_step_seconds

# ---- measured and simulated ------------------------------------------------------------------------------------------


VERB_STYLES = {
    **COMPUTE_CATEGORIES,
    **dict.fromkeys((Verb.REDUCE, Verb.PUSH, Verb.PULL, Verb.TIE, Verb.TIE_GRADIENT, *SENDS), "reduce"),
    # One colour for all-gathers of weights: no program has both kinds.
    **dict.fromkeys((Verb.UNSHARD, Verb.GATHER), "unshard"),
}
BAR_STYLES = {DATA_TIME: "data", WAITING_TIME: "wait", OTHER_TIME: "edge"}
BAR_STYLES |= dict.fromkeys((*BACKGROUND_TIMES, AVERAGE_TIME), "reduce")
BAR_STYLES |= dict.fromkeys((UNSHARD_TIME, GATHER_TIME), "unshard")
OVERLAPS = {
    REDUCE_TIME: "reductions, which run during backward",
    GATHER_TIME: "gathers, which overlap with updates",
    UNSHARD_TIME: "unshards, which run during forward and backward",
}
MAX_OPEN_ROWS = 24  # a longer table is folded away
COLUMNS = ("measured, ms", "simulated, ms", "difference, ms", "ends, measured", "ends, simulated", "difference, ms")


def action_card(trace: Trace) -> Card:
    """The card with the time per kind of action, as bars."""
    seconds_by_kind = {name: seconds for name, seconds in seconds_by_category(trace).items() if seconds > 0}
    total = sum(seconds for name, seconds in seconds_by_kind.items() if name not in BACKGROUND_TIMES) or 1.0
    rows = [
        (name, seconds * 1e3, f"{seconds * 1e3:.2f} ms · {100 * seconds / total:.1f} %", BAR_STYLES.get(name, name))
        for name, seconds in seconds_by_kind.items()
    ]
    means = f"Means over {_count(len(trace.steps), 'sampled step')} and {_count(len(trace.ranks), 'rank')}."
    overlaps = ", ".join(words for name, words in OVERLAPS.items() if name in seconds_by_kind)
    under = f"{means} Not added to the step's time: {overlaps}." if overlaps else means
    return card("Time by action", bars(rows, title="Time by action"), note(under))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def step_card(trace: Trace, *, is_asynchronous: bool = False) -> Card:
    """The card with the median step: all ranks measured and simulated, and the difference per action.

    A step of an asynchronous schedule is not simulated: what its backwards wait for has been sent in other steps.
    """
    step = median_step(trace)
    measured, lead = measured_timeline(trace, step), _lead_seconds(trace, step)
    rows = _measured_lanes(trace, step, measured, lead)
    has_data = any(event.lane == DATA_LANE for event in trace.events)
    if is_asynchronous:
        end = (lead + makespan(measured)) * 1e3
        said = (
            f"Step {step}: {measured_seconds(trace, step) * 1e3:.2f} ms from its first action to its last. "
            "Its backwards are of microbatches of earlier steps, and stages are in it at different times."
        )
        drawing = lanes(rows, end=end, title=f"Step {step}")
        return card("One step", text(said), drawing, note("", timeline_keys(measured, has_data=has_data)), wide=True)
    costs = measure_costs(trace)
    simulated = simulated_timeline(trace, costs, step)
    both = measured_seconds(trace, step), simulated_seconds(simulated, costs)
    rows |= {"": (), **timeline_lanes(simulated, lead)}
    end = (lead + max(makespan(measured), makespan(simulated))) * 1e3
    said = (
        f"Step {step}: measured {both[0] * 1e3:.2f} ms, simulated {both[1] * 1e3:.2f} ms "
        f"({_signed(100 * (both[1] / (both[0] or 1.0) - 1), 1)} %). The simulation runs the same program at the median "
        f"cost of each action over {len(trace.steps)} sampled steps, without waits."
    )
    return card(
        "One step, measured and simulated",
        text(said),
        lanes(rows, end=end, title=f"Step {step}, measured and simulated"),
        note(
            f"a line on the reduce lane: a bucket is {READY_EVENT}",
            timeline_keys(measured, simulated, has_data=has_data),
        ),
        _difference_table(compare_timelines(trace, step, simulated), both),
        wide=True,
    )


def timeline_keys(*timelines: Timeline, has_data: bool = False, has_waits: bool = True) -> list[tuple[str, str]]:
    """The categories of the actions drawn, each with its colour, waiting, and the waits for data, if any."""
    drawn = {timed.action.verb for each in timelines for actions in each.values() for timed in actions}
    keys = {word: VERB_STYLES[verb] for verb, word in CATEGORIES.items() if verb in drawn}
    keys |= {WAITING_TIME: "wait"} if has_waits else {}
    keys |= {DATA_TIME: "data"} if has_data else {}
    return [*keys.items()]


def _first_action(trace: Trace, step: int) -> float:
    return min(event.start for event in trace.events if event.step == step and is_action(event.name))


def _lead_seconds(trace: Trace, step: int) -> float:
    """How long before a step's first action the first rank asked for its batch."""
    asked = (event.start for event in trace.events if event.step == step and event.lane == DATA_LANE)
    first = _first_action(trace, step)
    return max(0.0, first - min(asked, default=first))


def _measured_lanes(trace: Trace, step: int, measured: Timeline, lead: float) -> dict[str, Sequence[Block]]:
    # `measured` starts at the step's first action, the trace at its own first event.
    zero = _first_action(trace, step) - lead
    result: dict[str, Sequence[Block]] = {}
    for rank in trace.ranks:
        events = trace.events_of(step=step, rank=rank)
        others = {
            COMPUTE_LANE: [("waiting", e.start, e.stop, "wait") for e in merged_waits(events) if e.start >= zero],
            REDUCE_LANE: [(e.name, e.start, e.start, "ink") for e in events if e.name.endswith(f" {READY_EVENT}")],
            DATA_LANE: [(DATA_SPAN, e.start, e.stop, "data") for e in events if e.lane == DATA_LANE],
        }
        for name in LANES:
            blocks = _blocks(measured[rank], name, lead)
            for text_of, start, stop, style in others.get(name, ()):
                blocks.append(Block(text_of, (start - zero) * 1e3, (stop - zero) * 1e3, style))
            if blocks:
                result[f"rank {rank} {name}"] = blocks
    return result


def timeline_lanes(timeline: Timeline, lead: float = 0.0, *, name: str = "simulated") -> dict[str, Sequence[Block]]:
    """The lanes of a simulated step, which begins `lead` seconds after the start of the axis."""
    return {
        f"{name} {rank} {lane}": blocks
        for rank, actions in timeline.items()
        for lane in LANES
        if (blocks := _blocks([timed for timed in actions if timed.end > timed.start], lane, lead))
    }


def _blocks(actions: Sequence[TimedAction], name: str, lead: float) -> list[Block]:
    return [
        Block(str(timed.action), (lead + timed.start) * 1e3, (lead + timed.end) * 1e3, VERB_STYLES[timed.action.verb])
        for timed in actions
        if lane_of(timed.action) == name
    ]


def _difference_table(rows: Sequence[Difference], both: tuple[float, float]) -> Part:
    """`both`: how long the step takes, measured and simulated."""
    found = [
        (f"rank {d.rank} {d.action}", *_compared(d.measured, d.simulated), *_compared(d.measured_end, d.simulated_end))
        for d in rows
    ]
    found.append(("step", *_compared(*both), *_compared(*both)))
    shown = table(("action", *COLUMNS), found, style="compared", total=True)
    return fold("Difference per action", shown, opened=len(rows) <= MAX_OPEN_ROWS)


def _compared(one: float, other: float) -> tuple[str, str, str]:
    """Two times and how much longer the second is, in milliseconds."""
    return f"{one * 1e3:.3f}", f"{other * 1e3:.3f}", _signed((other - one) * 1e3)


def _signed(value: float, digits: int = 3) -> str:
    """A difference with its sign: +0.012, −1.5."""
    return f"{value:+.{digits}f}".replace("-", "−")


# ---- predicted and measured ------------------------------------------------------------------------------------------


def prediction_card(recorded: RecordedPrediction | None, trace: Trace | None, seconds: Sequence[float]) -> Card | None:
    """The card; None without a prediction. `seconds`: of the steps, as the log has them."""
    if recorded is None:
        return None
    said = f"Predicted {format_step_seconds(recorded.prediction.seconds)} a step with {recorded.made_with}"
    if len(seconds) > 1:
        measured = statistics.median(seconds[1:])
        off = _signed(100 * (recorded.prediction.seconds / measured - 1), 1)
        said += f"; measured {format_step_seconds(measured)}, the median of {len(seconds) - 1:,} steps: {off} %"
    parts = []
    if trace is not None and recorded.prediction.timeline is not None:
        parts = [*_drawing(recorded, trace), *_tables(compare_prediction(trace, recorded.prediction))]
    return card("One step, predicted and measured", text(f"{said}."), *parts, wide=True)


def _drawing(recorded: RecordedPrediction, trace: Trace) -> list[Part | None]:
    predicted = timeline_by_rank(recorded.prediction)
    everything = measured_timeline(trace, median_step(trace))
    measured = {rank: everything[rank] for rank in predicted if rank in everything}
    rows = {**timeline_lanes(predicted, name="predicted"), "": (), **timeline_lanes(measured, name="measured")}
    end = 1e3 * max(makespan(predicted), makespan(measured))
    under = (
        "The first rank of each place on the pipeline axis. Measured: the sampled step of median length, with waits."
    )
    return [
        lanes(rows, end=end, title="One step, predicted and measured"),
        note(under, timeline_keys(predicted, measured, has_waits=False)),
    ]


def _tables(rows: Sequence[ActionDifference]) -> list[Part]:
    """Of each kind of action, and action by action; the difference is predicted less measured."""

    def shown(head: str, pairs: Sequence[tuple[str, float, float]]) -> Part:
        columns = (head, "predicted, ms", "measured, ms", "difference, ms")
        cells = []
        for name, predicted, measured in pairs:
            one, other, difference = _compared(measured, predicted)
            cells.append((name, other, one, difference))
        return table(columns, cells, style="compared")

    kinds = [(each.category, each.predicted, each.measured) for each in by_category(list(rows))]
    actions = [(f"rank {each.rank} {each.action}", each.predicted, each.measured) for each in rows]
    return [shown("of a step, without waits", kinds), fold("Action by action", shown("action", actions))]
