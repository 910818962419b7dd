"""Local launch: start the ranks of a command on this machine, and print how they end."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fourfold.cli import sigint
from fourfold.environment.fast_imports import collection_paused
from fourfold.environment.standard_streams import print_stderr, redirect_to_null
from fourfold.words.terminal_text import escape_controls

if TYPE_CHECKING:
    from fourfold.launcher.restart_policy import SupervisionPolicy

SHOW_CURSOR = "\x1b[?25h"


def launch_quietly(command: Sequence[str], num_processes: int) -> int:
    """Run a command in so many processes, without restarts; returns the exit code."""
    from fourfold.launcher.restart_policy import SupervisionPolicy

    return launch(command, num_processes, SupervisionPolicy(max_restarts=0, notify=print_error))


def launch(command: Sequence[str], num_processes: int, policy: "SupervisionPolicy", *, is_forked: bool = False) -> int:
    """Run a command in so many processes under a policy; returns the exit code."""
    with collection_paused():
        from fourfold.launcher import local_job
        from fourfold.launcher.rank_start import fork_rank, spawn_rank

    sigint.restore_and_raise()
    start_rank = fork_rank if is_forked else spawn_rank
    outcome = local_job.launch(command, num_processes=num_processes, policy=policy, start_rank=start_rank)
    if outcome.text:
        print_error(outcome.text)
    return outcome.exit_code


def print_error(text: str) -> None:
    """Report the end of ranks, or a fault after which the job goes on."""
    if sys.stdout.isatty():
        try:
            # With the new line: a rank that was killed may have left half a progress line.
            print(SHOW_CURSOR, flush=True)
        except OSError:  # the terminal is gone
            redirect_to_null(sys.stdout)
    print_stderr(f"fourfold: {escape_controls(text)}")
