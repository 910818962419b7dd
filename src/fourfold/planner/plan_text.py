"""Plan text: a decision for people: the best plans, why the first wins, what does not fit, time against memory.

term  a part of a step's time, under the name that users read
Law: nothing is computed here but differences, sums and ratios of what a decision holds; every number has its unit. A
plan is written as words of the command line: typed there, they are that plan.

strong  the batch stays as it is while devices are added
weak    the batch grows with the devices
efficiency  the rate of a device, over that of a device at the first point of the curve
Law: a curve has a point for each value that was asked for; where nothing fits, the point says so.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fourfold.plan.plan import Plan
from fourfold.planner.predict.facts import Workload
from fourfold.planner.predict.prediction import MemoryParts, Prediction, StepTerms
from fourfold.planner.search.decision import Change, Decision, Refused, reason
from fourfold.words.field import value_text
from fourfold.words.terminal_text import table_lines
from fourfold.words.units import (
    BINARY_PREFIXES,
    format_bytes,
    format_count,
    format_percent,
    format_si,
    format_step_seconds,
    format_three_digits,
)

# ---- words -----------------------------------------------------------------------------------------------------------


NO_WORDS = "dp=1"
ROUNDING = 1e-6


def plan_words(plan: Plan) -> str:
    """The plan as words of the command line: `dp=8 pp=4 zero=1`; of one rank, `dp=1`."""
    fields = [
        (field.name, getattr(plan, field.name))
        for field in dataclasses.fields(plan)
        if getattr(plan, field.name) != field.default and field.name not in plan.ineffective_fields
    ]
    return " ".join(f"{name}={_word(value)}" for name, value in fields) or NO_WORDS


def _word(value: object) -> str:
    text = value_text(value)
    return f"'{text}'" if " " in text or "\n" in text else text


def against(answer: Prediction, baseline: Prediction, *, error: float) -> str:
    """What a baseline takes, and what the answer saves against it."""
    if answer.plan == baseline.plan:
        return "is the first"
    time = f"takes {format_step_seconds(baseline.seconds)}"
    if abs(baseline.seconds / answer.seconds - 1) <= error:
        return f"{time}, which counts as equal"
    return f"{time}; the first {reason(answer, baseline)}"


def _devices(number: int) -> str:
    return "1 device" if number == 1 else f"{number:,} devices"


def fewer_devices(decision: Decision) -> str:
    """Which of the fewer devices are faster than all, or as fast; "" if none are."""
    answer, size = decision.answer, _devices(decision.answer.plan.mesh.size)
    limit = answer.seconds * (1 + decision.error)
    number = min(decision.fewer, key=lambda each: decision.fewer[each].seconds, default=None)
    if number is None or decision.fewer[number].seconds > limit:
        return ""
    is_faster = decision.fewer[number].seconds < answer.seconds
    if not is_faster:
        number = min(each for each, found in decision.fewer.items() if found.seconds <= limit)
    found = decision.fewer[number]
    verb, how = "is" if number == 1 else "are", "faster" if is_faster else "as fast"
    taken = f"{format_step_seconds(found.seconds)} a step with {plan_words(found.plan)}"
    return f"{_devices(number)} {verb} {how}: {taken}, {format_step_seconds(answer.seconds)} with {size}"


def equal_words(decision: Decision) -> str:
    """Which plans count as equal, and what is known of the error."""
    percent = format_percent(decision.error)
    text = f"plans within {percent} of each other count as equal"
    if decision.is_error_known:
        return f"{text}, the error of predictions"
    return f"{text}; no prediction for this machine was compared with a run"


def reasons(decision: Decision) -> list[tuple[str, str]]:
    """Each baseline, and what the first plan saves against it, or why the baseline is not possible.

    Baselines of which the same is to be said, such as those that are one plan, share a row.
    """
    names: dict[str, list[str]] = {}
    fewer = {_devices(number): each for number, each in decision.fewer.items()}
    for name, baseline in {**decision.baselines, **fewer}.items():
        is_refused = isinstance(baseline, Refused)
        text = _why_not(baseline) if is_refused else against(decision.answer, baseline, error=decision.error)
        names.setdefault(text, []).append(name)
    return [
        (first, f"{text}; likewise {' and '.join(others)}" if others else text)
        for text, (first, *others) in names.items()
    ]


def _why_not(baseline: Refused) -> str:
    """Why a baseline is not to be had: it does not fit, is not legal, or differs from what the ask pins."""
    if not baseline.problems:
        return f"does not fit: {refusal(baseline)}"
    if baseline.prediction is None:
        return f"is not possible: {refusal(baseline)}"
    *others, last = [each.got.partition(" = ")[0] for each in baseline.problems]
    fields = f"{', '.join(others)} and {last} have" if others else f"{last} has"
    if baseline.excess_bytes:
        return f"would not fit, and {fields} to be as pinned: {_bytes_of_limit(baseline, baseline.prediction)}"
    return f"would take {format_step_seconds(baseline.prediction.seconds)}, but {fields} to be as pinned"


def best_baseline(decision: Decision) -> tuple[str, Prediction] | None:
    """The fastest baseline that fits, with its name; None if none fits."""
    fitting = [(name, each) for name, each in decision.baselines.items() if not isinstance(each, Refused)]
    return min(fitting, key=lambda pair: pair[1].seconds, default=None)


def compared(decision: Decision) -> dict[str, Prediction]:
    """The first plan and the baselines that fit, by name; each plan once."""
    found = {"the first": decision.answer}
    for name, each in decision.baselines.items():
        if not isinstance(each, Refused) and each.plan not in [known.plan for known in found.values()]:
            found[name] = each
    return found


def refusal(refused: Refused) -> str:
    """Why a plan is no answer: its bytes against the limit, or what is not legal."""
    if refused.problems:
        return "; ".join(f"{each.got}, need {each.need}" if each.need else each.got for each in refused.problems)
    if refused.prediction is None:
        return "cannot be carried out"
    return _bytes_of_limit(refused, refused.prediction)


def _bytes_of_limit(refused: Refused, prediction: Prediction) -> str:
    """What a rank holds against the limit, and the kind of which it holds most."""
    kind, most = max(prediction.memory._asdict().items(), key=lambda pair: pair[1])
    total, limit = format_bytes(prediction.memory.total), format_bytes(refused.limit_bytes)
    return f"{total} of {limit}, {format_bytes(most)} of it {kind}"


def nearest_changes(refused: Refused) -> str:
    """The nearest changes with which a plan fits, as words, and what a rank then holds; "" if none is known."""
    return ", or ".join(map(_format_change, refused.changes))


def _format_change(change: Change) -> str:
    if change.field == "memory" and isinstance(change.value, int | float):
        factor, unit = next((pair for pair in BINARY_PREFIXES if change.value >= pair[0]), (1, "B"))
        return f"memory={math.ceil(10 * change.value / factor - ROUNDING) / 10:g}{unit}"  # not less than is needed
    then = "" if change.prediction is None else f" ({format_bytes(change.prediction.memory.total)})"
    return f"{change.field}={value_text(change.value)}{then}"


def used_terms(predictions: Sequence[Prediction]) -> list[str]:
    """The names of the terms of which any of the plans has some, and not only what rounding leaves."""
    return [
        name
        for name in StepTerms._fields
        if any(getattr(each.terms, name) > ROUNDING * each.seconds for each in predictions)
    ]


def bubble_fraction(prediction: Prediction) -> float:
    """The fraction of a step that the slowest rank waits for other stages."""
    return prediction.terms.bubble / prediction.seconds if prediction.seconds else 0.0


# ---- text ------------------------------------------------------------------------------------------------------------


MAX_RANKED, MAX_REFUSED, MAX_FRONT, MAX_PLACES = 8, 6, 16, 8
BAR_WIDTH = 24
SMALLEST_BOUND = 0.001
UNKNOWN = "–"


def format_decision(decision: Decision, workload: Workload) -> str:
    """The text of `fourfold plan`."""
    sections = [
        [fewer] if (fewer := fewer_devices(decision)) else [],
        [*_format_head(workload), _format_counts(decision, workload)],
        [*table_lines(ranking_rows(decision, workload), _ALIGNMENTS), *ranking_notes(decision)],
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
        format_bytes(sum(prediction.sent_bytes.values())),
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
    kinds = [kind for kind in MemoryParts._fields if any(getattr(each, kind) > 0 for each in parts)]
    shown: Sequence[int] = range(len(parts))
    if len(parts) > most_places:
        shown = sorted({0, parts.index(prediction.memory), len(parts) - 1})
    rows: list[tuple[str, ...]] = [("", *kinds, "in all", *([] if limit_bytes is None else ["limit"]))]
    for place in shown:
        cells = (format_bytes(getattr(parts[place], kind)) for kind in kinds)
        limit = [] if limit_bytes is None else [format_bytes(limit_bytes)]
        label = "" if len(parts) == 1 else f"pp {place}"
        rows.append((label, *cells, format_bytes(parts[place].total), *limit))
    return rows


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


# ---- Plan curves: what if there were more devices, a larger batch, a faster network: the best plan of each ----------

DEVICES = "devices"


class Point(NamedTuple):
    """The best plan at one value. Without one, `cause` says why."""

    text: str
    value: float
    workload: Workload | None
    best: Prediction | None
    cause: str = ""

    @property
    def rate(self) -> float | None:
        """Tokens or samples a second; None where nothing fits."""
        return None if self.best is None or self.workload is None else self.workload.units_per_second(self.best)


class Curve(NamedTuple):
    """The points of one curve: `label` says what is the same in all of them, `key` what is not."""

    key: str
    label: str
    points: tuple[Point, ...]

    def efficiency(self, point: Point) -> float | None:
        """The rate of a device over that of the first point; None where nothing fits, or devices stay the same."""
        first = next((each for each in self.points if each.rate is not None), None)
        if self.key != DEVICES or first is None or first.rate is None or point.rate is None:
            return None
        return point.rate / point.value / (first.rate / first.value)

    @property
    def unit(self) -> str:
        """What the rates count."""
        return next((each.workload.unit for each in self.points if each.workload is not None), "samples")


def format_curves(curves: Sequence[Curve], *, head: str) -> str:
    """The text of `fourfold plan` with lists."""
    sections = [head]
    for curve in curves:
        rows = curve_rows(curve)
        lines = table_lines(rows, ">" * (len(rows[0]) - 1) + "<")
        sections.append("\n".join([curve.label, *(f"  {line}" for line in lines)]))
    return "\n\n".join(sections)


def curve_rows(curve: Curve) -> list[tuple[str, ...]]:
    """A row for each point, with a row of heads."""
    rows = [(curve.key, "step", f"{curve.unit}/s", "efficiency" if curve.key == DEVICES else "", "memory", "plan")]
    for point in curve.points:
        if point.best is None or point.rate is None:
            rows.append((point.text, "", "", "", "", point.cause))
            continue
        efficiency = curve.efficiency(point)
        rows.append((
            point.text,
            format_step_seconds(point.best.seconds),
            format_si(point.rate),
            "" if efficiency is None else format_percent(efficiency),
            format_bytes(point.best.memory.total),
            plan_words(point.best.plan),
        ))  # fmt: skip
    return rows
