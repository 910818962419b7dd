"""What if: words with several values, and the best plan for each.

list   a word with commas, of `devices`, `network`, `memory`, a field, or a number of the task
curve  over devices if there is a list of them, else over the last list; the values of the others are its label
Law: every combination has its point; one where nothing fits says what is missing.
"""

import itertools
import math
from collections.abc import Mapping, Sequence

from fourfold.cli import task_loader
from fourfold.cli.arguments import several_values
from fourfold.cli.plan.arguments import BATCH, GPT, LIST_WORDS, OWN_WORDS, WHERE, PlanArguments
from fourfold.cli.plan.question import GPT_FIELDS, Questions
from fourfold.planner.plan_text import DEVICES, Curve, Point
from fourfold.words.errors import PlanError, Problem, SettingError
from fourfold.words.field import Field

MAX_POINTS = 64


def listed(arguments: PlanArguments) -> dict[str, list[str]]:
    """The values of each word that is a list, as typed. Raises SettingError."""
    own = {key: text.split(",") for key, text in arguments.texts.items() if key in LIST_WORDS and "," in text}
    with_commas = {key: text for key, text in arguments.run.texts.items() if "," in text}
    types = _value_types(arguments) if with_commas else {}
    found = own | several_values(with_commas, types, where=WHERE)
    if (count := math.prod(map(len, found.values()))) > MAX_POINTS:
        raise SettingError(Problem(f"{count} combinations", f"at most {MAX_POINTS}", "fewer values"), where=WHERE)
    return found


def _value_types(arguments: PlanArguments) -> dict[str, Field]:
    """Of the arguments of the task or of the formula. Raises FourfoldError."""
    if arguments.run.named_task == GPT:
        return GPT_FIELDS
    return task_loader.task_arguments(task_loader.find_task(arguments.run.task))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def make_curves(questions: Questions, lists: Mapping[str, list[str]]) -> list[Curve]:
    """The curves of all combinations. Raises FourfoldError for words that are wrong wherever they stand."""
    key = DEVICES if DEVICES in lists else list(lists)[-1]
    others = {name: values for name, values in lists.items() if name != key}
    curves = []
    for values in itertools.product(*others.values()):
        fixed = dict(zip(others, values, strict=True))
        label = ", ".join(f"{name} {value}" for name, value in fixed.items())
        if key != DEVICES:
            curves.append(Curve(key, label or f"by {key}", _points(questions, key, lists[key], fixed)))
            continue
        batch = questions.make({**fixed, DEVICES: lists[key][0]}).source.batch_size
        strong = f"strong scaling, a batch of {batch:,} samples"
        weak = f"weak scaling, a batch of {batch:,} samples on {_devices(lists[key][0])}"
        suffix = f"; {label}" if label else ""
        curves.append(Curve(key, strong + suffix, _points(questions, key, lists[key], fixed)))
        grown = {text: batch * int(text) // int(lists[key][0]) for text in lists[key]}
        curves.append(Curve(key, weak + suffix, _points(questions, key, lists[key], fixed, batches=grown)))
    return curves


def _devices(text: str) -> str:
    return f"{text} device{'' if text == '1' else 's'}"


def _points(
    questions: Questions,
    key: str,
    texts: Sequence[str],
    fixed: Mapping[str, str],
    *,
    batches: Mapping[str, int] | None = None,
) -> tuple[Point, ...]:
    points = []
    for number, text in enumerate(texts):
        changes = {**fixed, key: text}
        changes |= {BATCH: str(batches[text])} if batches else {}
        points.append(_point(questions, key, text, changes, place=number))
    return tuple(points)


def _point(questions: Questions, key: str, text: str, changes: Mapping[str, str], *, place: int) -> Point:
    value = _value_of(key, text, place)
    try:
        question = questions.make(changes)
        workload = question.workload
        return Point(text, value, workload, question.decide().answer)
    except PlanError as error:
        first = error.problems[0]
        cause = f"{first.got}; need {first.need}" if first.need else first.got
        return Point(text, value, None, None, cause)


def _value_of(key: str, text: str, place: int) -> float:
    """Where a value stands on the axis: a number, a quantity in its base unit, or its place in the list."""
    if key in OWN_WORDS:
        return float(OWN_WORDS[key].read(key, text))
    return float(text) if _is_number(text) else float(place)
