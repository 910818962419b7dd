"""Requests to stop: the next step sees them; a process whose step does not end is terminated."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fourfold.environment import early_sigterm
from fourfold.environment.world import World
from fourfold.trainer import stop_signal
from fourfold.trainer.heartbeat import RECORD_WORDS, Heartbeat
from fourfold.words.errors import SettingError

SECONDS = 60.0  # a command takes half a second on an idle machine


def heartbeat() -> Heartbeat:
    return Heartbeat(memoryview(bytearray(8 * RECORD_WORDS)).cast("q"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_signal_is_recorded_and_the_previous_handlers_are_restored(
    number: signal.Signals, tmp_path: Path
) -> None:
    before = signal.getsignal(number)
    with stop_signal.handle_stop_signals(heartbeat(), tmp_path, World(), limit_seconds=600.0) as request:
        assert request() == 0
        os.kill(os.getpid(), number)
        assert request() == number
    assert signal.getsignal(number) == before
    assert signal.set_wakeup_fd(-1) == -1


def test_the_users_signal_handlers_and_event_loop_are_left_alone(tmp_path: Path) -> None:
    received: list[int] = []
    read_fd, write_fd = os.pipe()
    os.set_blocking(write_fd, False)
    before = [signal.signal(number, lambda got, _: received.append(got)) for number in (signal.SIGTERM, signal.SIGUSR1)]
    signal.set_wakeup_fd(write_fd)
    try:
        with stop_signal.handle_stop_signals(heartbeat(), tmp_path, World(), limit_seconds=600.0) as request:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGUSR1)
            assert sorted(os.read(read_fd, 1) + os.read(read_fd, 1)) == [signal.SIGUSR1, signal.SIGTERM]
            assert request() == 0
        assert sorted(received) == [signal.SIGUSR1, signal.SIGTERM]
        assert signal.set_wakeup_fd(-1) == write_fd
    finally:
        signal.set_wakeup_fd(-1)
        for number, handler in zip((signal.SIGTERM, signal.SIGUSR1), before, strict=True):
            signal.signal(number, handler)
        os.close(read_fd)
        os.close(write_fd)


CHILD = """
import ctypes, os, signal, sys, threading, time
from pathlib import Path
from fourfold.environment.world import World
from fourfold.trainer import stop_signal
from fourfold.trainer.heartbeat import RECORD_WORDS, Heartbeat


def block_in_c():
    # Blocks in a C call that no signal interrupts, so that Python runs no handler: it locks a mutex twice.
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):
        ctypes.CDLL(None).pthread_mutex_lock(mutex)


stop_signal.INTERRUPT_SECONDS = 0.1
heartbeat = Heartbeat(memoryview(bytearray(8 * RECORD_WORDS)).cast("q"))
with stop_signal.handle_stop_signals(heartbeat, Path("."), World(), limit_seconds=float(sys.argv[1])) as request:
    print("ready", flush=True)
"""


def child(body: str, folder: Path, *, limit: float = 600.0) -> "subprocess.Popen[str]":
    return start(CHILD + "".join(f"    {line}\n" for line in body.splitlines()), folder, str(limit))


def start(script: str, folder: Path, *arguments: str) -> "subprocess.Popen[str]":
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", script, *arguments]
    process = subprocess.Popen(command, cwd=folder, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


WAITS = """from fourfold.trainer.heartbeat import WAIT_WORDS, known_waits
known_waits.write_to(heartbeat._words[WAIT_WORDS])
with known_waits.waiting_for("an origin"):
    block_in_c()"""


@pytest.mark.parametrize(("body", "wait"), [("block_in_c()", ""), (WAITS, ", waiting for an origin")])
def test_a_process_whose_step_does_not_end_is_terminated_and_its_stack_reported(
    tmp_path: Path, body: str, wait: str
) -> None:
    stuck = child(body, tmp_path, limit=0.2)
    stuck.send_signal(signal.SIGTERM)
    _, err = stuck.communicate(timeout=SECONDS)
    assert stuck.returncode == 75
    assert err.startswith(
        "fourfold: stopped by SIGTERM: no step, evaluation or checkpoint ended within 0.2 s (FOURFOLD_STOP_SECONDS)"
        f"{wait}; nothing is saved, and the same command starts over\nit was here, innermost first\n"
    )
    assert ", in block_in_c\n" in err


def test_sigterm_before_training_ends_a_process_that_waits_in_c(tmp_path: Path) -> None:
    begin, _, _ = CHILD.partition("stop_signal.INTERRUPT_SECONDS")
    early = "from fourfold.environment.early_sigterm import *\ninstall()\nanswer_in_thread()\n"
    stuck = start(f"{begin}{early}print('ready', flush=True)\nblock_in_c()", tmp_path)
    stuck.send_signal(signal.SIGTERM)
    _, err = stuck.communicate(timeout=SECONDS)
    assert (stuck.returncode, err) == (75, "fourfold: stopped by SIGTERM; run the same command again\n")


AFTER = """
import atexit
import fourfold.cli
from fourfold.cli import entry
from fourfold.environment import early_sigterm


def end():
    print("ready", flush=True)
    sys.stdin.read()


def run(_):
    early_sigterm.answer_in_thread()
    with stop_signal.handle_stop_signals(heartbeat, Path("."), World(), limit_seconds=9.0):
        os.fork() or os._exit(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL and signal.set_wakeup_fd(-1) == -1)
        assert os.waitstatus_to_exitcode(os.wait()[1]) == 1
    if sys.argv[1] == "first":
        atexit.register(end)


if sys.argv[1] == "last":
    atexit.register(end)
entry.main = run
fourfold.cli.main()
"""


@pytest.mark.parametrize(
    ("exit_function", "expected"),
    [
        ("first", (75, "fourfold: stopped by SIGTERM; run the same command again\n")),
        ("last", (0, "")),  # Python has no handlers from here on
    ],
)
def test_sigterm_after_its_work_never_ends_a_command_with_pythons_own_code(
    tmp_path: Path, exit_function: str, expected: tuple[int, str]
) -> None:
    ending = start(CHILD.partition("with stop_signal")[0] + AFTER, tmp_path, exit_function)
    ending.send_signal(signal.SIGTERM)
    _, err = ending.communicate("", timeout=SECONDS)
    assert (ending.returncode, err) == expected


ANSWERING = """
import os, threading, time
from fourfold.environment import early_sigterm

write, has_begun = os.write, threading.Event()


def slow(*args):
    has_begun.set()
    time.sleep(0.3)
    return write(*args)


early_sigterm.install()
os.write = slow
threading.Thread(target=early_sigterm.exit_requeued, daemon=True).start()
has_begun.wait()
"""


def test_a_command_that_ends_while_sigterm_is_answered_has_the_code_of_the_answer() -> None:
    command = [sys.executable, "-c", ANSWERING]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert (done.returncode, done.stderr) == (75, "fourfold: stopped by SIGTERM; run the same command again\n")


BUSY = "while True: time.sleep(0.01)"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_a_stop_request_is_honoured_if_stderr_cannot_be_written(tmp_path: Path) -> None:
    body = "os.dup2(os.open('/dev/full', os.O_WRONLY), 2)\nprint('full', flush=True)\nblock_in_c()"
    process = child(body, tmp_path)
    assert process.stdout is not None
    assert process.stdout.readline() == "full\n"
    process.send_signal(signal.SIGINT)
    time.sleep(stop_signal.REPEAT_SECONDS[signal.SIGINT] + 0.2)
    process.send_signal(signal.SIGINT)
    try:
        assert process.wait(SECONDS) == 130
    finally:
        process.kill()


@pytest.mark.parametrize("body", ["block_in_c()", BUSY])
def test_a_second_sigterm_ends_a_process_at_once(body: str, tmp_path: Path) -> None:
    process = child(body, tmp_path)
    deadline = time.monotonic() + SECONDS
    while process.poll() is None:
        assert time.monotonic() < deadline
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.2)
    assert process.returncode == 75
    err = process.communicate()[1]
    assert err.startswith("fourfold: stopped at once by SIGTERM, the second request; nothing is saved")


@pytest.mark.parametrize("body", ["block_in_c()", BUSY])
def test_a_second_ctrl_c_ends_a_process_at_once(body: str, tmp_path: Path) -> None:
    process = child(f"try:\n    {body}\nexcept KeyboardInterrupt:\n    sys.exit('interrupted')", tmp_path)
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    err = process.stderr.readline()
    assert err == "fourfold: SIGINT: saving after this step, then ending; Ctrl-C again ends at once\n"
    time.sleep(stop_signal.REPEAT_SECONDS[signal.SIGINT] + 0.05)
    process.send_signal(signal.SIGINT)
    rest = process.communicate(timeout=SECONDS)[1]
    if body == BUSY:
        assert (process.returncode, rest) == (1, "interrupted\n")
    else:
        assert process.returncode == 130
        assert rest.startswith("fourfold: stopped by SIGINT: it did not end by itself; nothing is saved")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, None)])
def test_signals_in_quick_succession_are_one_request(
    number: signal.Signals, code: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # GNU timeout signals its child, and then the process group that it is in.
    now, ends, interrupts = [100.0], [], []
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr("os._exit", ends.append)
    monkeypatch.setattr("_thread.interrupt_main", interrupts.append)
    with handler_without_signals(tmp_path) as requests:
        for later in (0.0, 0.0, 0.9 * stop_signal.REPEAT_SECONDS[number]):
            now[0] = 100.0 + later
            requests._on_wakeup_byte(number)
        assert not ends
        assert not interrupts
        now[0] = 100.0 + 1.1 * stop_signal.REPEAT_SECONDS[number]
        requests._on_wakeup_byte(number)
    assert [*ends, *interrupts] == [code or signal.SIGINT]


@contextlib.contextmanager
def handler_without_signals(folder: Path, beats: Heartbeat | None = None) -> Iterator[stop_signal.StopSignalHandler]:
    """A handler in a process that gets no signals: the tests call it with signal numbers."""
    signals = [signal.SIGTERM, signal.SIGINT]
    requests = stop_signal.StopSignalHandler(signals, beats or heartbeat(), folder, World(), 25.0)
    try:
        yield requests
    finally:
        os.close(requests._read_fd)
        os.close(requests._write_fd)


FORK = """
def fork():
    number = os.fork()
    if number == 0:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
        os._exit(1)
    print(os.waitstatus_to_exitcode(os.waitpid(number, 0)[1]))
fork()
thread = threading.Thread(target=fork)
thread.start()
thread.join()
print(request())
"""


def test_a_forked_process_handles_its_own_signals(tmp_path: Path) -> None:
    process = child(FORK, tmp_path)
    assert process.stdout is not None
    assert process.stderr is not None
    # Not by `communicate`, which skips what `readline` has read ahead of its line.
    out, err = process.stdout.read(), process.stderr.read()
    assert (process.wait(SECONDS), out, err) == (0, "-15\n-15\n0\n", "")


def test_the_end_of_a_step_extends_the_stop_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    beats = heartbeat()
    with handler_without_signals(tmp_path, beats) as requests:
        now[0] = 200.0
        requests._on_wakeup_byte(signal.SIGTERM)
        assert requests._deadline() == 225.0
        now[0] = 210.0
        beats.beat(1)
        assert requests._deadline() == 235.0
        with beats.pause():
            now[0] = 230.0
        assert requests._deadline() == 255.0


def test_stop_seconds_must_be_a_positive_number() -> None:
    assert stop_signal.stop_seconds({}) == stop_signal.stop_seconds({stop_signal.STOP_SECONDS_VARIABLE: ""}) == 25.0
    assert stop_signal.stop_seconds({stop_signal.STOP_SECONDS_VARIABLE: "0.5"}) == 0.5
    for text in ("0", "-1", "nan", "inf", "1e300", "soon"):
        with pytest.raises(SettingError, match="a number of seconds above 0"):
            stop_signal.stop_seconds({stop_signal.STOP_SECONDS_VARIABLE: text})


def test_a_command_within_a_program_leaves_its_signals_as_they_were():
    before = signal.getsignal(signal.SIGTERM)
    early_sigterm.install()
    early_sigterm.answer_in_thread()
    early_sigterm.restore()
    assert signal.set_wakeup_fd(-1) == -1
    assert signal.getsignal(signal.SIGTERM) == before
