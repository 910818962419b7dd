"""Run commands: check everything, then train in this process, start several, or join those of a launcher.

Law: a single rank runs in this process; several processes start only after everything has been checked.
"""

import dataclasses
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fourfold.cli import sigint
from fourfold.cli.launch import can_fork, import_once, launch, print_error, run_in_copy, set_launch_variables
from fourfold.cli.output import print_text, write_file
from fourfold.cli.plan.arguments import PLAN_AUTO, training_words, wants_plan
from fourfold.environment import early_sigterm
from fourfold.environment.world import World, from_environment
from fourfold.words.errors import Problem, SettingError, os_error_text
from fourfold.words.run_files import RUNS_DIR
from fourfold.words.terminal_text import align_columns

if TYPE_CHECKING:
    from fourfold.cli.job import Job
    from fourfold.launcher.restart_policy import SupervisionPolicy


RESTART_COUNT_VARIABLE = "TORCHELASTIC_RESTART_COUNT"
VERIFY_STEPS = 3


def train(words: Sequence[str], processes: str | None) -> int:
    """`fourfold train`; returns the exit code."""
    from fourfold.cli import job, sweep
    from fourfold.cli.run import check_named_files, resolve
    from fourfold.launcher.process_defaults import check_num_processes

    world = from_environment()
    required, has_own_ranks = check_num_processes(processes, world), world is None
    asks_for_plan = wants_plan(words)
    check_named_files(training_words(words))
    if swept := sweep.swept_values([word for word in words if word != PLAN_AUTO]):
        return _train_sweep(words, swept, required, world)
    if asks_for_plan:
        from fourfold.cli.plan import auto as plan_auto

        words = plan_auto.resolve_words(words, num_processes=required, world=world)
    if world is None or world.rank == 0:
        for line in resolve(words).recipe_lines:
            print(line, flush=True)
    if has_own_ranks and _becomes_forking_launcher(resolve(words).planned_size(required)):

        def check() -> dict[str, Any]:
            ready = job.prepare_job(words, num_processes=required)
            return dataclasses.asdict(_check_run(ready, words, is_reporter=True, has_own_ranks=True))

        checked = run_in_copy(check)
        return checked if isinstance(checked, int) else _launch_run(_CheckedRun(**checked), is_forked=True)
    ready = job.prepare_job(words, num_processes=required)
    run = _check_run(ready, words, is_reporter=world is None or world.rank == 0, has_own_ranks=has_own_ranks)
    if run.is_finished:
        return 0
    if world is not None or ready.num_processes == 1:
        from fourfold.cli import rank_main

        sigint.restore_and_raise()
        early_sigterm.answer_in_thread()
        rank_main.train(ready, world)
        return 0
    return _launch_run(run)


def _launch_run(run: "_CheckedRun", *, is_forked: bool = False) -> int:
    if run.is_finished:
        return 0
    command = ["-m", "fourfold.cli.rank_main", *run.words]
    return launch(command, run.num_processes, _supervision_policy(run), is_forked=is_forked)


def _becomes_forking_launcher(num_processes: int | None) -> bool:
    """Print how many processes are about to start. True if this process has become a launcher that forks them.

    num_processes: None if the command is wrong, and so starts none
    """
    if num_processes is None:
        return False
    forks = num_processes > 1 and can_fork()
    if forks:
        set_launch_variables(num_processes)
    print(f"starting {num_processes} process{'es' if num_processes > 1 else ''}", flush=True)
    if forks:
        import_once()
    return forks


@dataclass(frozen=True)
class _CheckedRun:
    """What a launcher needs to know of a run that may begin. `words`: those of its ranks."""

    words: Sequence[str]
    num_processes: int
    run_dir: str
    restarts: int
    hang_seconds: float | None
    is_finished: bool


def _check_run(ready: "Job", words: Sequence[str], *, is_reporter: bool, has_own_ranks: bool) -> _CheckedRun:
    """What is to be launched. With `fresh`, the run that was there is moved aside."""
    is_finished = False
    if ready.fresh:
        words = _start_over(ready, words, is_reporter=is_reporter, has_own_ranks=has_own_ranks)
    else:
        is_finished = _check_finished(ready, is_reporter=is_reporter)
    run_dir = str(ready.run_dir)
    return _CheckedRun(words, ready.num_processes, run_dir, ready.restarts, ready.hang_seconds, is_finished)


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


def _train_sweep(
    words: Sequence[str], swept: dict[str, list[str]], num_processes: int | None, world: World | None
) -> int:
    """Each combination as a run in processes of its own, so that one that dies does not end the others."""
    from fourfold.cli import job, sweep

    if world is not None:
        got = f"{' and '.join(swept)} with several values, under another launcher"
        raise SettingError(
            Problem(got, "one value of each in a job", "fourfold train, which starts the processes itself")
        )

    def train_member(own: Sequence[str]) -> int:
        ready = job.parse_job(own, num_processes=num_processes)
        return _launch_run(_check_run(ready, own, is_reporter=True, has_own_ranks=True))

    return sweep.run_sweep(sweep.prepare_sweep(words, swept, num_processes=num_processes), train_member)


def _start_over(ready: "Job", words: Sequence[str], *, is_reporter: bool, has_own_ranks: bool) -> Sequence[str]:
    """Move the run's folder aside, in one process; returns the words for the ranks.

    A settings file in that folder moves with it. Raises SettingError if ranks of another launcher might read it later.
    """
    from fourfold.trainer.run_dir import archive_run

    here = ready.run_dir.absolute()
    inside = [word for word in words if word.endswith(".toml") and Path(word).absolute().is_relative_to(here)]
    if inside and not has_own_ranks:
        got = f"fresh=true, which moves {inside[0]} away with its run"
        raise SettingError(Problem(got, "a file outside the run's folder", f"a copy of {inside[0]}"))
    # When a launcher restarts its ranks, the run must not start over again.
    if not is_reporter or os.environ.get(RESTART_COUNT_VARIABLE, "0") != "0":
        return words
    archived = archive_run(ready.run_dir)
    if archived is None:
        return words
    print_text(f"{ready.run_dir} starts over; the earlier run is now {archived}")
    return [str(archived / Path(word).absolute().relative_to(here)) if word in inside else word for word in words]


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
    return launch(
        command,
        num_processes,
        SupervisionPolicy(max_restarts=int(restarts), save_seconds=stop_seconds(), notify=print_error),
    )


def show(words: Sequence[str], page: str | None = None) -> int:
    """`fourfold show`; returns the exit code. `page`: the file of an HTML page, instead of a text."""
    from fourfold.cli.run import check_named_files, resolve
    from fourfold.plan.recipes import RECIPE_PREFIX, SHIPPED_PLANS, recipe_summary

    run = resolve(words)
    if run.plan_file == RECIPE_PREFIX:
        for line in align_columns(
            [(f"{RECIPE_PREFIX}{name}", recipe_summary(name)) for name in SHIPPED_PLANS.names()], "<<"
        ):
            print_text(line)
        return 0
    check_named_files(words)
    from fourfold.cli import job

    if not run.has_plan:
        job.parse_job(words, has_run_dir=False)  # a field may be misspelt
        raise SettingError(Problem("no plan", "a plan or settings file, or fields of a plan", "fourfold show dp=2"))
    from fourfold.cli.plan.run import describe_prediction
    from fourfold.report.document import render
    from fourfold.report.plan_pages import describe_plan
    from fourfold.show.describe import show as show_plan
    from fourfold.tasks.lm import LAYERS

    # dp is 1 unless given: the output must not depend on this machine.
    words = [*words] if run.has_dp else [*words, "dp=1"]
    ready = job.parse_job(words, has_run_dir=False)
    if not run.has_model and (num_stages := ready.plan.num_stages) > LAYERS:
        # The plan is asked about, not a model: that has a layer for each stage.
        ready = job.parse_job([*words, f"layers={num_stages}"], has_run_dir=False)
    text = show_plan(ready.plan, ready.task) + describe_prediction(ready)
    if page is None:
        print_text(text)
    else:
        write_file(Path(page), render(describe_plan(ready.plan, text)), where="fourfold show")
        print_text(page)
    return 0


def verify(words: Sequence[str], processes: str | None) -> int:
    """`fourfold verify`; returns the exit code."""
    from fourfold.cli import job
    from fourfold.cli.run import check_named_files, resolve
    from fourfold.launcher.process_defaults import check_num_processes
    from fourfold.launcher.restart_policy import SupervisionPolicy

    run = resolve(words)
    check_named_files(words)
    if not run.has_plan:
        job.parse_job(words, has_run_dir=False)  # a field may be misspelt
        need = "a plan or settings file, or fields of a plan; or a script, whose plan is in it"
        raise SettingError(Problem("no plan", need, "fourfold verify lm dp=2 zero=1"), where="fourfold verify")
    words = [*words] if "steps" in run.texts else [*words, f"steps={VERIFY_STEPS}"]
    world = from_environment()
    required = check_num_processes(processes, world)

    def check() -> job.Job:
        from fourfold.verification.command import check_verifiable

        plan = job.parse_job(words, num_processes=required, has_run_dir=False).plan
        check_verifiable(plan)
        return job.prepare_job(words, num_processes=required, has_run_dir=False)

    command, policy = ["-m", "fourfold.cli.verify", *words], SupervisionPolicy(max_restarts=0, notify=print_error)
    if world is None and _becomes_forking_launcher(resolve(words).planned_size(required)):
        checked = run_in_copy(lambda: {"num_processes": check().num_processes})
        return checked if isinstance(checked, int) else launch(command, **checked, policy=policy, is_forked=True)
    ready = check()
    if world is not None or ready.num_processes == 1:
        from fourfold.cli import verify

        verify.verify(ready, world)
        return 0
    return launch(command, ready.num_processes, policy)


def report(words: Sequence[str]) -> int:
    """`fourfold report`; returns the exit code."""
    from fourfold.report.page import write_report
    from fourfold.report.run_record import find_run

    if not words:
        raise SettingError(Problem("no run", "RUN [RUN…]", "fourfold report --help"), where="fourfold report")
    try:
        page = write_report([find_run(word, parent=Path(RUNS_DIR)) for word in dict.fromkeys(words)])
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
        print(json.dumps([_json_row(dataclasses.asdict(finding)) for finding in findings], indent=2))
    else:
        print_text(format_findings(findings))
    return exit_code(findings)


def _json_row(row: dict[str, str]) -> dict[str, str]:
    """A finding with `try` for `attempt`, as in the table of text: `try` is a keyword in Python only."""
    return {("try" if name == "attempt" else name): value for name, value in row.items()}
