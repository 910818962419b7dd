"""Jobs of words, as the command line makes them."""

import dataclasses
from collections.abc import Iterable

from fourfold.cli import job
from fourfold.cli.run import Run, resolve


def parse_job(words: Iterable[str], *, num_processes: int | None = None, has_run_dir: bool = True) -> job.Job:
    """The job of a command line, for so many processes, without the checks that look at its data."""
    return job.parse_job(_run(words, num_processes), has_run_dir=has_run_dir)


def prepare_job(words: Iterable[str], *, num_processes: int | None = None, has_run_dir: bool = True) -> job.Job:
    """The same after all checks."""
    return job.prepare_job(_run(words, num_processes), has_run_dir=has_run_dir)


def _run(words: Iterable[str], num_processes: int | None) -> Run:
    run = resolve(words)
    return run if num_processes is None else dataclasses.replace(run, decided=run.plan(num_processes))
