"""Plan text: a decision for people: the best plans, why the first wins, what does not fit, time against memory.

Law: nothing is computed here but differences, sums and ratios of what a decision holds; every number has its unit.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fourfold.analysis.plan_words import (
    bubble_fraction,
    compared,
    equal_words,
    fewer_devices,
    nearest_changes,
    plan_words,
    reasons,
    refusal,
    sent_bytes,
    used_kinds,
    used_terms,
)
from fourfold.plan.decide.decision import Decision, Refused
from fourfold.plan.predict.prediction import Prediction
from fourfold.plan.predict.workload import Workload
from fourfold.words.text_table import table_lines
from fourfold.words.units import (
    format_bytes,
    format_count,
    format_percent,
    format_si,
    format_step_seconds,
    format_three_digits,
)

MAX_RANKED, MAX_REFUSED, MAX_FRONT, MAX_PLACES = 8, 6, 16, 8
BAR_WIDTH = 24
SMALLEST_BOUND = 0.001
UNKNOWN = "–"


def format_decision(decision: Decision, workload: Workload) -> str:
    """The text of `fourfold plan`."""
    sections = [
        [fewer] if (fewer := fewer_devices(decision)) else [],
        [*_format_head(workload), _format_counts(decision, workload)],
        _format_ranking(decision, workload),
        host_lines(decision),
        ["why the first", *_indent(table_lines(reasons(decision), "<<", gap="   "))],
        ["where a step goes", *_indent(format_terms(compared(decision)))],
        ["memory of a rank of the first", *_indent(format_memory(decision.answer, workload.memory_bytes))],
        _format_refused(decision.refused),
        [
            "time against memory: no plan is both faster and smaller than one of these",
            *_indent(_format_front(decision)),
        ],
    ]
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def format_prediction(prediction: Prediction, workload: Workload) -> str:
    """The section of `fourfold show`: what its plan takes, and where that goes."""
    rate = f"{format_si(workload.units_per_second(prediction))} {workload.unit} a second"
    head = f"prediction   {format_step_seconds(prediction.seconds)} a step, {rate}, on {workload.machine}"
    memory = format_memory(prediction, workload.memory_bytes)
    lines = [*format_terms({"the plan": prediction}), "memory of a rank", *_indent(memory)]
    return "\n".join([head, *_indent(lines)])


def format_confirmed(candidates: Sequence[Prediction], seconds: Sequence[float]) -> str:
    """Plans that have been run, the fastest first: measured beside predicted."""
    rows = [("measured", "predicted", "difference", "plan")]
    pairs = sorted(zip(candidates, seconds, strict=True), key=lambda pair: pair[1])
    for each, measured in pairs:
        times = (format_step_seconds(measured), format_step_seconds(each.seconds))
        rows.append((*times, format_difference(each.seconds, measured), plan_words(each.plan)))
    return "\n".join(table_lines(rows, ">>><"))


def format_difference(predicted: float, measured: float) -> str:
    """By how much a prediction is off: +4.2 %, −3 %."""
    return f"{100 * (predicted / measured - 1):+.1f} %".replace("-", "−") if measured else UNKNOWN


def _format_head(workload: Workload) -> list[str]:
    batch = f"batch of {workload.batch_size:,} samples"
    batch += f", {workload.num_units:,.0f} {workload.unit}" if workload.unit != "samples" else ""
    return [f"{workload.task} · {format_count(workload.num_parameters)} parameters · {batch} · {workload.machine}"]


def host_lines(decision: Decision) -> list[str]:
    """In which order the ranks of unequal hosts are numbered; empty: hosts are equal, or keep their order."""
    if list(decision.host_order) == sorted(decision.host_order):
        return []
    order = ", ".join(map(str, decision.host_order))
    return [f"hosts differ in speed: start ranks on them in the order {order}, counted from 0"]


def _format_counts(decision: Decision, workload: Workload) -> str:
    limit = "" if workload.memory_bytes is None else f"{format_bytes(workload.memory_bytes)} of memory a device · "
    counts = f"{decision.num_considered:,} plans considered"
    if decision.num_unseen:
        counts += f", {decision.num_unseen:,} groups of plans left out for lack of time (search_seconds=none: all)"
    return f"{limit}{counts} · {equal_words(decision)}"


_ALIGNMENTS = ">><>>>>>><"


def _heads(workload: Workload) -> tuple[str, ...]:
    share = "" if workload.peak_flops is None else "of peak"
    return ("", "step", "", f"{workload.unit}/s", "FLOP/s", share, "memory", "bubble", "sent", "plan")


def _row(prediction: Prediction, workload: Workload, *, number: str = "", mark: str = "") -> tuple[str, ...]:
    share = workload.share_of_peak(prediction)
    return (
        number,
        format_step_seconds(prediction.seconds),
        mark,
        format_si(workload.units_per_second(prediction)),
        _format_flops(workload.flops_per_second(prediction)),
        "" if share is None else _share(share),
        format_bytes(prediction.memory.total),
        _share(bubble_fraction(prediction)),
        format_bytes(sent_bytes(prediction)),
        plan_words(prediction.plan),
    )


def ranking_rows(decision: Decision, workload: Workload) -> list[tuple[str, ...]]:
    """The best plans, with a row of heads."""
    shown = decision.ranked[:MAX_RANKED]
    equals = decision.equals if len(decision.equals) > 1 else ()
    rows = [_heads(workload)]
    rows += [
        _row(each, workload, number=str(number), mark="=" if each in equals else "")
        for number, each in enumerate(shown, 1)
    ]
    return rows


def _format_flops(rate: float) -> str:
    """Operations a second of a device: 148 T, 31.2 G."""
    return f"{format_three_digits(rate / 1e12)} T" if rate >= 0.9995e12 else format_si(rate)


def _share(fraction: float) -> str:
    """A cell of a column of fractions."""
    return f"{100 * fraction:.1f} %"


def _format_ranking(decision: Decision, workload: Workload) -> list[str]:
    return [*table_lines(ranking_rows(decision, workload), _ALIGNMENTS), *ranking_notes(decision)]


def ranking_notes(decision: Decision) -> list[str]:
    """What is to be known of the ranking."""
    notes = []
    if len(decision.equals) > 1:
        notes.append("= counts as equal: of these, the simplest is first")
    if decision.bound >= SMALLEST_BOUND:
        percent = format_percent(decision.bound)
        notes.append(f"of plans that were estimated and not simulated, none is more than {percent} faster than these")
    if decision.host_order and list(decision.host_order) != sorted(decision.host_order):
        order = ", ".join(map(str, decision.host_order))
        notes.append(f"hosts differ in speed: number their ranks in the order of hosts {order} of the cluster's file")
    return notes


def format_terms(predictions: Mapping[str, Prediction]) -> list[str]:
    """The time of a step by term, as lines."""
    rows = term_rows(predictions)
    return table_lines(rows, "<" + ">" * (len(rows[0]) - 1))


def term_rows(predictions: Mapping[str, Prediction]) -> list[tuple[str, ...]]:
    """The time of a step by term: a row for each plan, all in one unit, which stands in the row of heads."""
    names = used_terms(list(predictions.values()))
    unit, factor, digits = unit_of(max((each.seconds for each in predictions.values()), default=0.0))
    rows: list[tuple[str, ...]] = [(f"in {unit}", *names, "in all")]
    for name, each in predictions.items():
        terms = [getattr(each.terms, term) for term in names]
        rows.append((name, *(f"{factor * term:,.{digits}f}" for term in [*terms, each.seconds])))
    return rows


class TimeUnit(NamedTuple):
    """A unit of time: its text, how many there are in a second, and the digits after the point that are written."""

    text: str
    factor: float
    digits: int


def unit_of(most: float) -> TimeUnit:
    """The unit in which to write times of at most so many seconds."""
    unit, factor = ("s", 1.0) if most >= 10.0 else ("ms", 1e3) if most >= 1e-3 else ("µs", 1e6)
    return TimeUnit(unit, factor, 1 if most * factor >= 100 else 2)


def format_memory(prediction: Prediction, limit_bytes: float | None) -> list[str]:
    """Bytes by kind, of a rank of each place on the pipeline axis, as lines."""
    rows = memory_rows(prediction, limit_bytes)
    lines = table_lines(rows, "<" + ">" * (len(rows[0]) - 1))
    if len(rows) - 1 < len(prediction.by_stage):
        num_places = len(prediction.by_stage)
        lines.append(f"{num_places} places on the pipeline axis: the first, the one that holds most, the last")
    return lines


def memory_rows(
    prediction: Prediction, limit_bytes: float | None, *, most_places: int = MAX_PLACES
) -> list[tuple[str, ...]]:
    """Bytes by kind: a row for each place on the pipeline axis; of more than `most_places`, those that matter."""
    parts = prediction.by_stage
    kinds = used_kinds(parts)
    shown = list(range(len(parts))) if len(parts) <= most_places else _ends_and_peak(prediction)
    rows: list[tuple[str, ...]] = [("", *kinds, "in all", *([] if limit_bytes is None else ["limit"]))]
    for place in shown:
        cells = (format_bytes(getattr(parts[place], kind)) for kind in kinds)
        limit = [] if limit_bytes is None else [format_bytes(limit_bytes)]
        label = "" if len(parts) == 1 else f"pp {place}"
        rows.append((label, *cells, format_bytes(parts[place].total), *limit))
    return rows


def _ends_and_peak(prediction: Prediction) -> list[int]:
    totals = [each.total for each in prediction.by_stage]
    return sorted({0, totals.index(max(totals)), len(totals) - 1})


def _format_refused(refused: Sequence[Refused]) -> list[str]:
    if not refused:
        return []
    rows = [("needs", "nearest change that fits", "plan")]
    rows += [(refusal(each), nearest_changes(each) or UNKNOWN, plan_words(each.plan)) for each in refused[:MAX_REFUSED]]
    lines = table_lines(rows, "<<<")
    more = len(refused) - MAX_REFUSED
    if more > 0:
        lines.append(f"and {more:,} more")
    return ["refused", *_indent(lines)]


def _format_front(decision: Decision) -> list[str]:
    front = sorted(decision.front, key=lambda each: each.memory.total)
    stride = -(-len(front) // MAX_FRONT) or 1
    front = [each for index, each in enumerate(front) if index % stride == 0 or each is front[-1]]
    most = max((each.seconds for each in front), default=1.0)
    rows = [("memory", "step", "", "plan")]
    rows += [
        (
            format_bytes(each.memory.total),
            format_step_seconds(each.seconds),
            "█" * max(1, round(BAR_WIDTH * each.seconds / most)),
            plan_words(each.plan),
        )
        for each in front
    ]
    return table_lines(rows, ">><<")


def _indent(lines: Sequence[str]) -> list[str]:
    return [f"  {line}".rstrip() for line in lines]
