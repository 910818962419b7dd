"""Direct reads: ranges of files read past the page cache (O_DIRECT), where the file system allows it.

Law: what is counted is what the kernel has returned; a short read is an error, never a shorter record.
"""

import mmap
import os
from pathlib import Path

import numpy as np

ALIGNMENT = 4096  # of offset, length and memory
MAX_READ_BYTES = 2**24  # of one call


def direct_problem(path: Path) -> str:
    """Why this file cannot be read past the page cache; "" if it can."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError as error:
        return f"O_DIRECT: {os.strerror(error.errno or 0).lower()}"
    try:
        with mmap.mmap(-1, ALIGNMENT) as page:
            os.preadv(file, [page], 0)
        return ""
    except OSError as error:
        return f"O_DIRECT: {os.strerror(error.errno or 0).lower()}"
    finally:
        os.close(file)


class ReadBuffer:
    """Aligned memory of one thread, as large as the largest range that was read into it."""

    def __init__(self) -> None:
        self._memory = np.empty(0, dtype=np.uint8)

    def reserve(self, num_bytes: int) -> np.ndarray:
        """The first `num_bytes` of the buffer, whole blocks: uint8."""
        rounded = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        if rounded > len(self._memory):
            self._memory = np.frombuffer(mmap.mmap(-1, rounded), dtype=np.uint8)
        return self._memory[:rounded]


def read_range(file: int, start: int, stop: int, buffer: ReadBuffer) -> tuple[np.ndarray, int]:
    """Bytes [start, stop) of a file opened with O_DIRECT, in the buffer, and how many bytes were read for them.

    Fewer bytes if the file ends before.
    """
    begin = start // ALIGNMENT * ALIGNMENT
    memory = buffer.reserve(stop - begin)
    done = 0
    while done < stop - begin:
        count = os.preadv(file, [memory[done : done + MAX_READ_BYTES].data], begin + done)
        done += count
        if not count or done % ALIGNMENT:  # the end of the file
            break
    return memory[start - begin : min(done, stop - begin)], done
