"""Arrow's messages: how many rows a batch has, and how much memory it takes, by its head alone.

message  a head, which is a table of flatbuffers, and a body; a file says in its footer where they are
buffer   a part of a body; of a compressed batch its first 8 bytes say how long it is when it is unpacked, or -1: as is
Law: nothing is unpacked here, and pyarrow unpacks no more of a buffer than these 8 bytes say. A row has a bit at least.

Source: Apache Arrow, format/Message.fbs and format/File.fbs; flatbuffers' "internals".
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from fourfold.feed.formats.tables import pyarrow

TRAILER = 10  # the last bytes of a file: the length of its footer, and ARROW1
BLOCK, STRUCT = 24, 16  # bytes of a Block; of a Buffer and of a FieldNode
LAST_EXPERIMENTAL = 3  # version of messages of Arrow 0.17, which says in its metadata that a batch is compressed


class Batch(NamedTuple):
    """A batch of rows, or a dictionary of values. `num_bytes`: in memory, outside of the mapped file."""

    is_dictionary: bool
    num_rows: int
    num_bytes: int


class _Table(NamedTuple):
    """A table of flatbuffers, which pyarrow has verified; a field that is missing is 0."""

    content: memoryview
    at: int

    def place(self, field: int) -> int:
        vtable, slot = self.at - _number(self.content, self.at, 4), 4 + 2 * field
        offset = _number(self.content, vtable + slot, 2) if slot < _number(self.content, vtable, 2) else 0
        return offset and self.at + offset

    def number(self, field: int, size: int) -> int:
        place = self.place(field)
        return place and _number(self.content, place, size)

    def table(self, field: int) -> "_Table":
        place = self.place(field)
        return _Table(self.content, place + _number(self.content, place, 4))

    def structs(self, field: int, size: int) -> list[int]:
        """Where the structs of a vector begin."""
        if not (place := self.place(field)):
            return []
        start = place + _number(self.content, place, 4)
        return [start + 4 + size * index for index in range(_number(self.content, start, 4))]


def _number(content: memoryview, at: int, size: int) -> int:
    return int.from_bytes(content[at : at + size], "little", signed=True)


def _root(content: memoryview) -> _Table:
    return _Table(content, _number(content, 0, 4))


def stream_batches(mapped: Any) -> Iterator[Batch]:
    """The batches of a stream. Raises ValueError or pyarrow's errors if it is damaged."""
    for message in pyarrow().ipc.MessageReader.open_stream(mapped):
        if message.type != "schema":
            yield _batch(message)


def file_batches(mapped: Any) -> Iterator[Batch]:
    """The batches of a file whose footer pyarrow has read. Raises ValueError or pyarrow's errors if it is damaged."""
    content = memoryview(mapped)
    length = _number(content, len(content) - TRAILER, 4)
    footer = _root(content[len(content) - TRAILER - length : -TRAILER])
    for field in (2, 3):  # dictionaries, batches
        for block in footer.structs(field, BLOCK):
            start = _number(footer.content, block, 8)
            length = _number(footer.content, block + 8, 4) + _number(footer.content, block + 16, 8)
            if not 0 <= start <= start + length <= len(content):
                raise ValueError(f"a batch of bytes {start} to {start + length} in a file of {len(content)}")
            yield _batch(pyarrow().ipc.read_message(mapped.slice(start, length)))


def _batch(message: Any) -> Batch:
    root, is_dictionary = _root(memoryview(message.metadata)), message.type == "dictionary"
    if not is_dictionary and message.type != "record batch":
        raise ValueError(f"a message of type {message.type}")
    batch = root.table(2).table(1) if is_dictionary else root.table(2)
    num_rows, body = batch.number(0, 8), memoryview(message.body)
    is_packed = batch.place(3) or (root.number(0, 2) <= LAST_EXPERIMENTAL and root.place(4))
    unpacked, mapped = 0, 0
    for place in batch.structs(2, STRUCT):
        start, length = _number(batch.content, place, 8), _number(batch.content, place + 8, 8)
        size = _number(body, start, 8) if is_packed and length and start >= 0 else -1
        unpacked, mapped = unpacked + max(0, size), mapped + (max(0, length) if size < 0 else 0)
    if not is_dictionary:
        lengths = [_number(batch.content, place, 8) for place in batch.structs(1, STRUCT)[:1]]  # of the first column
        if not 0 <= num_rows <= 8 * (unpacked + mapped) or lengths not in ([], [num_rows]):
            raise ValueError(f"a batch of {num_rows} rows, of columns with {unpacked + mapped} bytes")
    return Batch(is_dictionary, num_rows, unpacked)
