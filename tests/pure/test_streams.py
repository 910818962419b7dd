"""Streams that cannot be written: stdout and stderr on a full disk, or on a pipe whose reader is gone."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

FULL = "/dev/full"
SECONDS = 120

pytestmark = pytest.mark.skipif(not os.path.exists(FULL), reason="no /dev/full here")


@contextmanager
def unread() -> Iterator[int]:
    """A pipe whose reader is gone."""
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    try:
        yield write_fd
    finally:
        os.close(write_fd)


def run(code: str, *, out: int | None = None, err: int | None = None) -> "subprocess.CompletedProcess[str]":
    # Buffered, as by default: so the error comes when the buffer is written.
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-c", code]
    out, err = (subprocess.PIPE if stream is None else stream for stream in (out, err))
    return subprocess.run(command, stdout=out, stderr=err, env=environ, text=True, timeout=SECONDS, check=False)


SAY = "from fourfold.environment.standard_streams import print_stderr as say"
RUN_COMMANDS_SAY = "from fourfold.cli.launch import print_error as say"


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("from fourfold.cli import main; main(['nonsense'])", 2),
        (f"{RUN_COMMANDS_SAY}; say('rank 1 died; starting again'); say('again')", 0),
        ("import os; from fourfold.launcher.worker import exit_fast as end; os.dup2(2, 1); print('x'); end(75)", 75),
        (f"import sys; sys.stderr.close(); {SAY}; say('x')", 0),
        (f"import sys; sys.stderr = None; {SAY}; say('x')", 0),
    ],
)
@pytest.mark.parametrize("kind", ["full", "unread"])
def test_a_message_that_stderr_rejects_does_not_change_the_exit_code(code: str, expected: int, kind: str) -> None:
    with unread() if kind == "unread" else open(FULL, "w") as stream:
        number = stream if isinstance(stream, int) else stream.fileno()
        ended = run(code, err=number)
    assert (ended.returncode, ended.stdout) == (expected, "")


NOTES = """
import sys
from fourfold.trainer.progress import Progress
progress = Progress()
progress.print_message("first")
progress.print_message("second")
sys.exit(3)
"""


def test_a_run_whose_messages_cannot_be_written_continues() -> None:
    with unread() as stream:
        assert run(NOTES, out=stream, err=stream).returncode == 3


def test_output_that_does_not_fit_on_the_disk_is_reported_without_a_traceback() -> None:
    with open(FULL, "w") as stream:
        ended = run("from fourfold.cli import main; main(['--help'])", out=stream.fileno())
    message = "fourfold: the output could not be written: no space left on device\n"
    assert (ended.returncode, ended.stderr) == (1, message)


def test_a_command_whose_reader_has_gone_prints_no_error() -> None:
    with unread() as stream:
        ended = run("from fourfold.cli import main; main(['--help'])", out=stream)
    assert (ended.returncode, ended.stderr) == (1, "")


@pytest.mark.parametrize("error", ["BrokenPipeError(32, 'of its own')", "OSError(28, 'of its own')"])
def test_an_os_error_of_the_task_itself_is_reported(error: str) -> None:
    code = f"""
from fourfold.cli import commands, main
def fail(): raise {error}
commands.parse_command = lambda words: fail
main(["train"])
"""
    ended = run(code)
    assert ended.returncode == 1
    assert "of its own" in ended.stderr
