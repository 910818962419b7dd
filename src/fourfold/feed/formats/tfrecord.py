"""TFRecord: records of tf.train.Example, read by position, with a small reader of their protobuf messages.

record    length (8 bytes), its masked CRC-32C (4), the content, its masked CRC-32C (4)
index     where each record begins, in memory: 8 bytes each; made by reading the 12 bytes before each content
Example   1: Features           Features   1: map<string, Feature> (entries of 1: key, 2: value)
Feature   one of 1: BytesList, 2: FloatList, 3: Int64List; each has its values as field 1, packed or one by one
crc       CRC-32C (Castagnoli): by the library crc32c if it is installed, else by numpy. It is the remainder of a
          message's polynomial, with no start value and no final flip: linear over XOR
level     crcs of all blocks of 2**level bytes; a level follows from the one below by joining neighbours
shift     what zero bytes after a message do to its crc: two tables, of 65,536 halves of a crc
Law: a length is believed only if its checksum is right and its file has room for it; within a message it is checked
against the bytes that are left before anything is read, and what is no message, or has other fields, raises ValueError.
crc(a + b) = shift(crc(a), len(b)) ^ crc(b).

Source: TensorFlow, core/lib/io/record_writer.h, core/lib/hash/crc32c.h (the mask) and core/example/feature.proto;
RFC 3720, appendix B.4; protobuf's encoding guide.
"""

import functools
import struct
from array import array
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from fourfold.feed.formats.positioned import PositionedFiles
from fourfold.feed.unpacked import check_fits
from fourfold.words.errors import DataError, Problem

# ---- checksums -------------------------------------------------------------------------------------------------------


POLYNOMIAL = 0x82F63B78  # 0x1EDC6F41, bits reversed
MASK_DELTA = 0xA282EAD8
ONES = 0xFFFFFFFF


@functools.cache
def _byte_table() -> np.ndarray:
    """The crc of each byte: uint32 [256]."""
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ np.uint32(POLYNOMIAL), table >> 1)
    return table


@functools.cache
def _pair_table() -> np.ndarray:
    """The crc of each two bytes, the first one low: uint32 [65536]."""
    pairs, table = np.arange(65536, dtype=np.uint32), _byte_table()
    first = table[pairs & 0xFF]
    return table[(first ^ (pairs >> 8)) & 0xFF] ^ (first >> 8)


@functools.cache
def _shift_tables(level: int) -> np.ndarray:
    """The shift by 2**level zero bytes, of the low and the high half of a crc: uint32 [2, 65536]."""
    halves = np.arange(65536, dtype=np.uint32)
    crcs = np.stack([halves, halves << 16])
    if level == 0:
        return _byte_table()[crcs & 0xFF] ^ (crcs >> 8)
    below = _shift_tables(level - 1)
    return _shift(_shift(crcs, below), below)


def _shift(crcs: np.ndarray, tables: np.ndarray) -> np.ndarray:
    return tables[0].take(crcs & 0xFFFF) ^ tables[1].take(crcs >> 16)


def crc32c_by_numpy(message: bytes) -> int:
    """The CRC-32C of a message. 0.2 to 0.3 GB/s, measured."""
    length = len(message)
    # Zeros in front change no crc that starts from zero, so the message is made a power of two long.
    padded = np.zeros(1 << max(1, (length - 1).bit_length()), dtype=np.uint8)
    padded[len(padded) - length :] = np.frombuffer(message, dtype=np.uint8)
    crcs, level = _pair_table().take(padded.view("<u2")), 1
    while len(crcs) > 1:
        crcs = _shift(crcs[0::2], _shift_tables(level)) ^ crcs[1::2]
        level += 1
    start = np.array([ONES], dtype=np.uint32)
    for bit in range(length.bit_length()):
        if length >> bit & 1:
            start = _shift(start, _shift_tables(bit))
    return int(crcs[0] ^ start[0]) ^ ONES


@functools.cache
def fastest() -> Callable[[bytes], int]:
    """The function that computes it: the library's, which uses the processor's instruction, or the one by numpy."""
    try:
        import crc32c
    except ImportError:
        return crc32c_by_numpy
    return crc32c.crc32c


def masked_crc32c(message: bytes) -> int:
    """The CRC-32C as TFRecord stores it: rotated, and with a constant added, since records may hold checksums."""
    crc = fastest()(message)
    return ((crc >> 15 | crc << 17) + MASK_DELTA) & ONES


def masked_crc32c_of_rows(rows: np.ndarray) -> np.ndarray:
    """The masked CRC-32C of each row: uint8 [rows, bytes] -> uint32 [rows]."""
    table, crcs = _byte_table(), np.full(len(rows), ONES, dtype=np.uint32)
    for column in rows.T:
        crcs = table[(crcs ^ column) & 0xFF] ^ (crcs >> 8)
    crcs ^= np.uint32(ONES)
    return (crcs >> 15 | crcs << 17) + np.uint32(MASK_DELTA)


# ---- the message of a record -----------------------------------------------------------------------------------------


VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5  # wire types
MAX_VARINT_BYTES = 10
TOO_LONG = f"a number of more than {MAX_VARINT_BYTES} bytes"
DECODED_AT_ONCE = 2**20  # bytes: decoding takes 40 times as many
OBJECT_BYTES, FEATURE_BYTES = 64, 640  # of Python, of a short value and of a feature, at most: measured


class Part(NamedTuple):
    """A field of a message: its number, wire type and content."""

    number: int
    wire: int
    content: memoryview


def parse_example(message: bytes) -> dict[str, Any]:
    """The features of an Example, sorted by name: bytes (a list if not one), float32 [values], int64 [values]."""
    features: dict[str, Any] = {}
    for part in _parts(memoryview(message), (1, 2)):
        if part.number == 2:
            raise ValueError("a tf.train.SequenceExample, with feature_lists; only tf.train.Example is read")
        for entry in _parts(_message(part), (1,)):
            check_fits(FEATURE_BYTES * len(features), f"{len(features)} features")
            _add_feature(_message(entry), features)
    return {name: features[name] for name in sorted(features)}


def _add_feature(entry: memoryview, features: dict[str, Any]) -> None:
    name, feature = "", memoryview(b"")
    for part in _parts(entry, (1, 2)):
        if part.number == 1:
            name = bytes(_message(part)).decode()
        else:
            feature = _message(part)
    features[name] = _values(feature, name)


def _values(feature: memoryview, name: str) -> Any:
    value: Any = None
    for part in _parts(feature, READERS):  # a oneof: the last one counts
        value = READERS[part.number](_message(part))
    if value is None:
        raise ValueError(f"feature {name!r} has no values")
    return value


def _bytes_list(message: memoryview) -> Any:
    count = sum(1 for _ in _parts(message, (1,)))
    check_fits(len(message) + OBJECT_BYTES * count, f"{count} values")
    values = [bytes(_message(part)) for part in _parts(message, (1,))]
    return values[0] if len(values) == 1 else values


def _float_list(message: memoryview) -> np.ndarray:
    packed = bytearray()
    for part in _parts(message, (1,)):
        if part.wire not in (LENGTH, FIXED32) or len(part.content) % 4:
            raise ValueError(f"{len(part.content)} bytes of floats")
        packed += part.content
    return np.frombuffer(packed, dtype="<f4").astype(np.float32, copy=False)


def _int64_list(message: memoryview) -> np.ndarray:
    packed = bytearray()  # also those that came one by one: an array for each would take a hundred times their bytes
    for part in _parts(message, (1,)):
        content = part.content if part.wire == VARINT else _message(part)
        if content and content[-1] >= 0x80:
            raise ValueError("a number that is cut off")
        packed += content
    return _packed_varints(packed).view(np.int64)


READERS = {1: _bytes_list, 2: _float_list, 3: _int64_list}


def _packed_varints(content: bytearray) -> np.ndarray:
    """uint64 [values], of whole varints laid end to end. Takes little more memory than the values."""
    octets = np.frombuffer(content, dtype=np.uint8)
    starts = range(0, len(octets), DECODED_AT_ONCE)
    count = sum(int(np.count_nonzero(octets[start : start + DECODED_AT_ONCE] < 0x80)) for start in starts)
    check_fits(8 * count, f"{count} numbers")
    values, filled, start = np.empty(count, dtype=np.uint64), 0, 0
    while start < len(octets):
        part = octets[start : start + DECODED_AT_ONCE]
        ends = np.flatnonzero(part < 0x80)
        if not len(ends):
            raise ValueError(TOO_LONG)
        values[filled : filled + len(ends)] = _varints(part, ends)
        filled, start = filled + len(ends), start + int(ends[-1]) + 1
    return values


def _varints(octets: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """uint64 [values], of the varints that end at these bytes."""
    starts = np.concatenate([[0], ends[:-1] + 1])
    if (ends - starts).max() >= MAX_VARINT_BYTES:
        raise ValueError(TOO_LONG)
    values = np.zeros(len(ends), dtype=np.uint64)
    for place in range(MAX_VARINT_BYTES):
        there = starts + place <= ends
        if not there.any():
            break
        digits = octets[starts[there] + place].astype(np.uint64) & np.uint64(0x7F)
        values[there] |= digits << np.uint64(7 * place)
    return values


def _message(part: Part) -> memoryview:
    if part.wire != LENGTH:
        raise ValueError(f"field {part.number} of wire type {part.wire}, where bytes must be")
    return part.content


def _parts(message: memoryview, known: Container[int]) -> Iterator[Part]:
    """The fields of a message. Raises ValueError for one that is not known: nothing is left out."""
    at, size = 0, len(message)
    while at < size:
        tag, at = _varint(message, at)
        number, wire, start = tag >> 3, tag & 7, at
        if wire == VARINT:
            _, at = _varint(message, at)
        elif wire == LENGTH:
            length, start = _varint(message, at)
            at = start + length
        elif wire in (FIXED32, FIXED64):
            at += 4 if wire == FIXED32 else 8
        else:
            raise ValueError(f"wire type {wire}")
        if not number or at > size:
            raise ValueError(f"field {number} ends at byte {at} of {size}")
        if number not in known:
            raise ValueError(f"a field {number}, which is unknown in a tf.train.Example")
        yield Part(number, wire, message[start:at])


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    """The number that begins at a byte, and where it ends."""
    value = 0
    for place, octet in enumerate(message[at : at + MAX_VARINT_BYTES]):
        value |= (octet & 0x7F) << (7 * place)
        if octet < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, at + place + 1
    raise ValueError("a number that is cut off or too long")


# ---- records ---------------------------------------------------------------------------------------------------------


HEAD, FOOT = 12, 4
CHECKED_AT_ONCE = 2**16  # heads: a file of zeros has one every 16 bytes, and may be of any size
COMPRESSED = {b"\x1f\x8b": "gzip", b"\x78\x01": "zlib", b"\x78\x9c": "zlib", b"\x78\xda": "zlib"}


class TFRecords:
    """The Examples of TFRecord files. `examples`: parse them; else a record is {"record": its bytes}."""

    noun = "record"

    def __init__(self, name: str, paths: Sequence[str], *, examples: bool = True) -> None:
        self.name, self.paths, self.files, self._examples = name, paths, PositionedFiles(paths), examples
        self._starts = [self._index(file) for file in range(len(paths))]
        self.shard_sizes = [len(starts) - 1 for starts in self._starts]

    def read(self, file: int, records: Sequence[int]) -> Iterable[dict[str, Any]]:
        return (self._read(file, record) for record in records)

    def _read(self, file: int, record: int) -> dict[str, Any]:
        start, stop = self._starts[file][record : record + 2]
        content = self.files.read(file, start, stop - start)
        head, body, foot = content[:HEAD], content[HEAD:-FOOT], content[-FOOT:]
        if int.from_bytes(head[:8], "little") != len(body):
            raise ValueError("its length is not what it was when the file was opened")
        if masked_crc32c(body) != int.from_bytes(foot, "little"):
            raise ValueError(f"its CRC-32C is not {int.from_bytes(foot, 'little'):08x}, as the file says")
        return parse_example(body) if self._examples else {"record": body}

    def _index(self, file: int) -> "array[int]":
        """Where the records begin, and at last where they end. Raises DataError for damaged lengths."""
        starts, heads, size, at = array("Q"), bytearray(), self.files.sizes[file], 0
        while at < size:
            head = self.files.read(file, at, min(HEAD, size - at))
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
        path = self.paths[file]
        return DataError(Problem(f"{path}: {got}", "a file that is whole", "the file from its origin"), where=path)

    def _check(self, file: int, heads: bytearray, count: int) -> None:
        """Raise DataError for a damaged length among the last heads of a file, of which `count` records are known."""
        rows = np.frombuffer(heads, dtype=np.uint8).reshape(-1, HEAD)
        stored = np.ascontiguousarray(rows[:, 8:]).view("<u4")[:, 0]
        wrong = np.flatnonzero(masked_crc32c_of_rows(rows[:, :8]) != stored)
        if not len(wrong):
            return
        path, record = self.paths[file], count - len(rows) + wrong[0]
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
