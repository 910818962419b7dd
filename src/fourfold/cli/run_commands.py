"""Run commands: check everything, then train in this process, start several, or join those of a launcher.

Law: a single rank runs in this process; several processes start only after everything has been checked.
"""

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from fourfold.cli import sigint
from fourfold.cli.launch import Ended, becomes_forking_launcher, launch, launch_ranks, print_error, run_in_copy
from fourfold.cli.output import print_text, write_file
from fourfold.environment import early_sigterm
from fourfold.environment.world import World, from_environment
from fourfold.words.errors import Problem, SettingError, os_error_text
from fourfold.words.terminal_text import align_columns

if TYPE_CHECKING:
    from fourfold.cli.job import Job
    from fourfold.cli.run import Run
    from fourfold.launcher.restart_policy import SupervisionPolicy


RESTART_COUNT_VARIABLE = "TORCHELASTIC_RESTART_COUNT"
VERIFY, VERIFY_STEPS = "fourfold verify", 3
NEEDED_PLAN = "a plan or settings file, or fields of a plan"


def train(words: Sequence[str], processes: str | None) -> int:
    """`fourfold train`; returns the exit code."""
    from fourfold.cli.run import resolve
    from fourfold.launcher.process_defaults import check_num_processes

    world = from_environment()
    required = check_num_processes(processes, world)
    run = resolve(words)
    run.check(required, takes_lists=True)
    if swept := run.swept_values():
        return _train_sweep(run, swept, required, world)
    run = with_plan(run, required, world)
    is_reporter = world is None or world.rank == 0
    becomes_launcher = world is None and becomes_forking_launcher(run.num_ranks)
    for line in run.recipe_lines if is_reporter else ():
        print(line, flush=True)
    from fourfold.cli import job  # not on top: it takes a while, in which nothing is printed

    if becomes_launcher:
        copy = run_in_copy(lambda: _check_run(job.prepare_job(run), is_reporter=True))
        return copy.exit_code or _launch_run(run, _CheckedRun(*copy.result), is_forked=True).exit_code
    ready = job.prepare_job(run)
    checked = _check_run(ready, is_reporter=is_reporter, has_own_ranks=world is None)
    if world is None and run.num_ranks > 1:
        return _launch_run(run, checked).exit_code
    if not checked.is_finished:
        from fourfold.cli import rank_main

        sigint.restore_and_raise()
        early_sigterm.answer_in_thread()
        rank_main.train(ready, world)
    return 0


def with_plan(run: "Run", num_processes: int | None, world: World | None) -> "Run":
    """The run with its plan: that of its words and file, or with plan=auto the planner's. Raises FourfoldError."""
    if not run.asks_plan:
        return dataclasses.replace(run, decided=run.plan(num_processes))
    from fourfold.cli.plan import auto

    return auto.with_plan(run, num_processes=num_processes, world=world)


def _launch_run(run: "Run", checked: "_CheckedRun", *, is_forked: bool = False) -> Ended:
    if checked.is_finished:
        return Ended(0)
    return launch_ranks("train", run, policy=_supervision_policy(checked), is_forked=is_forked)


class _CheckedRun(NamedTuple):
    """What a launcher needs to know of a run that may begin."""

    run_dir: str
    restarts: int
    hang_seconds: float | None
    is_finished: bool


def _check_run(ready: "Job", *, is_reporter: bool, has_own_ranks: bool = True) -> _CheckedRun:
    """What is to be launched. With `fresh`, the run that was there is moved aside."""
    is_finished = False
    if ready.fresh:
        _start_over(ready, is_reporter=is_reporter, has_own_ranks=has_own_ranks)
    else:
        is_finished = _check_finished(ready, is_reporter=is_reporter)
    return _CheckedRun(str(ready.run_dir), ready.restarts, ready.hang_seconds, is_finished)


def _supervision_policy(ready: _CheckedRun) -> "SupervisionPolicy":
    from fourfold.launcher.restart_policy import SupervisionPolicy
    from fourfold.trainer import fault_log
    from fourfold.trainer.stop_signal import stop_seconds

    folder = Path(ready.run_dir).absolute()

    def record_fault(fault: fault_log.Fault) -> None:
        if fault.step < 0 and not folder.exists():
            return  # The ranks ended before there was a run's folder; the launcher reports it on stderr.
        try:
            fault_log.append_fault(folder, fault)
        except OSError as error:  # a full disk, say
            print_error(f"{fault_log.FAULTS_FILE} could not be written: {os_error_text(error)}")

    return SupervisionPolicy(
        max_restarts=ready.restarts,
        has_heartbeat=True,
        hang_seconds=ready.hang_seconds,
        save_seconds=stop_seconds(),
        notify=print_error,
        record_fault=record_fault,
        run_dir=Path(ready.run_dir),
    )


def _train_sweep(run: "Run", swept: dict[str, list[str]], num_processes: int | None, world: World | None) -> int:
    """Each combination as a run in processes of its own, so that one that dies does not end the others."""
    from fourfold.cli import sweep

    if world is not None:
        got = f"{' and '.join(swept)} with several values, under another launcher"
        raise SettingError(
            Problem(got, "one value of each in a job", "fourfold train, which starts the processes itself")
        )

    def train_member(ready: "Job") -> int:
        ended = _launch_run(ready.run, _check_run(ready, is_reporter=True))
        if ended.stop_code not in (0, ended.exit_code):
            print_error("stopped when this run had ended; the same command goes on with the next one")
        return ended.stop_code or ended.exit_code

    members = sweep.prepare_sweep(run, swept, lambda member: with_plan(member, num_processes, None))
    return sweep.run_sweep(members, train_member)


def _start_over(ready: "Job", *, is_reporter: bool, has_own_ranks: bool) -> None:
    """Move the run's folder aside, in one process.

    A settings file in that folder moves with it. Raises SettingError if ranks of another launcher might read it later.
    """
    from fourfold.trainer.run_dir import archive_run

    file = ready.run.file
    if not has_own_ranks and file is not None and Path(file).absolute().is_relative_to(ready.run_dir.absolute()):
        got = f"fresh=true, which moves {file} away with its run"
        raise SettingError(Problem(got, "a file outside the run's folder", f"a copy of {file}"))
    # When a launcher restarts its ranks, the run must not start over again.
    if not is_reporter or os.environ.get(RESTART_COUNT_VARIABLE, "0") != "0":
        return
    if (archived := archive_run(ready.run_dir)) is not None:
        print_text(f"{ready.run_dir} starts over; the earlier run is now {archived}")


def _check_finished(ready: "Job", *, is_reporter: bool) -> bool:
    """Whether the run is complete already."""
    from fourfold.trainer.run_identity import format_finished, read_finished_record

    finished = read_finished_record(ready.run_dir)
    if finished is not None and is_reporter:
        print_text(format_finished(ready.run_dir, finished, ready.plan))
    return finished is not None


def run(command: Sequence[str], processes: str | None, restarts: str = "0") -> int:
    """`fourfold run`; returns the exit code."""
    from fourfold.cli.errors import is_file, nearest_file
    from fourfold.launcher.process_defaults import check_num_processes, default_num_processes
    from fourfold.launcher.restart_policy import SupervisionPolicy
    from fourfold.launcher.worker import run_program
    from fourfold.trainer.stop_signal import stop_seconds

    if not restarts.isdecimal():
        raise SettingError(Problem(f"--restarts {restarts}", "a whole number, at least 0"), where="fourfold run")
    if not command:
        raise SettingError(Problem("no script", "SCRIPT.py", "fourfold run --help"), where="fourfold run")
    script = Path(command[0])
    world = from_environment()
    required = check_num_processes(processes, world)
    if not is_file(script):
        got = f"{script} ({'a folder' if os.path.isdir(script) else 'no such file'})"
        raise SettingError(Problem(got, "a Python file", nearest_file(script, "*.py")), where="fourfold run")
    num_processes = required or default_num_processes()
    if world is not None or num_processes == 1:
        sigint.restore_and_raise()
        early_sigterm.restore()
        run_program(command)
        return 0
    policy = SupervisionPolicy(max_restarts=int(restarts), save_seconds=stop_seconds(), notify=print_error)
    return launch(command, num_processes, policy).exit_code


def show(words: Sequence[str], page: str | None = None) -> int:
    """`fourfold show`; returns the exit code. `page`: the file of an HTML page, instead of a text."""
    from fourfold.cli.run import resolve
    from fourfold.plan.recipes import RECIPE_PREFIX, SHIPPED_PLANS, recipe_summary

    run = resolve(words)
    if run.plan_file == RECIPE_PREFIX:
        for line in align_columns(
            [(f"{RECIPE_PREFIX}{name}", recipe_summary(name)) for name in SHIPPED_PLANS.names()], "<<"
        ):
            print_text(line)
        return 0
    run.check(has_run_dir=False)
    from fourfold.cli import job

    _check_has_plan(run, SettingError(Problem("no plan", NEEDED_PLAN, "fourfold show dp=2")))
    from fourfold.cli.plan.run import describe_prediction
    from fourfold.report.document import render
    from fourfold.report.plan_pages import describe_plan
    from fourfold.show.describe import show as show_plan
    from fourfold.tasks.lm import LAYERS

    # dp is 1 unless given: the output must not depend on this machine.
    run = run if run.has_dp else run.with_texts(dp="1")
    ready = job.parse_job(run, has_run_dir=False)
    if not run.has_model and (num_stages := ready.plan.num_stages) > LAYERS:
        # The plan is asked about, not a model: that has a layer for each stage.
        ready = job.parse_job(run.with_texts(layers=str(num_stages)), has_run_dir=False)
    text = show_plan(ready.plan, ready.task) + describe_prediction(ready)
    if page is None:
        print_text(text)
    else:
        write_file(Path(page), render(describe_plan(ready.plan, text)), where="fourfold show")
        print_text(page)
    return 0


def _check_has_plan(run: "Run", error: SettingError) -> None:
    """Raise the error of a command without a plan; if it has a field that is misspelt, the error of that."""
    if not run.has_plan:
        from fourfold.cli import job

        job.parse_job(run, has_run_dir=False)
        raise error


def verify(words: Sequence[str], processes: str | None) -> int:
    """`fourfold verify`; returns the exit code."""
    from fourfold.cli import job
    from fourfold.cli.run import resolve
    from fourfold.launcher.process_defaults import check_num_processes

    run, world = resolve(words), from_environment()
    required = check_num_processes(processes, world)
    run.check(required, has_run_dir=False)
    need = f"{NEEDED_PLAN}; or a script, whose plan is in it"
    _check_has_plan(run, SettingError(Problem("no plan", need, "fourfold verify lm dp=2 zero=1"), where=VERIFY))
    run = run if "steps" in run.texts else run.with_texts(steps=str(VERIFY_STEPS))
    run = dataclasses.replace(run, decided=run.plan(required))

    def check() -> job.Job:
        from fourfold.verification.command import check_verifiable

        check_verifiable(run.plan())
        return job.prepare_job(run, has_run_dir=False)

    if world is None and becomes_forking_launcher(run.num_ranks):
        return run_in_copy(lambda: bool(check())).exit_code or launch_ranks("verify", run, is_forked=True).exit_code
    ready = check()
    if world is None and run.num_ranks > 1:
        return launch_ranks("verify", run).exit_code
    from fourfold.cli import verify

    verify.verify(ready)
    return 0


def report(words: Sequence[str]) -> int:
    """`fourfold report`; returns the exit code."""
    from fourfold.cli.errors import find_run
    from fourfold.report.page import write_report

    if not words:
        raise SettingError(Problem("no run", "RUN [RUN…]", "fourfold report --help"), where="fourfold report")
    try:
        page = write_report([find_run(word, "fourfold report") for word in dict.fromkeys(words)])
    except OSError as error:
        got = f"{error.filename or ', '.join(words)}: {os_error_text(error)}"
        raise SettingError(Problem(got, "files of a run that can be read"), where="fourfold report") from None
    print_text(str(page))
    return 0


def run_doctor(*, as_json: bool) -> int:
    """`fourfold doctor`; returns the exit code."""
    from fourfold.doctor.checks import check_machine, exit_code, format_findings, probe_machine

    facts = probe_machine()
    if not facts.torch_problem:
        from fourfold.doctor.checks import measure_gloo

        facts = dataclasses.replace(facts, gloo=measure_gloo())
    findings = check_machine(facts)
    if as_json:
        # `try`, as in the table of text: it is a keyword in Python only.
        rows = [{"try" if k == "attempt" else k: v for k, v in vars(finding).items()} for finding in findings]
        print(json.dumps(rows, indent=2))
    else:
        print_text(format_findings(findings))
    return exit_code(findings)
