"""TFRecord: records of tf.train.Example, read by position.

record  length (8 bytes), its masked CRC-32C (4), the content, its masked CRC-32C (4)
index   where each record begins, in memory: 8 bytes each; made by reading the 12 bytes before each content
Law: a length is believed only if its checksum is right and its file has room for it.

Source: TensorFlow, core/lib/io/record_writer.h.
"""

import struct
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np

from fourfold.feed.formats.crc32c import masked_crc32c, masked_crc32c_of_rows
from fourfold.feed.formats.positioned import PositionedFiles
from fourfold.feed.formats.protobuf import parse_example
from fourfold.words.errors import DataError, Problem

HEAD, FOOT = 12, 4
CHECKED_AT_ONCE = 2**16  # heads: a file of zeros has one every 16 bytes, and may be of any size
COMPRESSED = {b"\x1f\x8b": "gzip", b"\x78\x01": "zlib", b"\x78\x9c": "zlib", b"\x78\xda": "zlib"}


class TFRecords:
    """The Examples of TFRecord files. `examples`: parse them; else a record is {"record": its bytes}."""

    def __init__(self, name: str, paths: Sequence[str], *, examples: bool = True) -> None:
        self.name, self._examples = name, examples
        self._files = PositionedFiles(paths)
        self._starts = [self._index(file) for file in range(len(paths))]
        self.shard_sizes = [len(starts) - 1 for starts in self._starts]

    @property
    def bytes_read(self) -> int:
        return self._files.bytes_read

    def key(self, file: int, record: int) -> str:
        return f"{self._files.paths[file]}, record {record}"

    def read(self, file: int, records: Sequence[int]) -> list[dict[str, Any]]:
        return [self._read(file, record) for record in records]

    def _read(self, file: int, record: int) -> dict[str, Any]:
        start, stop = self._starts[file][record : record + 2]
        content = self._files.read(file, start, stop - start)
        head, body, foot = content[:HEAD], content[HEAD:-FOOT], content[-FOOT:]
        if int.from_bytes(head[:8], "little") != len(body):
            raise ValueError("its length is not what it was when the file was opened")
        if masked_crc32c(body) != int.from_bytes(foot, "little"):
            raise ValueError(f"its CRC-32C is not {int.from_bytes(foot, 'little'):08x}, as the file says")
        return parse_example(body) if self._examples else {"record": body}

    def _index(self, file: int) -> "array[int]":
        """Where the records begin, and at last where they end. Raises DataError for damaged lengths."""
        starts, heads, size, at = array("Q"), bytearray(), self._files.sizes[file], 0
        while at < size:
            head = self._files.read(file, at, min(HEAD, size - at))
            if len(head) < HEAD:
                raise self._damaged(file, heads, len(starts), f"the file ends in the head of record {len(starts)}")
            starts.append(at)
            heads += head
            at += HEAD + int.from_bytes(head[:8], "little") + FOOT
            if len(heads) == CHECKED_AT_ONCE * HEAD:
                self._check(file, heads, len(starts))
                heads.clear()
        self._check(file, heads, len(starts))
        if at != size:
            raise self._damaged(file, heads, len(starts), f"record {len(starts) - 1} ends at byte {at} of {size}")
        starts.append(at)
        return starts

    def _damaged(self, file: int, heads: bytearray, count: int, got: str) -> DataError:
        self._check(file, heads, count)  # a wrong length, rather than what follows from it
        path = self._files.paths[file]
        return DataError(Problem(f"{path}: {got}", "a file that is whole", "the file from its origin"), where=path)

    def _check(self, file: int, heads: bytearray, count: int) -> None:
        """Raise DataError for a damaged length among the last heads of a file, of which `count` records are known."""
        rows = np.frombuffer(heads, dtype=np.uint8).reshape(-1, HEAD)
        stored = np.ascontiguousarray(rows[:, 8:]).view("<u4")[:, 0]
        wrong = np.flatnonzero(masked_crc32c_of_rows(rows[:, :8]) != stored)
        if not len(wrong):
            return
        path, record = self._files.paths[file], count - len(rows) + wrong[0]
        form = COMPRESSED.get(bytes(heads[:2])) if record == 0 else None
        got = f"{path}, record {record}: the checksum of its length is wrong"
        if form is not None:
            problem = Problem(
                f"{path}: compressed by {form}", "records that can be read by position", "unpack it first"
            )
        else:
            problem = Problem(got, "a TFRecord file that is whole", "the file from its origin")
        raise DataError(problem, where=path)


def is_tfrecord(start: bytes) -> bool:
    """Whether a file that begins with these bytes is a TFRecord file: the checksum of the first length says so."""
    return len(start) >= HEAD and struct.pack("<I", masked_crc32c(start[:8])) == start[8:HEAD]
