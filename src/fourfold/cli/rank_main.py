"""One rank of a command: it trains, verifies, measures this machine or times plans, as its launcher asks.

    python -m fourfold.cli.rank_main FOLDER       started by launcher/worker.py

FOLDER   has the request, which the launcher has written: the program, the run, options; rank 0 writes the result there
Law: this file prints no error; the launcher reports the first cause once.
"""

import importlib
import json
import sys
import warnings
from pathlib import Path
from typing import Any

from fourfold.cli import job
from fourfold.cli.launch import REQUEST_FILE, RESULT_FILE
from fourfold.cli.output import wrap_log
from fourfold.cli.run import Run
from fourfold.environment.atomic_file import write_atomically
from fourfold.environment.fast_imports import collection_paused
from fourfold.environment.world import World, from_environment
from fourfold.launcher import failure_report
from fourfold.launcher.traceback_text import format_error
from fourfold.plan.plan import Plan
from fourfold.trainer.run_identity import resume_hint
from fourfold.words.error_notes import frame_place, user_frame
from fourfold.words.errors import FourfoldError, TrainingError
from fourfold.words.terminal_text import escape_controls, wrap_lines


def main(folder: str) -> None:
    wrap_log()
    request = json.loads(Path(folder, REQUEST_FILE).read_text(encoding="utf-8"))
    run = Run.from_json(request["run"])
    sys.argv[1:] = run.words  # a task may read them
    with collection_paused():  # the task imports torch too, and may do more than import
        importlib.import_module("fourfold.trainer.train")
    world = from_environment()
    assert world is not None
    program = PROGRAMS[request["program"]]
    result = program(job.parse_job(run, has_run_dir=program is train), world, **request["options"])
    if world.rank == 0 and result is not None:
        write_atomically(Path(folder, RESULT_FILE), json.dumps(result).encode())


def train(prepared: job.Job, world: World | None) -> None:
    """Train in this process; rank 0 shows the progress.

    Raises TrainingError if the task ends the process, because the other ranks would wait for it. The error has the
    task's exit code, but never 0: the run has not ended.
    Raises KeyboardInterrupt with the text to report; the text is "" on all ranks but 0.
    """
    if warnings.formatwarning.__module__ == warnings.__name__:  # else the task has one of its own
        warnings.formatwarning = _format_warning
    try:
        _train(prepared, world)
    except SystemExit as system_exit:
        code = failure_report.exit_code(system_exit)
        where = format_error(system_exit).rstrip()
        error = TrainingError(f"the task ended its process in the middle of the run, with exit code {code}\n{where}")
        error.exit_code = code or TrainingError.exit_code
        raise error from None
    except KeyboardInterrupt:
        is_reporter = world is None or world.rank == 0
        raise KeyboardInterrupt(f"stopped by SIGINT; {resume_hint(prepared.run_dir)}" if is_reporter else "") from None


def _format_warning(message: Warning | str, category: type[Warning], *_: object) -> str:
    """A warning, wrapped, with the user's line that it is about: Python names a line of ours."""
    return f"{wrap_lines(escape_controls(f'{category.__name__}: {message}{frame_place(user_frame())}'))}\n"


def _train(prepared: job.Job, world: World | None) -> None:
    from fourfold.trainer.progress import make_progress
    from fourfold.trainer.train import train as run

    if world is not None and world.rank > 0:
        run(prepared.task, prepared.plan, callbacks=prepared.callbacks, **prepared.settings)
        return
    progress = make_progress()
    try:
        result = run(prepared.task, prepared.plan, callbacks=prepared.callbacks, report=progress, **prepared.settings)
        if result.folder is not None:
            if world is None or world.local_size == world.size:
                from fourfold.cli.plan.run import record_prediction  # not earlier: it imports the planner

                if line := record_prediction(prepared, result.folder):
                    progress.print_message(line)
            progress.print_message(_write_report(result.folder))
    finally:
        progress.close()


def _write_report(folder: Path) -> str:
    """Write the run's page; returns the line to print. A page that cannot be written does not make the run fail."""
    from fourfold.report.page import write_report

    try:
        return f"report   {write_report([folder])}"
    except (FourfoldError, OSError) as error:
        return f"no report: {error}"


def _verify(prepared: job.Job, world: World) -> None:
    from fourfold.cli.verify import verify

    verify(prepared)


def _measure(prepared: job.Job, world: World, **conditions: Any) -> dict[str, Any]:
    from fourfold.cli.plan.machine import measure_rank

    return measure_rank(prepared, world, **conditions)


def _time(prepared: job.Job, world: World, *, plans: list[str]) -> list[float]:
    from fourfold.planner.time_plans import time_plans

    return time_plans(prepared.task, [Plan.from_toml(text) for text in plans], seed=prepared.settings.get("seed", 0))


PROGRAMS = {"train": train, "verify": _verify, "measure": _measure, "time": _time}

if __name__ == "__main__":
    main(sys.argv[1])
