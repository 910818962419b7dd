"""Log tail: the lines of a log that another process is writing, read as they are appended.

Law: the lines are always those that reading the whole file would give: what was read is read again only where the file
was cut off, as by a run that resumes, or replaced. A line without its end is left for later.
"""

import os
from pathlib import Path
from typing import Any, NamedTuple

from fourfold.plan.decode import DecodeError, check_not_pipe
from fourfold.report.run_record import read_line

CHUNK_BYTES = 2**22
MARK_BYTES = 512  # more than a line of a step


class _Position(NamedTuple):
    """Where the next line begins: in which file, after how many bytes, and what the last of them were."""

    inode: int = 0
    offset: int = 0
    mark: bytes = b""


class LogTail:
    """Follows a log. `lines` are those read so far; `num_unreadable` counts lines that were none of a log."""

    def __init__(self, path: Path) -> None:
        self._path, self._position = path, _Position()
        self.lines: list[dict[str, Any]] = []
        self.num_unreadable = 0

    def read(self) -> bool:
        """Read what was appended; returns whether anything has changed. A file that is missing is empty.

        Raises OSError.
        """
        check_not_pipe(self._path)
        try:
            file = self._path.open("rb", buffering=0)
        except FileNotFoundError:
            return self._forget()
        with file:
            changed = not self._continues(file.fileno()) and self._forget()
            while chunk := self._read_chunk(file.fileno()):
                changed |= self._add(file.fileno(), chunk)
        return changed

    def _continues(self, fd: int) -> bool:
        """Whether the file still begins with what was read."""
        inode, offset, mark = self._position
        return inode == os.fstat(fd).st_ino and os.pread(fd, len(mark), offset - len(mark)) == mark

    def _forget(self) -> bool:
        had_lines = bool(self.lines or self.num_unreadable)
        self._position, self.lines, self.num_unreadable = _Position(), [], 0
        return had_lines

    def _read_chunk(self, fd: int) -> bytes:
        """Whole lines from the present position; b"" if there are none."""
        chunk = b""
        while more := os.pread(fd, CHUNK_BYTES, self._position.offset + len(chunk)):
            chunk += more
            if end := chunk.rfind(b"\n") + 1:
                return chunk[:end]
        return b""

    def _add(self, fd: int, chunk: bytes) -> bool:
        offset, mark = self._position.offset + len(chunk), (self._position.mark + chunk)[-MARK_BYTES:]
        self._position = _Position(os.fstat(fd).st_ino, offset, mark)
        for line in filter(None, chunk.split(b"\n")):
            try:
                self.lines.append(read_line(line))
            except DecodeError:
                self.num_unreadable += 1
        return True
