"""Laws of atomic files: a reader sees the old content or the new, and a failed write leaves nothing behind."""

import errno
import os
from pathlib import Path

import pytest

from fourfold.environment.atomic_file import write_atomically


@pytest.mark.parametrize("durable", [False, True])
def test_a_file_is_replaced_and_nothing_else_is_left(durable: bool, tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    for content in (b"old", b"new"):
        write_atomically(path, content, durable=durable)
        assert path.read_bytes() == content
    assert list(tmp_path.iterdir()) == [path]


def test_a_write_that_fails_leaves_the_old_content_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "settings.json"
    path.write_bytes(b"old")

    def write_half(partial: Path, content: bytes) -> int:
        with partial.open("wb") as file:
            file.write(content[:1])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", write_half)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_no_file_is_written_to_and_stays_what_it_is(tmp_path: Path) -> None:
    path = tmp_path / "out"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_atomically(path, b"new")
        assert path.is_fifo()
        assert os.read(reader, 100) == b"new"
    finally:
        os.close(reader)
