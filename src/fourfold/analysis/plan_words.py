"""Plan words: what is said of a prediction, in the words that text and page share.

term   a part of a step's time, under the name that users read
Law: a plan is written as words of the command line: typed there, they are that plan.
"""

import dataclasses
import math
from collections.abc import Sequence

from fourfold.plan.decide.decision import Change, Decision, Refused
from fourfold.plan.decide.reasons import reason
from fourfold.plan.plan import Plan
from fourfold.plan.predict.prediction import MemoryParts, Prediction, StepTerms
from fourfold.words.units import BINARY_PREFIXES, format_bytes, format_percent, format_step_seconds

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
    return f"'{value}'" if isinstance(value, str) and (" " in value or "\n" in value) else str(value)


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
    return f"{change.field}={change.value}{then}"


def used_terms(predictions: Sequence[Prediction]) -> list[str]:
    """The names of the terms of which any of the plans has some, and not only what rounding leaves."""
    return [
        name
        for name in StepTerms._fields
        if any(getattr(each.terms, name) > ROUNDING * each.seconds for each in predictions)
    ]


def used_kinds(parts: Sequence[MemoryParts]) -> list[str]:
    """The kinds of memory of which any place has some."""
    return [kind for kind in MemoryParts._fields if any(getattr(each, kind) > 0 for each in parts)]


def bubble_fraction(prediction: Prediction) -> float:
    """The fraction of a step that the slowest rank waits for other stages."""
    return prediction.terms.bubble / prediction.seconds if prediction.seconds else 0.0


def sent_bytes(prediction: Prediction) -> float:
    """What a rank sends in a step at most, over all axes."""
    return sum(prediction.sent_bytes.values())
