"""Tables of Arrow: their columns as arrays, text and bytes.

column   numbers and booleans, text, bytes, lists of these, structs; a Hugging Face Image is an encoded image
Law: each value has the dtype of its column. A null is no value: its record is damaged. Columns of other types are
refused when opened, all at once.
"""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from fourfold.feed.pack.schema import EncodedImage
from fourfold.feed.unpacked import check_fits
from fourfold.words import argument_checks
from fourfold.words.errors import DataError, Problem

FILE_FIELDS = {"bytes", "path"}


def pyarrow() -> Any:
    """The library with its parts. Raises DataError if it is not installed."""
    try:
        import pyarrow
        import pyarrow.compute
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError:
        problem = Problem(
            "Parquet or Arrow, and no pyarrow", "pyarrow, which reads them", "pip install 'fourfold[arrow]'"
        )
        raise DataError(problem) from None
    return pyarrow


def choose_columns(schema: Any, wanted: Sequence[str] | None, where: str) -> list[str]:
    """The names of the wanted columns. Raises DataError for those that are missing, or of types that cannot be read."""
    problems = argument_checks.unknown_name_problems("column", wanted or (), schema.names)
    names = [name for name in schema.names if wanted is None or name in wanted]
    if len(set(schema.names)) < len(schema.names):
        problems.append(Problem(f"columns {', '.join(schema.names)}", "a different name for each"))
    else:
        for name in names:
            if not _is_readable(schema.field(name).type):
                got = f"column {name!r} of {schema.field(name).type}"
                need = "numbers, text, bytes, or lists or structs of them"
                problems.append(Problem(got, need, "columns= without it"))
    if problems:
        raise DataError(problems, where=where)
    return names


def _is_readable(kind: Any) -> bool:
    types = pyarrow().types
    if types.is_dictionary(kind) and types.is_nested(kind.value_type):
        return False
    if _is_list(kind := _plain(kind)):
        return _is_readable(kind.value_type)
    if types.is_struct(kind):
        fields = [kind.field(number).type for number in range(kind.num_fields)]
        return bool(fields) and all(map(_is_readable, fields))
    if types.is_decimal(kind) or types.is_temporal(kind):
        return False
    return (
        types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind) or _is_text(kind) or _is_bytes(kind)
    )


def type_text(kind: Any) -> str:
    """What a type is to a sample: the same text for types that differ in how they are stored, or may be null."""
    if _is_list(kind := _plain(kind)):
        return f"list<{type_text(kind.value_type)}>"
    if pyarrow().types.is_struct(kind):
        fields = (kind.field(number) for number in range(kind.num_fields))
        return f"struct<{', '.join(f'{field.name} {type_text(field.type)}' for field in fields)}>"
    return "string" if _is_text(kind) else "binary" if _is_bytes(kind) else str(kind)


def _plain(kind: Any) -> Any:
    """The type of what a dictionary or an extension such as Array2D stores."""
    types = pyarrow().types
    while types.is_dictionary(kind) or hasattr(kind, "storage_type"):
        kind = kind.value_type if types.is_dictionary(kind) else kind.storage_type
    return kind


def _is_list(kind: Any) -> bool:
    types = pyarrow().types
    return types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)


def _is_text(kind: Any) -> bool:
    return pyarrow().types.is_string(kind) or pyarrow().types.is_large_string(kind)


def _is_bytes(kind: Any) -> bool:
    types = pyarrow().types
    return types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind)


def image_columns(schema: Any) -> frozenset[str]:
    """The columns that Hugging Face's `datasets` has written as images."""
    try:
        features = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))["info"]["features"]
        return frozenset(name for name, each in features.items() if each.get("_type") == "Image")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return frozenset()  # somebody else's metadata


def rows_of(table: Any, images: frozenset[str] = frozenset()) -> list[dict[str, Any]]:
    """The rows of a table. Raises ValueError for nulls and damaged text."""
    columns = {}
    for name in table.column_names:
        values = column_values(table.column(name).combine_chunks(), name)
        if name in images:  # as the metadata say, which may lie
            values = [EncodedImage(value) if isinstance(value, bytes) else value for value in values]
        columns[name] = values
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def column_values(column: Any, name: str) -> list[Any]:
    """The values of a pyarrow array: arrays of no dim for numbers, arrays for lists of them."""
    kind, types, column = column.type, pyarrow().types, _decoded(column)
    if column.null_count:
        raise ValueError(f"{name} is null")
    if types.is_struct(column.type):
        fields = {field.name: column.field(number) for number, field in enumerate(column.type)}
        if set(fields) == FILE_FIELDS:
            # An image or a sound of `datasets`. Its path, which may be a URL, is not read: only what is in the table.
            return column_values(fields["bytes"], f"{name}.bytes")
        values = {each: column_values(part, f"{name}.{each}") for each, part in fields.items()}
        return [dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True)]
    if _is_list(column.type):
        values = [_list_value(column[row].values, name) for row in range(len(column))]
        if isinstance(kind, pyarrow().FixedShapeTensorType):
            order = kind.permutation or range(len(kind.shape))
            values = [value.reshape(kind.shape).transpose(order) for value in values]
        return values
    if _is_text(column.type) or _is_bytes(column.type):
        return column.to_pylist()
    return list(map(np.asarray, column.to_numpy(zero_copy_only=False)))


def _decoded(column: Any) -> Any:
    """What a column of a dictionary or an extension stores, as one array."""
    library = pyarrow()
    column = column.combine_chunks() if isinstance(column, library.ChunkedArray) else column
    while library.types.is_dictionary(column.type) or hasattr(column.type, "storage_type"):
        if library.types.is_dictionary(column.type):
            if not library.types.is_primitive(column.type.value_type):  # one long value may stand in every place
                sizes = library.compute.binary_length(column.dictionary).take(column.indices)
                check_fits(library.compute.sum(sizes).as_py() or 0, "the values of a dictionary")
            column = column.dictionary_decode()
        else:
            column = column.storage
    return column


def _list_value(values: Any, name: str) -> Any:
    """A list of numbers as an array, of several dims if its lists are regular; other lists as lists."""
    values = _decoded(values)
    if values.null_count:
        raise ValueError(f"{name} holds a null")
    if _is_list(values.type):
        parts = [_list_value(values[row].values, name) for row in range(len(values))]
        if parts and all(isinstance(part, np.ndarray) and part.shape == parts[0].shape for part in parts):
            return np.stack(parts)
        return parts
    if pyarrow().types.is_struct(values.type) or _is_text(values.type) or _is_bytes(values.type):
        return column_values(values, name)
    return np.array(values.to_numpy(zero_copy_only=False))
