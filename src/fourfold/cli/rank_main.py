"""One rank of `fourfold train`: the same words, read again in a process of its own.

    python -m fourfold.cli.rank_main WORD…        started by engines.worker, in a world of a launcher's

Law: errors are left to the launcher, which tells the first cause once.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from fourfold.cli import job
from fourfold.environment.launchers import OPEN_MPI, detected_launchers
from fourfold.environment.world import World, from_environment
from fourfold.launch import failure_report
from fourfold.launch.restart_policy import resume_hint
from fourfold.launch.traceback_text import format_error
from fourfold.words.errors import FourfoldError, TrainingError


def main(words: Sequence[str]) -> None:
    world = from_environment()
    assert world is not None
    train(job.parse_job(words, num_processes=world.size), world)


def train(work: job.Job, world: World | None) -> None:
    """Train in this process; rank 0 shows how it goes.

    Raises TrainingError where the task ends the process: the others would wait for it. Its exit code is the task's,
    but never 0: the run has not ended.
    KeyboardInterrupt comes with what there is to say, "" where another rank says it.
    """
    try:
        _train(work, world)
    except SystemExit as leaving:
        code = failure_report.exit_code(leaving)
        where = format_error(leaving).rstrip()
        error = TrainingError(f"the task ended its process in mid-run, with exit code {code}\n{where}")
        error.exit_code = code or TrainingError.exit_code
        raise error from None
    except KeyboardInterrupt:
        speaks = world is None or world.rank == 0
        raise KeyboardInterrupt(f"stopped by SIGINT; {resume_hint(work.run_dir)}" if speaks else "") from None


def _train(work: job.Job, world: World | None) -> None:
    from fourfold.report.progress import Progress
    from fourfold.trainer.train import train as run

    if world is not None and world.rank > 0:
        run(work.task, work.plan, **work.settings)
        return
    # Open MPI gives every rank a terminal, wherever its own output goes: a file would fill with redrawn lines.
    progress = Progress(live=detected_launchers(os.environ)[:1] != [OPEN_MPI])
    try:
        result = run(work.task, work.plan, report=progress, **work.settings)
        if result.folder is not None:
            progress.print_message(_write_report(result.folder))
    finally:
        progress.close()


def _write_report(folder: Path) -> str:
    """Write the run's page; what is to be said of it. A run that has ended well is not failed for a drawing."""
    from fourfold.report.page import write_report

    try:
        return f"report   {write_report([folder])}"
    except (FourfoldError, OSError) as error:
        return f"no report: {error}"


if __name__ == "__main__":
    main(sys.argv[1:])
