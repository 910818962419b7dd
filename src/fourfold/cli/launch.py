"""Launch: the ranks of a command are started on this machine, forked where that is safe.

fork  the launcher imports torch once, and the checks and the ranks are copies of it
Law: the launcher itself runs nothing of the user's and starts no thread, so that its copies begin like new processes.
What a task does to its process (threads, a GPU's driver, open files) ends with the copy that checks it.
"""

import importlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fourfold.cli import sigint
from fourfold.environment import early_sigterm
from fourfold.environment.fast_imports import collection_paused
from fourfold.environment.processes import end_with_parent
from fourfold.environment.standard_streams import flush_streams, print_stderr, redirect_to_null
from fourfold.environment.temporary_folder import temporary_folder
from fourfold.launcher.process_defaults import launch_variables, may_have_gpus
from fourfold.words.terminal_text import escape_controls

if TYPE_CHECKING:
    from fourfold.cli.run import Run
    from fourfold.launcher.restart_policy import SupervisionPolicy


IMPORTED_ONCE = ("fourfold.trainer.train", "fourfold.trainer.progress", "fourfold.cli.job", "fourfold.launcher.worker")
MODULE, SCRIPT = Path(__file__).parent.parent / "__main__.py", "fourfold"  # `python -m fourfold`, and what pip installs
REQUEST_FILE, RESULT_FILE = "request.json", "result.json"


def becomes_forking_launcher(num_processes: int) -> bool:
    """Print how many processes are about to start. True if this process has become a launcher that forks them."""
    forks = num_processes > 1 and _can_fork()
    if forks:
        _set_launch_variables(num_processes)
    print(f"starting {num_processes} process{'es' if num_processes > 1 else ''}", flush=True)
    if forks:  # what the ranks need, so that their copies have it
        with collection_paused():
            for module in IMPORTED_ONCE:
                importlib.import_module(module)
    return forks


def _can_fork() -> bool:
    """Whether this process may become a launcher that forks its ranks.

    Not with a GPU (its driver does not survive a fork), not where another program calls the command line (which may
    have threads, and torch with other settings), and not where forks are not safe (macOS) or do not exist.
    """
    script = Path(sys.argv[0])
    is_command = script == MODULE or script.name == SCRIPT
    has_only_this_thread = threading.active_count() == 1
    return is_command and has_only_this_thread and "torch" not in sys.modules and not may_have_gpus()


def _set_launch_variables(num_processes: int) -> None:
    """Give this process the variables that its ranks begin with; torch reads some of them when it is imported.

    glibc reads its own only when a program begins. If they are not set yet, this process starts the same command again
    in its own place, and does not return.
    """
    wanted = launch_variables(num_processes)
    missing = {name: value for name, value in wanted.items() if os.environ.get(name) != value}
    os.environ.update(missing)
    if any(name.startswith("GLIBC_") for name in missing):
        sigint.raise_pending()
        flush_streams()
        early_sigterm.keep_over_exec()
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


class Ended(NamedTuple):
    """How a copy of this process, or ranks, have ended; and what they, or rank 0, have written unless they failed.

    stop_code  see `local_job.JobResult`
    """

    exit_code: int
    result: Any = None
    stop_code: int = 0


def run_in_copy(check: Callable[[], Any]) -> Ended:
    """Call `check` in a copy of this process. JSON can write its result; an error the copy has reported itself."""
    from fourfold.launcher.failure_report import killed_by
    from fourfold.launcher.forked_process import fork

    launcher = os.getpid()
    with temporary_folder() as folder:
        copy = fork(lambda: _check(check, folder / RESULT_FILE, launcher))
        try:
            code = copy.wait()
        finally:
            copy.kill()
        if code == -signal.SIGTERM:
            early_sigterm.exit_requeued()
        ended = _ended(code, folder)
        if code < 0 or (code == 0 and ended.result is None):
            how = killed_by(-code) if code < 0 else "ended by itself, with exit code 0"
            print_stderr(f"fourfold: the process that checked the task {how}")
            return Ended(1)
        return ended


def _ended(code: int, folder: Path) -> Ended:
    path = folder / RESULT_FILE
    return Ended(code, json.loads(path.read_text(encoding="utf-8")) if code == 0 and path.exists() else None)


def _check(check: Callable[[], Any], result: Path, launcher: int) -> None:
    from fourfold.cli.errors import report_error
    from fourfold.launcher.worker import exit_fast

    end_with_parent(launcher)
    # Ctrl-C reaches the launcher too, which ends this process and reports it.
    signal.signal(signal.SIGINT, lambda *_: None)
    try:
        result.write_text(json.dumps(check()), encoding="utf-8")
    except BaseException as error:  # a task may raise any, such as pytest's Skipped
        exit_fast(report_error(error))
    exit_fast(0)


# ---- the ranks -------------------------------------------------------------------------------------------------------


SHOW_CURSOR = "\x1b[?25h"


def launch_ranks(
    program: str, run: "Run", *, policy: "SupervisionPolicy | None" = None, is_forked: bool = False, **options: Any
) -> Ended:
    """Run a program of `rank_main` in as many processes as the plan of `run` has ranks.

    options  of the program, which JSON can write
    """
    assert run.decided is not None
    request = {"program": program, "run": run.to_json(), "options": options}
    with temporary_folder() as folder:
        (folder / REQUEST_FILE).write_text(json.dumps(request), encoding="utf-8")
        command = ["-m", "fourfold.cli.rank_main", str(folder)]
        ended = launch(command, run.decided.mesh.size, policy, is_forked=is_forked)
        return _ended(ended.exit_code, folder)._replace(stop_code=ended.stop_code)


def launch(
    command: Sequence[str], num_processes: int, policy: "SupervisionPolicy | None" = None, *, is_forked: bool = False
) -> Ended:
    """Run a command in so many processes. `policy`: None: without restarts."""
    with collection_paused():
        from fourfold.launcher import local_job
        from fourfold.launcher.rank_start import fork_rank, spawn_rank
        from fourfold.launcher.restart_policy import SupervisionPolicy

    sigint.restore_and_raise()
    start_rank = fork_rank if is_forked else spawn_rank
    policy = policy or SupervisionPolicy(max_restarts=0, notify=print_error)
    outcome = local_job.launch(command, num_processes=num_processes, policy=policy, start_rank=start_rank)
    if outcome.text:
        print_error(outcome.text)
    return Ended(outcome.exit_code, stop_code=outcome.stop_code)


def print_error(text: str) -> None:
    """Report the end of ranks, or a fault after which the job goes on."""
    if sys.stdout.isatty():
        try:
            # With the new line: a rank that was killed may have left half a progress line.
            print(SHOW_CURSOR, flush=True)
        except OSError:  # the terminal is gone
            redirect_to_null(sys.stdout)
    print_stderr(f"fourfold: {escape_controls(text)}")
