"""Why a job ended: the first cause is reported once, with the lines of the user's code."""

import dataclasses
import itertools
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fourfold.cli import rank_main
from fourfold.launcher import failure_report
from fourfold.launcher.traceback_text import format_error
from fourfold.proof.checks import peer_failed
from fourfold.words import error_notes
from fourfold.words.error_notes import describe_function, noting
from fourfold.words.errors import PeerError, PlanError, Problem


def test_a_warning_fits_the_terminal_and_names_the_users_line_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    shown = rank_main._format_warning("a target of another size " * 9, UserWarning, "torch_losses.py", 169)
    assert shown.startswith("UserWarning: a target of")
    assert "(test_failure_report.py,\n  line" in shown or "(test_failure_report.py, line" in shown
    assert max(map(len, shown.splitlines())) <= 60


def entry(
    rank: int, *, timestamp: float, kind: str = "ValueError", message: str = "boom"
) -> failure_report.FailureRecord:
    return failure_report.FailureRecord(
        rank=rank, kind=kind, message=message, text=f"{kind}: {message}", timestamp=timestamp, exit_code=1
    )


def first(*records: failure_report.FailureRecord, exit_codes: dict[int, int] | None = None) -> failure_report.Cause:
    return failure_report.first_cause(
        {each.rank: each for each in records}, exit_codes or {}, [f"rank {n} of 4" for n in range(4)]
    )


def test_the_earliest_error_is_the_cause() -> None:
    result = first(entry(0, timestamp=2.0, message="late"), entry(1, timestamp=1.0, message="early"))
    assert result.text == "rank 1 of 4 failed\nValueError: early"


def test_the_summary_of_an_error_is_its_message_and_not_its_last_line() -> None:
    error = ValueError("a number\n  too large")
    error.add_note("in step 3")
    cause = first(failure_report.make_record(error, rank=0))
    assert cause.text.endswith("in step 3")
    assert cause.summary == "rank 0 of 4 failed: ValueError: a number too large"


def test_while_only_echoes_are_known_the_first_failure_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def polls(*codes: dict[int, int | None], records: tuple[failure_report.FailureRecord, ...]) -> int:
        """How often the exit codes are read: `codes`, and the last of them for ever."""
        clock, each = itertools.count(), itertools.chain(codes, itertools.repeat(codes[-1]))
        read = list[None]()
        monkeypatch.setattr("time.monotonic", lambda: next(clock) / 10)
        monkeypatch.setattr("time.sleep", lambda seconds: None)
        failure_report.wait_for_first_failure(
            lambda: read.append(None) or next(each), lambda: {record.rank: record for record in records}
        )
        return len(read)

    echo, own = entry(0, timestamp=1.0, kind="PeerError"), entry(0, timestamp=1.0)
    running: dict[int, int | None] = {0: 1, 1: None}
    assert polls(running, running, {0: 1, 1: -9}, records=(echo,)) == 3, "all have ended"
    assert polls({**running, 2: None}, {0: 1, 1: -9, 2: None}, records=(echo,)) == 2, "one has ended without a record"
    assert polls(running, records=(own,)) == 1
    assert polls({0: 0, 1: 0}, records=()) == 1
    assert polls({0: -9, 1: None}, records=()) == 1
    assert 40 < polls(running, records=(echo,)) < 60, "5 s at most"


def test_an_echo_of_another_ranks_failure_is_not_the_cause() -> None:
    reset = entry(0, timestamp=1.0, kind="RuntimeError", message="[pair.cc:547] Connection closed by peer [127.0.0.1]")
    assert "rank 1" in first(reset, entry(1, timestamp=2.0)).text
    assert first(reset, exit_codes={0: 1, 1: -9}).text.startswith("rank 1 of 4 was killed by SIGKILL")
    assert first(reset, exit_codes={0: 1, 1: 3}) == failure_report.Cause("rank 1 of 4 ended with exit code 3", 3, 1)
    assert "rank 0 of 4 failed" in first(reset).text  # if there is no other record


@pytest.mark.parametrize("kind", ["ConnectionRefusedError", "BrokenPipeError", "OSError"])
def test_an_error_of_the_users_own_connection_is_no_echo_and_is_recognized_when_it_comes_again(kind: str) -> None:
    own = entry(0, timestamp=1.0, kind=kind, message="[Errno 111] Connection refused, broken pipe: ffmpeg")
    assert not own.is_echo
    assert first(own).errors


def test_a_rank_that_exited_early_is_the_cause_if_no_rank_failed() -> None:
    reset = entry(0, timestamp=1.0, kind="PeerError", message="rank 1 died while rank 0 waited for it")
    left = "rank 1 of 4 ended with exit code 0 before the run had ended"
    assert first(reset, exit_codes={0: 75, 1: 0}) == failure_report.Cause(left, 1, 1)
    assert first(exit_codes={0: 0, 1: 0}).text.startswith("rank 0 of 4 and rank 1 of 4 ended with exit code 0")
    assert "SIGKILL" in first(reset, exit_codes={0: 75, 1: 0, 2: -9}).text
    assert "ValueError" in first(reset, entry(2, timestamp=2.0), exit_codes={0: 75, 1: 0, 2: 1}).text


def exited(code: object) -> SystemExit:
    with pytest.raises(SystemExit) as caught:
        exec(compile("import sys\ndef leave():\n    sys.exit(code)\nleave()", "user.py", "exec"), {"code": code})
    return caught.value


def test_a_rank_that_calls_sys_exit_is_the_cause_with_its_code_and_is_not_restarted() -> None:
    reset = entry(0, timestamp=1.0, kind="PeerError", message="rank 1 died while rank 0 waited for it")
    result = first(reset, failure_report.make_record(exited(3), rank=1), exit_codes={0: 75})  # rank 1 is still exiting
    assert result.text == ('rank 1 of 4 called sys.exit and ended with exit code 3\n  File "user.py", line 3, in leave')
    assert (result.rank, result.exit_code, result.is_final) == (1, 3, True)


@pytest.mark.parametrize(("given", "code"), [(3, 3), (-1, 255), (259, 3), ("no data", 1), (True, 1), (None, 0), (0, 0)])
def test_exit_codes_of_sys_exit_are_those_of_python(given: object, code: int) -> None:
    script = [sys.executable, "-S", "-c", f"import sys; sys.exit({given!r})"]
    assert subprocess.run(script, capture_output=True, check=False).returncode == code
    assert failure_report.exit_code(SystemExit(given)) == code


def test_the_message_of_sys_exit_is_reported() -> None:
    result = failure_report.make_record(exited("no data"), rank=1)
    assert result.text.startswith("called sys.exit and ended with exit code 1: no data\n")
    assert not failure_report.make_record(exited("connection refused"), rank=1).is_echo


def test_a_rank_that_ended_normally_while_others_waited_is_the_cause() -> None:
    lost = entry(0, timestamp=1.0, kind="PeerError", message="rank 1 died while rank 0 waited for it")
    result = first(lost, failure_report.end_record(1), exit_codes={0: 75})  # rank 1's process is still there
    assert result.text == (
        "rank 1 of 4 ended normally while rank 0 still waited for it\n"
        "  need   ranks that make the same calls: steps, evaluations, collectives\n"
        "  try    as many batches on every rank (ff.Feed ensures this), or DistributedOptimizer.join()"
    )
    assert (result.rank, result.exit_code, result.is_final) == (1, 1, True)


def test_a_rank_that_ended_normally_is_not_the_cause_if_another_failed() -> None:
    lost = entry(0, timestamp=1.0, kind="PeerError", message="rank 2 died while rank 0 waited for it")
    done = failure_report.end_record(1)
    assert "ValueError" in first(lost, done, entry(2, timestamp=2.0)).text
    assert "rank 2 of 4 was killed by SIGKILL" in first(lost, done, exit_codes={0: 75, 1: 0, 2: -9}).text
    assert "rank 1 of 4 was killed by SIGABRT" in first(lost, done, exit_codes={0: 75, 1: -6}).text


def test_the_users_line_that_waited_for_an_ended_rank_is_reported() -> None:
    reset = entry(0, timestamp=1.0, kind="RuntimeError", message="Connection closed by peer [127.0.0.1]:1")
    assert first(reset, failure_report.end_record(1)).text.endswith(
        "\nrank 0 waited here\nRuntimeError: Connection closed by peer [127.0.0.1]:1"
    )


def test_a_rank_that_was_interrupted_is_the_cause_and_is_not_restarted() -> None:
    reset = entry(0, timestamp=1.0, kind="PeerError", message="rank 1 died while rank 0 waited for it")
    result = first(
        reset, failure_report.make_record(KeyboardInterrupt(), rank=1), exit_codes={0: 75}
    )  # rank 1 is still exiting
    assert result == failure_report.Cause("rank 1 of 4 ended with exit code 130", 130, 1, is_final=True)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_a_record_that_does_not_fit_on_the_disk_is_printed_on_stderr(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("raise ValueError('of mine')\n")
    (tmp_path / "record.json.part").symlink_to("/dev/full")
    environ = {**os.environ, "RANK": "1", "TORCHELASTIC_ERROR_FILE": str(tmp_path / "record.json")}
    command = [sys.executable, "-m", "fourfold.launcher.worker", str(os.getpid()), str(script)]
    ended = subprocess.run(command, env=environ, timeout=300, check=False, stderr=subprocess.PIPE, text=True)
    assert ended.returncode == 1
    assert ended.stderr.startswith("rank 1 failed, and its record could not be written: no space left on device\n")
    assert ended.stderr.endswith("ValueError: of mine\n")
    assert "OSError" not in ended.stderr


def test_a_peer_error_is_an_echo() -> None:
    assert failure_report.make_record(PeerError("rank 1 has gone"), rank=0).is_echo


def test_an_exception_takes_precedence_over_a_death_by_signal() -> None:
    result = first(entry(1, timestamp=1.0), exit_codes={0: -signal.SIGABRT, 1: 1})
    assert "ValueError" in result.text


def test_bad_input_keeps_its_exit_code() -> None:
    result = first(failure_report.make_record(PlanError(Problem("dp = 3", "2")), rank=2))
    assert result.exit_code == 2
    assert result.text.startswith("rank 2 of 4 failed\nPlanError")


def test_an_error_whose_str_raises_is_still_reported() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise ValueError("no words")

    result = failure_report.make_record(Mute(), rank=1)
    assert result.message == "Mute"
    assert "Mute" in result.text


@pytest.mark.parametrize(
    ("ending", "kind", "code"),
    [
        ("", failure_report.ENDED, 0),
        ("raise ValueError", "ValueError", 1),
        ("import asyncio; raise asyncio.CancelledError", "CancelledError", 1),
        ("raise KeyboardInterrupt", "KeyboardInterrupt", 130),
    ],
)
def test_a_rank_records_how_it_ended_even_if_it_has_changed_its_environment(
    ending: str, kind: str, code: int, tmp_path: Path
) -> None:
    path, script = tmp_path / "record.json", tmp_path / "script.py"
    script.write_text(f"import os\nos.environ.clear()\n{ending}\n")
    environ = {**os.environ, "RANK": "1", "TORCHELASTIC_ERROR_FILE": str(path)}
    command = [sys.executable, "-m", "fourfold.launcher.worker", str(os.getpid()), str(script)]
    assert subprocess.run(command, env=environ, timeout=300, check=False).returncode == code
    result = failure_report.load_record(path)
    assert result is not None
    assert (result.kind, result.rank) == (kind, 1)


def test_a_record_survives_a_round_trip_through_its_file(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    written = failure_report.make_record(ValueError("bööm"), rank=3)
    failure_report.save_record(path, written)
    assert failure_report.load_record(path) == written
    assert [file.name for file in tmp_path.iterdir()] == ["error.json"]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"message": {"extraInfo": {}}}'])
def test_a_malformed_or_missing_file_gives_no_record(tmp_path: Path, text: str) -> None:
    path = tmp_path / "error.json"
    path.write_text(text)
    assert failure_report.load_record(path) is None
    assert failure_report.load_record(tmp_path / "missing") is None


def raised(code: str, **names: object) -> Exception:
    with pytest.raises(Exception) as caught:  # noqa: PT011  whichever the code raises
        exec(compile(code, "user.py", "exec"), {**names})
    return caught.value


def test_a_traceback_is_cut_to_the_users_lines() -> None:
    import torch

    # The traceback has frames of torch, and frames of the user's code between them.
    text = format_error(
        raised("tree.tree_map(lambda x: x.no_such_name, [1])", tree=torch.utils._pytree)  # type: ignore[attr-defined]
    )
    lines = text.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-1] == "AttributeError: 'int' object has no attribute 'no_such_name'"
    assert any("frames inside torch" in line for line in lines)
    assert sum('File "user.py"' in line for line in lines) == 2
    assert "_pytree.py" not in text


def test_a_long_message_is_cut_in_its_middle_and_a_deep_recursion_in_its_frames() -> None:
    text = format_error(raised("raise ValueError('begin' + 'x' * 2_000_000 + 'end')"))
    assert len(text) < 2500
    assert "ValueError: beginx" in text
    assert " … 1,998,021 characters left out … " in text
    assert text.endswith("xend\n")

    import torch

    code = "def forward(x):\n    return tree.tree_map(forward, [x])\nforward(1)"
    lines = format_error(raised(code, tree=torch.utils._pytree)).splitlines()  # type: ignore[attr-defined]
    assert len(lines) < 50
    assert any(re.fullmatch(r"  … \d\d+ more frames of your code", line) for line in lines)
    assert '  File "user.py", line 3, in <module>' in lines
    assert lines[-1].startswith("RecursionError")


def test_full_tracebacks_can_be_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setenv("FOURFOLD_TRACEBACK", "full")
    error = raised("tree.tree_map(lambda x: x.no_such_name, [1])", tree=torch.utils._pytree)  # type: ignore[attr-defined]
    assert "_pytree.py" in format_error(error)


def test_an_error_inside_fourfold_keeps_every_frame() -> None:
    with pytest.raises(AttributeError) as caught:
        failure_report.first_cause(None, {}, [])  # type: ignore[arg-type]
    error = caught.value
    assert error.__traceback__ is not None
    error.__traceback__ = error.__traceback__.tb_next  # this test's own frame
    assert "failure_report.py" in format_error(error)


def test_an_error_that_a_note_explains_needs_no_frame_of_ours() -> None:
    with pytest.raises(TypeError) as caught, noting(f"  in the loss, {describe_function(_loss_of_one)}"):
        failure_report.first_cause(None, {}, [], 1)  # type: ignore[arg-type]
    error = caught.value
    error.__traceback__ = None if error.__traceback__ is None else error.__traceback__.tb_next
    message, note, hint = format_error(error).splitlines()
    assert message.startswith("TypeError: first_cause() takes 3")
    assert note == f"  in the loss, _loss_of_one (test_failure_report.py, line {_loss_of_one.__code__.co_firstlineno})"
    assert hint == "  FOURFOLD_TRACEBACK=full shows every frame"


def _loss_of_one(outputs: object) -> None: ...


def test_of_a_library_only_the_line_that_failed_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(error_notes, "LIBRARY_PATHS", {"/packages/"})
    code = compile("def outer(): inner()\n\ndef inner(): 1 / 0\n", "/packages/lib/core.py", "exec")
    library: dict[str, Any] = {}
    exec(code, library)
    text = format_error(raised("call()", call=library["outer"]))
    assert re.findall(r'File "(.*)", line (\d+)|… (.*)', text)[-3:] == [
        ("user.py", "1", ""),
        ("", "", "1 frame inside lib"),
        ("/packages/lib/core.py", "3", ""),
    ]


def test_a_rank_that_tells_of_anothers_error_is_not_the_cause() -> None:
    told = failure_report.make_record(peer_failed(1, "KeyError: 'x'"), rank=0)
    own = dataclasses.replace(failure_report.make_record(KeyError("x"), rank=1), timestamp=told.timestamp + 1)
    assert failure_report.first_cause({0: told, 1: own}, {0: 2, 1: 1}, ["rank 0", "rank 1"]).rank == 1


def test_the_direct_cause_of_an_error_is_reported() -> None:
    text = format_error(raised("try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise ValueError('v') from e"))
    assert text.index("ZeroDivisionError") < text.index("direct cause") < text.index("ValueError: v")


def test_fourfold_errors_are_printed_without_a_traceback() -> None:
    assert format_error(PlanError(Problem("dp = 3", "2 ranks", "dp = 2"), where="plan.toml")) == (
        "PlanError: 1 problem in plan.toml\n  dp = 3   need 2 ranks   try dp = 2"
    )
