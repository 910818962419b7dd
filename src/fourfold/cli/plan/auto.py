"""`plan=auto`: a training whose plan is decided when it begins.

kept     the plan of a run that began before: it is used again, and nothing is decided
decided  the answer of the planner for this machine, with the fields that the command pins
Law: the ranks see a plan of which every field is given; a run that resumes on as many ranks has the plan that it had.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from fourfold.cli import job
from fourfold.cli.arguments import PLAN_WORD
from fourfold.cli.output import print_text
from fourfold.cli.plan.arguments import PlanArguments
from fourfold.cli.plan.progress import shown_progress
from fourfold.cli.plan.question import Question, Questions
from fourfold.cli.run import COMMAND_LINE, PLAN_AUTO, Run
from fourfold.environment.world import World
from fourfold.plan.plan import Plan
from fourfold.planner.plan_text import best_baseline, fewer_devices, plan_words
from fourfold.planner.search.decision import Decision, reason
from fourfold.words.errors import Problem, SettingError
from fourfold.words.run_files import PLAN_FILE
from fourfold.words.units import format_bytes, format_step_seconds


def with_plan(run: Run, *, num_processes: int | None, world: World | None) -> Run:
    """The run with a plan in place of `plan=auto`; prints which, and why. Raises FourfoldError."""
    if world is not None:
        got = f"{PLAN_AUTO}, under another launcher"
        need = "one process that decides for all ranks"
        attempt = f"fourfold plan with the same words and devices={world.size}, then its plan.toml"
        raise SettingError(Problem(got, need, attempt), where=COMMAND_LINE)
    ready = job.parse_job(run.asked)
    kept = None if ready.fresh else _kept_plan(ready.run_dir, num_processes, run.pinned_fields())
    if kept is not None:
        print_text(f"plan   {plan_words(kept)}, kept from {ready.run_dir}")
        return dataclasses.replace(run.asked, decided=kept)
    questions = Questions(PlanArguments(run.without([PLAN_WORD])), devices=num_processes)
    with shown_progress(questions.progress):
        question = questions.make()
        decision = question.decide()
    print_text("\n".join(format_decided(decision, question)))
    decided = dataclasses.replace(run.asked, decided=decision.answer.plan)
    return dataclasses.replace(decided, decided=decided.plan(num_processes))


def _kept_plan(run_dir: Path, num_processes: int | None, pinned: Mapping[str, object]) -> Plan | None:
    """The plan of a run that began before, if it is for as many ranks, and has what the words pin."""
    path = run_dir / PLAN_FILE
    if not path.is_file():
        return None
    plan = Plan.from_toml(path.read_text(encoding="utf-8"), where=str(path))
    if num_processes not in (None, plan.mesh.size):
        return None
    return plan if all(getattr(plan, name) == value for name, value in pinned.items()) else None


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
