"""Entry: what happens around every command: closed streams, Ctrl-C, errors, the exit code.

command  train, run, show, plan, verify, …; each checks all before it starts a process
Law: bad input is reported on stderr as got / need / try, all problems at once, with exit code 2 and no traceback.
"""

import os
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from fourfold.cli import sigint
from fourfold.environment.standard_streams import print_stderr, redirect_to_null
from fourfold.words.errors import os_error_text
from fourfold.words.terminal_text import escape_controls

PARSER_PACKAGES = {"typer", "click"}  # the packages that print the help


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """The `fourfold` command. Always ends the process: raises SystemExit."""
    _fill_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    sigint.install()
    try:
        code = _run_command(sys.argv[1:] if arguments is None else list(arguments))
        sys.stdout.flush()
    except KeyboardInterrupt as stop:
        code = _report_interrupt(stop)
    except OSError as error:
        # A reader that is gone (`fourfold show plan.toml | head`) is no fault; a full disk is.
        if not isinstance(error, BrokenPipeError):
            print_stderr(f"fourfold: the output could not be written: {os_error_text(error)}")
        redirect_to_null(sys.stdout)
        code = 1
    finally:
        sigint.restore()
    sys.exit(code)


def _fill_closed_streams() -> None:
    """Open the null device for streams that the caller has closed (`>&-`): otherwise a file may get their number."""
    for number, (name, mode) in enumerate({"stdin": "r", "stdout": "w", "stderr": "w"}.items()):
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode)  # noqa: SIM115
            if stream.fileno() == number:
                os.set_inheritable(number, True)
            setattr(sys, name, stream)


def _report_interrupt(stop: KeyboardInterrupt) -> int:
    """Report a Ctrl-C once, and ignore further ones. Returns the exit code that a shell would have."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    text = str(stop) if stop.args else "stopped by SIGINT"
    if text:
        print_stderr(f"fourfold: {escape_controls(text)}")
    return 128 + signal.SIGINT


def _is_output_error(error: BaseException) -> bool:
    """Whether a command's own `print` has failed, rather than a file or pipe of the task's."""
    if not isinstance(error, OSError) or error.filename is not None:
        return False
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    file = Path(frame.f_code.co_filename)
    return file.parent == Path(__file__).parent or not PARSER_PACKAGES.isdisjoint(file.parts[-3:-1])


def _run_command(arguments: list[str]) -> int:
    from fourfold.cli.commands import parse_command
    from fourfold.cli.output import wrap_log

    wrap_log()  # sources log while a command opens them
    try:
        command = parse_command(arguments)
        sigint.raise_pending()  # an interrupt makes typer end its parsing without an error
        return command() if command is not None else 0
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a task may raise any, such as pytest's Skipped
        if _is_output_error(error):
            raise
        from fourfold.cli.errors import report_error
        from fourfold.launcher.worker import exit_fast
        from fourfold.words.errors import INTERRUPT_EXIT_CODE, REQUEUE_EXIT_CODE

        code = report_error(error)
        if code in (REQUEUE_EXIT_CODE, INTERRUPT_EXIT_CODE):
            exit_fast(code)
        return code
