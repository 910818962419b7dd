"""Launch: the ranks of a command are started on this machine, forked where that is safe.

fork  the launcher imports torch once, and the checks and the ranks are copies of it
Law: the launcher itself runs nothing of the user's and starts no thread, so that its copies begin like new processes.
What a task does to its process (threads, a GPU's driver, open files) ends with the copy that checks it.
"""

import importlib
import json
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
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
    from fourfold.launcher.forked_process import ForkedProcess
    from fourfold.launcher.restart_policy import SupervisionPolicy


IMPORTED_ONCE = ("fourfold.trainer.train", "fourfold.trainer.progress", "fourfold.cli.job", "fourfold.launcher.worker")
MODULE, SCRIPT = Path(__file__).parent.parent / "__main__.py", "fourfold"  # `python -m fourfold`, and what pip installs
POLL_SECONDS = 0.05


def can_fork() -> bool:
    """Whether this process may become a launcher that forks its ranks.

    Not with a GPU (its driver does not survive a fork), not where another program calls the command line (which may
    have threads, and torch with other settings), and not where forks are not safe (macOS) or do not exist.
    """
    script = Path(sys.argv[0])
    is_command = script == MODULE or script.name == SCRIPT
    has_only_this_thread = threading.active_count() == 1
    return is_command and has_only_this_thread and "torch" not in sys.modules and not may_have_gpus()


def set_launch_variables(num_processes: int) -> None:
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


def import_once() -> None:
    """Import what the ranks need, so that their copies have it."""
    with collection_paused():
        for module in IMPORTED_ONCE:
            importlib.import_module(module)


def run_in_copy(check: Callable[[], Mapping[str, Any]]) -> dict[str, Any] | int:
    """The result of `check`, called in a copy of this process; the exit code if it fails, which it has then reported.

    The result is a mapping that JSON can write.
    """
    from fourfold.launcher.failure_report import killed_by
    from fourfold.launcher.forked_process import fork

    reader, writer = os.pipe()
    launcher = os.getpid()
    copy = fork(lambda: _check(check, writer, launcher), keep=(writer,))
    os.close(writer)
    try:
        line = _read_line(reader, copy)
        code = copy.wait()
    finally:
        os.close(reader)
        copy.kill()
    if code == -signal.SIGTERM:
        early_sigterm.exit_requeued()
    if code < 0:
        print_stderr(f"fourfold: the process that checked the task {killed_by(-code)}")
        return 1
    return code if line is None else json.loads(line)


def _read_line(pipe: int, writer: "ForkedProcess") -> bytes | None:
    """The line that a process writes; None if it ends without. What it has started may keep the pipe open."""
    content = b""
    while not content.endswith(b"\n"):
        has_ended = writer.poll() is not None
        if select.select([pipe], [], [], 0.0 if has_ended else POLL_SECONDS)[0]:
            more = os.read(pipe, 65536)
            content += more
            has_ended = not more
        if has_ended:
            return None
    return content


def _check(check: Callable[[], Mapping[str, Any]], writer: int, launcher: int) -> None:
    from fourfold.cli.errors import report_error
    from fourfold.launcher.worker import exit_fast

    end_with_parent(launcher)
    # Ctrl-C reaches the launcher too, which ends this process and reports it.
    signal.signal(signal.SIGINT, lambda *_: None)
    try:
        result = check()
    except BaseException as error:  # a task may raise any, such as pytest's Skipped
        exit_fast(report_error(error))
    with open(writer, "wb") as pipe:
        pipe.write(json.dumps(result).encode() + b"\n")
    exit_fast(0)


# ---- the ranks -------------------------------------------------------------------------------------------------------


SHOW_CURSOR = "\x1b[?25h"
REQUEST_FILE, RESULT_FILE = "request.json", "result.json"


class Launched(NamedTuple):
    """How ranks have ended. `result`: what rank 0 has written, if it has."""

    exit_code: int
    result: Any = None


def launch_ranks(
    program: str, run: "Run", *, policy: "SupervisionPolicy | None" = None, is_forked: bool = False, **options: Any
) -> Launched:
    """Run a program of `rank_main` in as many processes as the plan of `run` has ranks.

    options  of the program, which JSON can write
    """
    assert run.decided is not None
    request = {"program": program, "run": run.to_json(), "options": options}
    with temporary_folder() as folder:
        (folder / REQUEST_FILE).write_text(json.dumps(request), encoding="utf-8")
        command = ["-m", "fourfold.cli.rank_main", str(folder)]
        code = launch(command, run.decided.mesh.size, policy, is_forked=is_forked)
        result = folder / RESULT_FILE
        return Launched(code, json.loads(result.read_text(encoding="utf-8")) if result.exists() else None)


def launch(
    command: Sequence[str], num_processes: int, policy: "SupervisionPolicy | None" = None, *, is_forked: bool = False
) -> int:
    """Run a command in so many processes; returns the exit code. `policy`: None: without restarts."""
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
