"""Compressed files: unpacked as a whole into memory, when something of them is read.

Law: no more is unpacked than the index says that the file has, and the compressed file bounds what it may say. A file
of another size, or without its end, is damaged.
"""

import bz2
import gzip
import io
from collections.abc import Callable
from typing import Any

from fourfold.feed.formats.positioned import PositionedFiles
from fourfold.feed.unpacked import Unpacked
from fourfold.words.errors import DataError, Problem

LEAST_BYTES, MAX_RATIO = 2**26, 2000  # MDS writes 64 MiB by default; more from less is one value over and over


def check_compression(text: Any) -> str:
    """The algorithm of `zstd:7`. Raises ValueError for one that cannot be read, DataError if its library is missing."""
    name = text.partition(":")[0] if isinstance(text, str) else repr(text)
    if name not in READERS:
        raise ValueError(f"compression {name[:60]}, not {', '.join(READERS)}")
    if name == "zstd":
        _zstandard()
    return name


def _zstandard() -> Any:
    try:
        import zstandard
    except ImportError:
        need, attempt = "zstandard, which reads them", "pip install 'fourfold[zstd]'"
        raise DataError(Problem("files compressed by zstd, and no zstandard", need, attempt)) from None
    return zstandard


READERS: dict[str, Callable[[io.BytesIO], Any]] = {
    "zstd": lambda file: _zstandard().ZstdDecompressor().stream_reader(file, read_across_frames=True),
    "gz": lambda file: gzip.GzipFile(fileobj=file, mode="rb"),
    "bz2": bz2.BZ2File,
}


class UnpackedFiles:
    """The contents of compressed files."""

    def __init__(self, files: PositionedFiles) -> None:
        self._files, self._unpacked = files, Unpacked[bytes]()

    def read(self, file: int, compression: str, num_bytes: int, offset: int, length: int) -> bytes:
        """Bytes of the unpacked file. Raises ValueError if it is damaged or has not got them."""
        size = self._files.sizes[file]
        content = self._unpacked.get(
            file, size + num_bytes, lambda: unpack(self._files.read(file, 0, size), compression, num_bytes)
        )
        if offset + length > len(content):
            raise ValueError(f"bytes {offset} to {offset + length} of {len(content)}")
        return content[offset : offset + length]


def unpack(packed: bytes, compression: str, num_bytes: int) -> bytes:
    """What was compressed, which has `num_bytes`. Raises ValueError if it is damaged, or longer or shorter."""
    if num_bytes > max(LEAST_BYTES, MAX_RATIO * len(packed)):
        raise ValueError(f"{num_bytes} bytes by {compression} from {len(packed)}")
    try:
        # They read files of several members, and the checksums at their ends.
        content = _read_at_most(READERS[compression](io.BytesIO(packed)), num_bytes + 1)
    except Exception as error:
        if isinstance(error, DataError | MemoryError):
            raise
        raise ValueError(f"{compression}: {error}") from error
    if len(content) != num_bytes:
        got = "more" if len(content) > num_bytes else str(len(content))
        raise ValueError(f"{got} bytes by {compression}, not {num_bytes}")
    return content


def _read_at_most(reader: Any, count: int) -> bytes:
    parts, left = list[bytes](), count
    while left and (part := reader.read(min(left, 2**22))):
        parts.append(part)
        left -= len(part)
    return b"".join(parts)
