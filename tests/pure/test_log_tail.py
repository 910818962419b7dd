"""Law of a log that is followed: its lines are those that reading the whole file gives, however it grows."""

import json
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fourfold.report.live import MARK_BYTES, LogTail
from fourfold.report.run_record import read_log

# Lines of different lengths, so that one that is cut off and written again ends elsewhere.
LINES = st.integers(1, 10**12).map(lambda number: json.dumps({"resumed": number}).encode() + b"\n")
ACTIONS = st.one_of(
    st.tuples(st.just("append"), LINES, st.floats(0, 1)),
    st.tuples(st.just("truncate"), st.just(b""), st.floats(0, 1)),
    st.tuples(st.just("replace"), LINES, st.floats(0, 1)),
)


def act(path: Path, action: str, line: bytes, fraction: float, pending: bytes) -> bytes:
    """Change the log; returns what remains of the line that is being written."""
    if action == "append":
        text = pending + line
        cut = round(fraction * len(text))
        with path.open("ab") as file:
            file.write(text[:cut])
        return text[cut:]
    if action == "truncate":  # as a run that resumes: at the end of a line
        content = path.read_bytes()
        cut = content.rfind(b"\n", 0, round(fraction * len(content))) + 1
        os.truncate(path, cut)
        return b""
    staging = path.with_suffix(".new")
    staging.write_bytes(line * 3)
    staging.rename(path)
    return b""


@settings(max_examples=25)
@given(actions=st.lists(ACTIONS, max_size=12))
def test_a_followed_log_has_the_lines_of_the_file(actions):
    with tempfile.TemporaryDirectory() as folder:
        path, pending = Path(folder) / "metrics.jsonl", b""
        path.touch()
        tail = LogTail(path)
        for action, line, fraction in actions:
            pending = act(path, action, line, fraction, pending)
            before = list(tail.lines)
            assert tail.read() >= (tail.lines != before)
            whole = path.read_bytes().rpartition(b"\n")[0]
            assert tail.lines == [json.loads(each) for each in whole.split(b"\n") if each]
            assert not tail.read()


def test_only_what_was_appended_is_read(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"resumed": 1}\n' * 5000)
    tail = LogTail(path)
    assert tail.read()
    with path.open("r+b") as file:  # which a run never does
        file.write(b'{"resumed": 2}\n')
        file.seek(0, os.SEEK_END)
        file.write(b'{"resumed": 7}\n')
    assert tail.read()
    assert (tail.lines[0], tail.lines[-1]) == ({"resumed": 1}, {"resumed": 7})


def test_a_file_that_ends_as_the_one_it_replaces_is_read_again(tmp_path):
    path, end = tmp_path / "metrics.jsonl", b'{"resumed": 2}\n' * MARK_BYTES
    path.write_bytes(b'{"resumed": 1}\n' + end)
    tail = LogTail(path)
    assert tail.read()
    (tmp_path / "new").write_bytes(b'{"resumed": 3}\n' + end)
    (tmp_path / "new").rename(path)
    assert tail.read()
    assert tail.lines[0] == {"resumed": 3}


def test_a_line_that_is_none_of_a_log_is_counted_and_hides_no_other(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"resumed": 1}\nnonsense\n{"step": 1, "loss": 2}\n{"resumed": 2}\n')
    tail = LogTail(path)
    assert tail.read()
    assert tail.lines == [{"resumed": 1}, {"resumed": 2}]
    assert tail.num_unreadable == 2


def test_a_log_that_vanishes_has_no_lines(tmp_path):
    path = tmp_path / "metrics.jsonl"
    tail = LogTail(path)
    assert not tail.read()
    path.write_bytes(b'{"resumed": 1}\n')
    assert tail.read()
    assert tail.lines == read_log(path)
    path.unlink()
    assert tail.read()
    assert tail.lines == []


def test_a_pipe_is_refused(tmp_path):
    os.mkfifo(tmp_path / "metrics.jsonl")
    with pytest.raises(OSError, match="is a pipe"):
        LogTail(tmp_path / "metrics.jsonl").read()
