"""`fourfold plan`: which plan a task should have, why, and what it will take.

question  a task, a machine, and the fields that are pinned
answer    printed, and written as a plan's file
Law: nothing is overwritten unless the user says so; what is printed says what it was priced with.
"""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fourfold.cli.output import print_text, write_file
from fourfold.cli.plan.arguments import CALIBRATE, GPT, WHERE, PlanArguments, parse_plan_words
from fourfold.planner.plan_text import best_baseline
from fourfold.planner.predict.clusters import read_table
from fourfold.planner.predict.prediction import Prediction
from fourfold.planner.search.decision import Decision
from fourfold.words.errors import Problem, SettingError
from fourfold.words.units import format_bytes, format_count, format_step_seconds

if TYPE_CHECKING:
    from fourfold.cli.plan.question import Question, Questions
    from fourfold.cli.plan.run import PlannedRun
    from fourfold.planner.plan_text import Curve

Timed = list[tuple[Prediction, float]]
"""Plans that have been run, and the seconds of a step of each."""


def plan(words: Sequence[str], processes: str | None) -> int:
    """`fourfold plan`; returns the exit code. Raises FourfoldError."""
    from fourfold.launcher.process_defaults import check_num_processes

    devices = check_num_processes(processes, None)
    arguments = parse_plan_words([word for word in words if word != CALIBRATE])
    _check_folders(arguments)
    if (cluster := arguments.value("cluster")) is not None:
        read_table(cluster)
    if CALIBRATE in words:
        return _calibrate(arguments, devices)
    from fourfold.cli.plan import what_if as plan_what_if
    from fourfold.cli.plan.question import Questions
    from fourfold.cli.plan.run import find_planned_run

    name = arguments.run.named_task
    run = find_planned_run(name)
    if run is not None:
        arguments = run.arguments(arguments)
    elif name != GPT:
        arguments.run.without_plan.check(has_run_dir=False, takes_lists=True)
    questions = Questions(arguments, devices=devices)
    if lists := plan_what_if.listed(arguments):
        return _show_curves(questions, arguments, lists)
    if "out" in arguments.own or arguments.value("confirm"):
        check_out(arguments)
    return _answer(questions, arguments, run)


def _calibrate(arguments: PlanArguments, devices: int | None) -> int:
    """`fourfold plan calibrate`: measure this machine anew. Returns the exit code."""
    from fourfold.cli import job
    from fourfold.cli.plan.machine import calibrate, calibration_run, format_calibrated
    from fourfold.launcher.process_defaults import default_num_processes
    from fourfold.planner.predict.calibration import task_key

    run = arguments.run.without_plan
    run.check(has_run_dir=False)
    from fourfold.planner.task_facts.source import TaskFacts  # not on top: it imports torch

    prepared = job.parse_job(run, has_run_dir=False)
    num_ranks = arguments.value("devices") or devices or default_num_processes()
    is_forced = bool(arguments.value("force"))
    key = task_key(TaskFacts(prepared.task))
    measured = calibrate(calibration_run(prepared), num_ranks, key=key, is_forced=is_forced)
    if measured is None:
        return 1
    print_text("\n".join(format_calibrated(measured)))
    return 0


def _check_folders(arguments: PlanArguments) -> None:
    """Raise SettingError where a file that is named has no folder that it can be written into."""
    need = "a folder that exists and can be written to"
    named = {name: Path(arguments.own[name]) for name in ("out", "html") if name in arguments.own}
    problems = [
        Problem(f"{name} = {path}", need, f"mkdir -p {path.parent}")
        for name, path in named.items()
        if not os.access(path.parent, os.W_OK)
    ]
    if problems:
        raise SettingError(problems, where=WHERE)


def check_out(arguments: PlanArguments) -> None:
    """Raise SettingError where the plan's file is there already."""
    out = arguments.out
    if out is not None and out.exists() and not arguments.value("overwrite", False):
        got = f"{out} is there already"
        attempt = "overwrite=true, out=OTHER.toml, or out=none to write no file"
        raise SettingError(Problem(got, "a new file for the plan", attempt), where=WHERE)


def _answer(questions: "Questions", arguments: PlanArguments, run: "PlannedRun | None" = None) -> int:
    from fourfold.cli.plan import run as plan_run
    from fourfold.cli.plan.progress import shown_progress
    from fourfold.planner.plan_text import format_decision

    with shown_progress(questions.progress):
        question = questions.make()
        decision, workload = question.decide(), question.workload
    if run is not None:
        own = question.predict(run.plan)
        decision = plan_run.beside(run, decision, own)
        print_text(plan_run.format_run(run, own) + "\n")
    print_text(format_decision(decision, workload))
    chosen, measured = decision.answer, None
    if (count := arguments.value("confirm")) is not None:
        seconds = _confirm(decision, question, arguments, count)
        if seconds is None:
            return 1
        chosen, measured = min(seconds, key=lambda pair: pair[1])
    # Only here: who asks again and again reads the answer, and need not say each time that no file is to be written.
    check_out(arguments)
    lines = _write_plan(arguments.out, chosen, measured, question)
    if (page := arguments.value("html")) is not None:
        from fourfold.report.document import render
        from fourfold.report.plan_pages import describe_decision

        write_file(Path(page), render(describe_decision(decision, workload)), where=WHERE)
        lines.append(f"page   {page}")
    if lines:
        print_text("\n" + "\n".join(lines))
    return 0


def _write_plan(out: Path | None, chosen: Prediction, measured: float | None, question: "Question") -> list[str]:
    """Write the plan's file; returns what to print of it. `measured`: the seconds of its steps here, if it has run."""
    if out is None:
        return []
    head = f"# fourfold plan: {question.task}, {question.machine.text}\n"
    head += f"# predicted: {format_step_seconds(chosen.seconds)} a step, {format_bytes(chosen.memory.total)} a rank\n"
    head += "" if measured is None else f"# measured: {format_step_seconds(measured)} a step\n"
    write_file(out, head + chosen.plan.to_toml(), where=WHERE)
    return [f"plan   {out}, for fourfold train {question.task} {out}" if question.is_task else f"plan   {out}"]


def _show_curves(questions: "Questions", arguments: PlanArguments, lists: Mapping[str, list[str]]) -> int:
    from fourfold.cli.plan import what_if as plan_what_if
    from fourfold.cli.plan.progress import shown_progress
    from fourfold.planner.plan_text import format_curves

    if confirm := arguments.value("confirm"):
        got = f"confirm = {confirm}, with several values of {' and '.join(lists)}"
        raise SettingError(Problem(got, "one value of each to run here", "the same without confirm="), where=WHERE)
    with shown_progress(questions.progress):
        curves = plan_what_if.make_curves(questions, lists)
    head = describe_curves(curves, lists, arguments)
    print_text(format_curves(curves, head=head))
    if (page := arguments.value("html")) is not None:
        from fourfold.report.document import render
        from fourfold.report.plan_pages import describe_curves as describe_page

        write_file(Path(page), render(describe_page(curves, title="What if", under=head)), where=WHERE)
        print_text(f"\npage   {page}")
    return 0


def describe_curves(curves: Sequence["Curve"], lists: Mapping[str, list[str]], arguments: PlanArguments) -> str:
    """What the curves are of: the task, the machine, and the values."""
    workload = next((each.workload for curve in curves for each in curve.points if each.workload is not None), None)
    task = (
        "no plan fits" if workload is None else f"{workload.task} · {format_count(workload.num_parameters)} parameters"
    )
    values = ", ".join(f"{key} {' '.join(texts)}" for key, texts in lists.items())
    return f"{task} · {arguments.value('cluster') or 'this machine'} · what if: {values}"


def _confirm(decision: Decision, question: "Question", arguments: PlanArguments, count: int) -> Timed | None:
    """What a step of the first plans and of the best baseline takes here, in seconds; None if a rank failed."""
    from fourfold.cli.launch import launch_ranks
    from fourfold.planner.plan_text import format_confirmed

    if not (question.machine.is_here and question.is_task):
        got = f"confirm = {count}, for {question.task} on {question.machine.text}"
        raise SettingError(Problem(got, "a task and this machine: the plans are run here", "no confirm="), where=WHERE)
    candidates = candidates_of(decision, count)
    print(f"\nrunning {len(candidates)} plans here, in turns", flush=True)
    run = dataclasses.replace(arguments.run.without_plan, decided=candidates[0].plan)  # all have as many ranks
    seconds = launch_ranks("time", run, plans=[each.plan.to_toml() for each in candidates]).result
    if seconds is None:  # ranks failed, which the launcher has reported
        return None
    print_text("\n" + format_confirmed(candidates, seconds))
    return list(zip(candidates, seconds, strict=True))


def candidates_of(decision: Decision, count: int) -> list[Prediction]:
    """The first plans of a decision, and the best baseline that fits."""
    found = {each.plan: each for each in decision.ranked[:count]}
    if (best := best_baseline(decision)) is not None:
        found.setdefault(best[1].plan, best[1])
    return list(found.values())
