"""Worker: one rank of a local job. Runs a script, or `-m module`, as Python itself would.

    python -m fourfold.launcher.worker LAUNCHER_PID SCRIPT.py [arguments…]
    python -m fourfold.launcher.worker LAUNCHER_PID -m MODULE [arguments…]

Law: the program sees the command line, the path and the exit codes that it would see without a launcher; an error that
it raises goes to a record, from which the launcher reports it once.
"""

import atexit
import contextlib
import faulthandler
import os
import runpy
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from fourfold.environment import standard_streams
from fourfold.environment.processes import end_with_parent
from fourfold.launcher import env_store, failure_report, hang_detector
from fourfold.words.errors import INTERRUPT_EXIT_CODE, REQUEUE_EXIT_CODE, os_error_text

EXIT_SECONDS = 2.0  # how long a failed rank may take for its atexit functions and threads


def main(arguments: Sequence[str]) -> None:
    launcher, *command = arguments
    end_with_parent(int(launcher))
    # Read now: the program may change its environment.
    rank, path = int(os.environ["RANK"]), Path(os.environ["TORCHELASTIC_ERROR_FILE"])
    faulthandler.enable(all_threads=False)
    _dump_stack_on_signal()
    env_store.install()
    try:
        run_program(command)
    except SystemExit as leaving:
        if failure_report.exit_code(leaving):
            _exit_failed(leaving, rank, path)
        _write_end_record(rank, path)
        raise
    except BaseException as error:  # whatever the program raises, such as asyncio.CancelledError
        _exit_failed(error, rank, path)
    _write_end_record(rank, path)


def _write_end_record(rank: int, path: Path) -> None:
    with contextlib.suppress(OSError):  # without the record, a rank that still waits for this one reports a death
        failure_report.save_record(path, failure_report.end_record(rank))


def run_program(command: Sequence[str]) -> None:
    """Run `[script, *arguments]` or `["-m", module, *arguments]` in this process, as `__main__`.

    If the program ends well and leaves a gloo process group behind, the group is destroyed at exit: otherwise gloo's
    threads may abort the process.
    """
    atexit.register(destroy_group, os.getpid())
    try:
        _run_target(command)
    except BaseException as error:
        if not isinstance(error, SystemExit) or error.code not in (None, 0):
            # It may have left a collective midway, and its group would wait for that.
            atexit.unregister(destroy_group)
        raise


def _run_target(command: Sequence[str]) -> None:
    if command[0] == "-m":
        sys.argv = list(command[1:])
        if not hasattr(sys.modules.get(command[1]), "__path__"):  # a package stays, with its modules
            sys.modules.pop(command[1], None)  # a launcher that this was forked from may have imported it
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = list(command)
    if not sys.flags.safe_path:
        sys.path[0] = str(Path(command[0]).resolve().parent)
    runpy.run_path(command[0], run_name="__main__")


def destroy_group(process: int) -> None:
    """Destroy the process group, after the program's own atexit functions. Does nothing in a fork of the process."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or os.getpid() != process or not distributed.is_initialized():
        return
    if distributed.get_backend() == "gloo":
        from fourfold.comm.process_group_lifecycle import release_groups

        release_groups(include_world=True)


def _exit_failed(error: BaseException, rank: int, path: Path) -> NoReturn:
    """Write the record, before other ranks can notice that this one is gone, and exit."""
    entry = failure_report.make_record(error, rank=rank)
    try:
        failure_report.save_record(path, entry)
    except OSError as problem:  # a full disk: the launcher reports the exit code, this process the error
        standard_streams.print_stderr(
            f"rank {rank} failed, and its record could not be written: {os_error_text(problem)}\n{entry.text.rstrip()}"
        )
    if entry.exit_code in (REQUEUE_EXIT_CODE, INTERRUPT_EXIT_CODE):
        exit_fast(entry.exit_code)
    _exit_after(EXIT_SECONDS, entry.exit_code)
    sys.exit(entry.exit_code)


def exit_fast(exit_code: int) -> NoReturn:
    """End this process without the interpreter's shutdown, which takes up to seconds once torch is imported."""
    _exit_after(EXIT_SECONDS, exit_code)
    atexit._run_exitfuncs()
    standard_streams.flush_streams()
    os._exit(exit_code)


def _exit_after(seconds: float, exit_code: int) -> None:
    """Make sure that this process ends within `seconds`, whatever it does next.

    A thread of the user's, or a process group that waits for dead peers, must not keep a failed rank alive.
    """
    deadline = threading.Timer(seconds, os._exit, [exit_code])
    deadline.daemon = True
    deadline.start()


def _dump_stack_on_signal() -> None:
    """If the launcher watches for hangs: on its signal, write the stacks of all threads to a file."""
    folder = os.environ.get(hang_detector.STACKS_VARIABLE)
    if folder is not None:
        path = hang_detector.stack_file(Path(folder), int(os.environ["LOCAL_RANK"]))
        faulthandler.register(hang_detector.DUMP_SIGNAL, file=path.open("w"))


if __name__ == "__main__":
    main(sys.argv[1:])
