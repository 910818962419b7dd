"""Prediction card: a step as it was predicted before the run, beside the step that was measured.

Law: both share one time axis; the table joins them by the name of the action, and says by how much each is off.
"""

import statistics
from collections.abc import Sequence
from html import escape

from fourfold.plan.predict.comparison import ActionDifference, by_category, compare_prediction, timeline_by_rank
from fourfold.plan.predict.prediction import RecordedPrediction
from fourfold.plan.simulate import makespan
from fourfold.plan.step_comparison import measured_timeline, median_step
from fourfold.plan.trace_file import Trace
from fourfold.report.html_table import render_text
from fourfold.report.step_timeline import signed, timeline_lanes, timeline_legend
from fourfold.report.svg import Lane, lane_chart
from fourfold.words.units import format_step_seconds


def prediction_card(recorded: RecordedPrediction | None, trace: Trace | None, seconds: Sequence[float]) -> str:
    """The card; "" without a prediction. `seconds`: of the steps, as the log has them."""
    if recorded is None:
        return ""
    text = f"Predicted {format_step_seconds(recorded.prediction.seconds)} a step with {recorded.made_with}"
    if len(seconds) > 1:
        measured = statistics.median(seconds[1:])
        off = signed(100 * (recorded.prediction.seconds / measured - 1), 1)
        text += f"; measured {format_step_seconds(measured)}, the median of {len(seconds) - 1:,} steps: {off} %"
    parts = [f"<h2>One step, predicted and measured</h2><p>{render_text(text)}.</p>"]
    if trace is not None and recorded.prediction.timeline is not None:
        parts += _drawing(recorded, trace)
        parts.append(_tables(compare_prediction(trace, recorded.prediction)))
    return "".join(parts)


def _drawing(recorded: RecordedPrediction, trace: Trace) -> list[str]:
    predicted = timeline_by_rank(recorded.prediction)
    everything = measured_timeline(trace, median_step(trace))
    measured = {rank: everything[rank] for rank in predicted if rank in everything}
    lanes = [
        *timeline_lanes(predicted, name="predicted"),
        Lane("", ()),
        *timeline_lanes(measured, name="measured"),
    ]
    end = 1e3 * max(makespan(predicted), makespan(measured))
    drawing = lane_chart(lanes, end=end, title="One step, predicted and measured", x="time, ms")
    legend = timeline_legend(predicted, measured, has_waits=False)
    note = "The first rank of each place on the pipeline axis. Measured: the sampled step of median length, with waits."
    return [f'<div class="scroll">{drawing}</div><p class="note">{legend} · {note}</p>']


def _tables(rows: Sequence[ActionDifference]) -> str:
    head = "<tr><th>{}</th><th>predicted, ms</th><th>measured, ms</th><th>difference, ms</th></tr>"
    kinds = "".join(_row(each.category, each.predicted, each.measured) for each in by_category(list(rows)))
    actions = "".join(_row(f"rank {each.rank}   {each.action}", each.predicted, each.measured) for each in rows)
    table = '<div class="scroll"><table class="compared">{}{}</table></div>'
    single = f"<details><summary>Action by action</summary>{table.format(head.format('action'), actions)}</details>"
    return table.format(head.format("of a step, without waits"), kinds) + single


def _row(name: str, predicted: float, measured: float) -> str:
    cells = f"{predicted * 1e3:.3f}", f"{measured * 1e3:.3f}", signed((predicted - measured) * 1e3)
    return f"<tr><td>{escape(name)}</td>{''.join(f'<td>{text}</td>' for text in cells)}</tr>"
