"""`plan=auto`: a training whose plan is decided when it begins.

kept     the plan of a run that began before: it is used again, and nothing is decided
decided  the answer of the planner for this machine, with the fields that the command pins
Law: the ranks see a plan of which every field is given; a run that resumes on as many ranks has the plan that it had.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from fourfold.cli import job
from fourfold.cli.output import print_text
from fourfold.cli.plan.arguments import PLAN_AUTO, PlanArguments, parse_plan_words, training_words
from fourfold.cli.plan.progress import shown_progress
from fourfold.cli.plan.question import Question, Questions, pinned_fields
from fourfold.cli.run import is_ask, resolve
from fourfold.environment.world import World
from fourfold.plan.plan import Plan
from fourfold.plan.plan_fields import FIELDS
from fourfold.planner.plan_text import best_baseline, fewer_devices, plan_words
from fourfold.planner.search.decision import Decision, reason
from fourfold.words.errors import Problem, SettingError
from fourfold.words.field import value_text
from fourfold.words.run_files import PLAN_FILE
from fourfold.words.units import format_bytes, format_step_seconds


def resolve_words(words: Sequence[str], *, num_processes: int | None, world: World | None) -> list[str]:
    """The words with a plan in place of `plan=auto`; prints which, and why. Raises FourfoldError."""
    if world is not None:
        got = f"{PLAN_AUTO}, under another launcher"
        need = "one process that decides for all ranks"
        attempt = f"fourfold plan with the same words and devices={world.size}, then its plan.toml"
        raise SettingError(Problem(got, need, attempt), where="the command line")
    others, words = training_words(words), [word for word in words if word != PLAN_AUTO]
    arguments = PlanArguments(parse_plan_words([word for word in words if is_ask(word)]).ask, others=tuple(words))
    pinned = pinned_fields(resolve(words))
    ready = job.parse_job(others)
    kept = None if ready.fresh else _kept_plan(ready.run_dir, num_processes, pinned)
    if kept is not None:
        print_text(f"plan   {plan_words(kept)}, kept from {ready.run_dir}")
        return [*others, *_missing_words(kept, pinned)]
    questions = Questions(arguments, devices=num_processes)
    with shown_progress(questions.progress):
        question = questions.make()
        decision = question.decide()
    print_text("\n".join(format_decided(decision, question)))
    return [*others, *_missing_words(decision.answer.plan, pinned)]


def _kept_plan(run_dir: Path, num_processes: int | None, pinned: Mapping[str, object]) -> Plan | None:
    """The plan of a run that began before, if it is for as many ranks, and has what the words pin."""
    path = run_dir / PLAN_FILE
    if not path.is_file():
        return None
    plan = Plan.from_toml(path.read_text(encoding="utf-8"), where=str(path))
    if num_processes not in (None, plan.mesh.size):
        return None
    return plan if all(getattr(plan, name) == value for name, value in pinned.items()) else None


def _missing_words(plan: Plan, pinned: Mapping[str, object]) -> list[str]:
    """The fields of the plan that the words do not give themselves: dp always, the others where they matter."""
    defaults = {each.name: each.default for each in dataclasses.fields(Plan)}
    values = {name: getattr(plan, name) for name in FIELDS if name not in pinned}
    given = {name: value for name, value in values.items() if name == "dp" or value != defaults[name]}
    return [f"{name}={value_text(value)}" for name, value in given.items()]


def format_decided(decision: Decision, question: Question) -> list[str]:
    """What is said of a plan that has been decided."""
    answer = decision.answer
    takes = f"{format_step_seconds(answer.seconds)} a step, {format_bytes(answer.memory.total)} a rank"
    among = f"the best of {decision.num_considered:,} plans for {question.machine.text}"
    lines = [f"plan   {plan_words(answer.plan)}: {takes}, {among}"]
    if (found := best_baseline(decision)) is not None:
        name, baseline = found
        same = "it is the best baseline" if baseline.plan == answer.plan else reason(answer, baseline)
        lines.append(f"why    against {name}: {same}")
    if fewer := fewer_devices(decision):
        lines.append(f"note   {fewer}")
    return lines
