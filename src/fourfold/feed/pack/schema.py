"""Schema: the fields that every sample of a pack has, and how a sample becomes a record. No I/O, no torch.

field    one value of a sample: its path in the sample, its kind, and for arrays a dtype and a shape
kind     array; int, float, bool (numbers of Python); bytes, text, image (the bytes of an image file)
open     a dim whose size differs from sample to sample, written as -1; bytes, text and images have one such dim
record   the head, and then the fields, one behind the other. The head: a little-endian uint64 for each open dim
Law: a record is as long as its head says, so that its fields tile it; without open dims it has no head, and all
records have one length.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec.structs import replace

from fourfold.words.comma_lists import comma_list
from fourfold.words.errors import DataError, Problem

Kind = Literal["array", "int", "float", "bool", "bytes", "text", "image"]
ITEM_BYTES = {
    **dict.fromkeys(("bool", "uint8", "int8", "float8_e4m3fn", "float8_e5m2"), 1),
    **dict.fromkeys(("int16", "uint16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("int32", "uint32", "float32"), 4),
    **dict.fromkeys(("int64", "uint64", "float64", "complex64"), 8),
    "complex128": 16,
}
DTYPE_OF_NUMBER = {"int": "int64", "float": "float64", "bool": "bool"}
BYTES_LIKE = ("bytes", "text", "image")
OPEN = -1
PAIR = ("inputs", "targets")
HEAD_ITEM_BYTES = 8
MAX_FIELDS, MAX_PATH, MAX_DIMS, MAX_NAME_LENGTH, MAX_CLASSES = 1000, 8, 16, 200, 10**6
MAX_RECORD_BYTES = 2**40


class EncodedImage(bytes):
    """The content of an image file, such as a JPEG."""


class Field(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One value of a sample. `classes`: what the values of a label mean."""

    path: tuple[str, ...]
    kind: Kind
    dtype: str = "uint8"
    shape: tuple[int, ...] = ()
    classes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return ".".join(self.path)

    @property
    def num_open_dims(self) -> int:
        return self.shape.count(OPEN)

    @property
    def num_bytes(self) -> int:
        """Of the field in a record; of a field with open dims, with 1 for each of them."""
        return ITEM_BYTES[self.dtype] * math.prod(size for size in self.shape if size != OPEN)

    def with_sizes(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """The shape with sizes in place of its open dims."""
        rest = iter(sizes)
        return tuple(next(rest) if size == OPEN else size for size in self.shape)

    def describe(self) -> str:
        """uint8 [3, ?, ?], text, int."""
        if self.kind != "array":
            return self.kind
        return f"{self.dtype} [{', '.join('?' if size == OPEN else str(size) for size in self.shape)}]"


class Extent(NamedTuple):
    """A field of one record: its shape there, and its bytes [start, stop)."""

    field: Field
    shape: tuple[int, ...]
    start: int
    stop: int


class Schema(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The fields of a sample; of a pair, their paths begin with `inputs` or `targets`."""

    fields: tuple[Field, ...]
    is_pair: bool = False

    @property
    def num_open_dims(self) -> int:
        return sum(field.num_open_dims for field in self.fields)

    @property
    def record_bytes(self) -> int | None:
        """The length of every record; None if they differ."""
        return None if self.num_open_dims else sum(field.num_bytes for field in self.fields)

    @property
    def head_bytes(self) -> int:
        return HEAD_ITEM_BYTES * self.num_open_dims

    def extents(self, sizes: Sequence[int]) -> Iterator[Extent]:
        """The fields of a record whose open dims have these sizes."""
        start, taken = self.head_bytes, 0
        for field in self.fields:
            shape = field.with_sizes(sizes[taken : taken + field.num_open_dims])
            taken += field.num_open_dims
            stop = start + ITEM_BYTES[field.dtype] * math.prod(shape)
            yield Extent(field, shape, start, stop)
            start = stop


def leaves(sample: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The values of a sample with their paths, in order."""
    if isinstance(sample, Mapping):
        for key, value in sample.items():
            yield from leaves(value, (*path, key))
    elif not path and isinstance(sample, tuple | list) and len(sample) == 2:
        for name, side in zip(PAIR, sample, strict=True):
            yield from leaves(side, (name,))
    else:
        yield path, sample


def build(schema: Schema, values: Sequence[Any]) -> Any:
    """The sample, or batch, that has these values in the schema's fields."""
    sample: dict[str, Any] = {}
    for field, value in zip(schema.fields, values, strict=True):
        place = sample
        for name in field.path[:-1]:
            place = place.setdefault(name, {})
        place[field.path[-1]] = value
    return (sample["inputs"], sample["targets"]) if schema.is_pair else sample


def merge(schemas: Sequence[Schema], names: Sequence[str]) -> Schema:
    """The schema of several samples: dims that differ are open. `names`: of the samples, for errors.

    Raises DataError, with all problems, for samples that have no common schema.
    """
    first, problems, fields = schemas[0], [], []
    for schema, name in zip(schemas, names, strict=True):
        if problem := _fields_problem(first, schema, (names[0], name)):
            raise DataError(problem, where="the samples to pack")
    for index, field in enumerate(first.fields):
        merged = field
        for schema, name in zip(schemas, names, strict=True):
            other = _merged(merged, schema.fields[index])
            if other is None:
                got = f"{field.name}: {merged.describe()} in {names[0]}, {schema.fields[index].describe()} in {name}"
                problems.append(Problem(got, "one kind, dtype and number of dims in all samples"))
                break
            merged = other
        fields.append(merged)
    if problems:
        raise DataError(problems, where="the samples to pack")
    return Schema(tuple(fields), first.is_pair)


def _fields_problem(first: Schema, second: Schema, names: tuple[str, str]) -> Problem | None:
    """The problem if two samples do not have the same fields in the same order."""
    mine, theirs = [field.path for field in first.fields], [field.path for field in second.fields]
    if mine == theirs and first.is_pair == second.is_pair:
        return None
    lists = [", ".join(".".join(path) for path in paths) or "nothing" for paths in (mine, theirs)]
    got = f"{names[0]} has {lists[0]}; {names[1]} has {lists[1]}"
    return Problem(got, "the same fields in every sample, in one order")


def _merged(one: Field, other: Field) -> Field | None:
    """A field that values of both have room in."""
    if {one.kind, other.kind} == {"int", "float"}:
        return one if one.kind == "float" else other
    if (one.kind, one.dtype, len(one.shape)) != (other.kind, other.dtype, len(other.shape)):
        return None
    shape = tuple(a if a == b else OPEN for a, b in zip(one.shape, other.shape, strict=True))
    return replace(one, shape=shape)


def with_variable(schema: Schema, names: Sequence[str]) -> Schema:
    """The schema with all dims of the named arrays open. Raises DataError for names that no array has."""
    arrays = {field.name for field in schema.fields if field.kind == "array" and field.shape}
    if unknown := [name for name in names if name not in arrays]:
        need = f"some of {comma_list(sorted(arrays))}" if arrays else "nothing: no field is an array"
        raise DataError([Problem(f"variable = {name}", need) for name in unknown], where="the pack")
    fields = [replace(each, shape=(OPEN,) * len(each.shape)) if each.name in names else each for each in schema.fields]
    return Schema(tuple(fields), schema.is_pair)


def schema_problems(schema: Schema) -> Iterator[str]:
    """Why not to believe a schema that was read from a file."""
    if not 1 <= len(schema.fields) <= MAX_FIELDS:
        yield f"{len(schema.fields)} fields, of 1 to {MAX_FIELDS}"
    seen: set[tuple[str, ...]] = set()
    for number, field in enumerate(schema.fields[:MAX_FIELDS]):
        for problem in _field_problems(field, schema.is_pair):
            yield f"field {number}: {problem}"
        if any(field.path[:length] in seen for length in range(len(field.path) + 1)):
            yield f"field {number}: a path within another's"
        seen.add(field.path)
    if schema.is_pair and {field.path[:1] for field in schema.fields} != {("inputs",), ("targets",)}:
        yield "a pair without inputs or without targets"


def is_possible(shape: Sequence[int]) -> bool:
    """Whether a tensor may have this shape: even one without elements has strides, which are products of sizes."""
    return math.prod(max(1, size) for size in shape) <= MAX_RECORD_BYTES


def _field_problems(field: Field, is_pair: bool) -> Iterator[str]:
    if not 1 <= len(field.path) <= MAX_PATH or any(not 0 < len(name) <= MAX_NAME_LENGTH for name in field.path):
        yield "a path of no or too many names, or of names too long"
    if is_pair and field.path[:1] not in (("inputs",), ("targets",)):
        yield "a path outside inputs and targets"
    if field.dtype not in ITEM_BYTES:
        yield f"dtype {field.dtype[:40]!r}"
        return
    if len(field.shape) > MAX_DIMS or any(not OPEN <= size <= MAX_RECORD_BYTES for size in field.shape):
        yield "a shape with too many dims, or with sizes out of bounds"
    elif field.num_bytes > MAX_RECORD_BYTES or not is_possible(field.shape):
        yield f"{field.dtype} {list(field.shape)}, of {field.num_bytes} bytes in a record"
    if len(field.classes) > MAX_CLASSES:
        yield f"{len(field.classes)} classes"
    if field.kind in DTYPE_OF_NUMBER and (field.dtype, field.shape) != (DTYPE_OF_NUMBER[field.kind], ()):
        yield f"{field.kind} stored as {field.describe()}"
    if field.kind in BYTES_LIKE and (field.dtype, field.shape) != ("uint8", (OPEN,)):
        yield f"{field.kind} stored as {field.dtype} {list(field.shape)}"
