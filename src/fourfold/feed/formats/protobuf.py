"""tf.train.Example: a small reader of its protobuf messages.

Example   1: Features           Features   1: map<string, Feature> (entries of 1: key, 2: value)
Feature   one of 1: BytesList, 2: FloatList, 3: Int64List; each has its values as field 1, packed or one by one
Law: a length is checked against the bytes that are left before anything is read; what is no message raises ValueError.

Source: protobuf's encoding guide; TensorFlow, core/example/feature.proto.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5  # wire types
MAX_VARINT_BYTES = 10


class Part(NamedTuple):
    """A field of a message: its number, wire type and content."""

    number: int
    wire: int
    content: memoryview


def parse_example(message: bytes) -> dict[str, Any]:
    """The features of an Example, sorted by name: bytes (a list if not one), float32 [values], int64 [values]."""
    features: dict[str, Any] = {}
    for part in _parts(memoryview(message)):
        if part.number == 1:
            for entry in _parts(_message(part)):
                if entry.number == 1:
                    _add_feature(_message(entry), features)
    return {name: features[name] for name in sorted(features)}


def _add_feature(entry: memoryview, features: dict[str, Any]) -> None:
    name, feature = "", memoryview(b"")
    for part in _parts(entry):
        if part.number == 1:
            name = bytes(_message(part)).decode()
        elif part.number == 2:
            feature = _message(part)
    features[name] = _values(feature, name)


def _values(feature: memoryview, name: str) -> Any:
    value: Any = None
    for part in _parts(feature):  # a oneof: the last one counts
        if part.number in READERS:
            value = READERS[part.number](_message(part))
    if value is None:
        raise ValueError(f"feature {name!r} has no values")
    return value


def _bytes_list(message: memoryview) -> Any:
    values = [bytes(_message(part)) for part in _parts(message) if part.number == 1]
    return values[0] if len(values) == 1 else values


def _float_list(message: memoryview) -> np.ndarray:
    packed = bytearray()
    for part in _parts(message):
        if part.number == 1:
            if part.wire not in (LENGTH, FIXED32) or len(part.content) % 4:
                raise ValueError(f"{len(part.content)} bytes of floats")
            packed += part.content
    return np.frombuffer(packed, dtype="<f4").astype(np.float32, copy=False)


def _int64_list(message: memoryview) -> np.ndarray:
    packed = bytearray()  # also those that came one by one: an array for each would take a hundred times their bytes
    for part in _parts(message):
        if part.number == 1:
            content = part.content if part.wire == VARINT else _message(part)
            if content and content[-1] >= 0x80:
                raise ValueError("a number that is cut off")
            packed += content
    return _packed_varints(packed).view(np.int64)


READERS = {1: _bytes_list, 2: _float_list, 3: _int64_list}


def _packed_varints(content: bytearray) -> np.ndarray:
    """uint64 [values], of whole varints laid end to end."""
    octets = np.frombuffer(content, dtype=np.uint8)
    ends = np.flatnonzero(octets < 0x80)
    starts = np.concatenate([[0], ends[:-1] + 1]) if len(ends) else ends
    if len(ends) and (ends - starts).max() >= MAX_VARINT_BYTES:
        raise ValueError(f"a number of more than {MAX_VARINT_BYTES} bytes")
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


def _parts(message: memoryview) -> Iterator[Part]:
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
        yield Part(number, wire, message[start:at])


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    """The number that begins at a byte, and where it ends."""
    value = 0
    for place, octet in enumerate(message[at : at + MAX_VARINT_BYTES]):
        value |= (octet & 0x7F) << (7 * place)
        if octet < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, at + place + 1
    raise ValueError("a number that is cut off or too long")
