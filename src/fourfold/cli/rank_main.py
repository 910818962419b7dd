"""One rank of `fourfold train`: it parses the same command line again, in its own process.

    python -m fourfold.cli.rank_main WORD…        started by launcher/worker.py

Law: this file prints no error; the launcher reports the first cause once.
"""

import importlib
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from fourfold.checkpoint.store import resume_hint
from fourfold.cli import job
from fourfold.cli.output import wrap_log
from fourfold.environment.fast_imports import collection_paused
from fourfold.environment.world import World, from_environment
from fourfold.launcher import failure_report
from fourfold.launcher.traceback_text import format_error
from fourfold.words.error_notes import frame_place, user_frame
from fourfold.words.errors import FourfoldError, TrainingError
from fourfold.words.terminal_text import escape_controls, wrap_lines


def main(words: Sequence[str]) -> None:
    wrap_log()
    with collection_paused():  # the task imports torch too, and may do more than import
        importlib.import_module("fourfold.trainer.train")
    world = from_environment()
    assert world is not None
    train(job.parse_job(words, num_processes=world.size), world)


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


if __name__ == "__main__":
    main(sys.argv[1:])
