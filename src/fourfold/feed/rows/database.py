"""Databases: rows, all in the order of a key, or those with some keys; and how their columns become values of samples.

row     the values of a query's columns, or of a document's fields
key     a column that is different in each row
binary  a column of bytes: arrays of one dtype and shape; or the content of .npy files; or bytes as they are
type    of a column: that of most of its values; in SQLite and MongoDB, rows may have values of others
form    of a column of arrays: dtype and shape, if nearly all have one; in a batch, an array of another form is damage
Law: `rows` gives what `scan` gave for the same keys, until somebody changes them. Both hold few rows at once,
however many they give: a row may be large. The batch of some rows is the stack of their samples. Nothing is unpickled.
"""

import contextlib
import math
import os
import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

from fourfold.feed.formats.arrays import parse_npy
from fourfold.feed.staging.origin import Backoff, retry
from fourfold.words import argument_checks
from fourfold.words.comma_lists import comma_list
from fourfold.words.errors import DataError, Problem, closest_match

# ---- rows ------------------------------------------------------------------------------------------------------------


Row = tuple[Any, ...]
Result = TypeVar("Result")
OPENING = Backoff(give_up=60.0)  # of a server: a mistake in its URL ends within a minute


class Database(Protocol):
    """The rows of one query or collection. Each thread of each process makes its own connection, when it needs one."""

    @property
    def url(self) -> str:
        """For people: without a password."""
        ...

    @property
    def columns(self) -> Sequence[str]:
        """The names of a row's values."""
        ...

    @property
    def connections(self) -> "Connections": ...

    def scan(self) -> Generator[Row, None, None]:
        """All rows, in the order of the key, of one snapshot."""
        ...

    def rows(self, keys: Sequence[Any]) -> Generator[Row, None, None]:
        """The rows with these keys, in any order."""
        ...

    def may_pass(self, error: Exception) -> bool:
        """Whether the same call may succeed later: the server is away, or another process has locked the file."""
        ...


def retried(database: Database, read: Callable[[], Result], backoff: Backoff) -> Result:
    """What `read` returns, on a new connection after each error that may pass. Raises DataError."""

    def attempt() -> Result:
        try:
            return read()
        except Exception:
            database.connections.close()
            raise

    return retry(attempt, database.url, backoff, may_pass=database.may_pass)


class Connections:
    """One connection for each thread of each process."""

    def __init__(self) -> None:
        self._local = threading.local()

    def get(self, connect: Any) -> Any:
        if getattr(self._local, "process", None) != os.getpid():  # after a fork, the connection is the parent's
            self._local.connection, self._local.process = connect(), os.getpid()
        return self._local.connection

    def __reduce__(self) -> Any:  # to a worker process goes nothing that is open
        return Connections, ()

    def close(self) -> None:
        """Close this thread's connection; the next call makes another."""
        if getattr(self._local, "process", None) == os.getpid():
            self._local.process = None
            self._local.connection.close()


def check_columns(columns: list[str], key: str, *, where: str) -> list[str]:
    """The columns. Raises DataError if the key is none of them, or two have one name."""
    problems = []
    if key not in columns:
        need = f"one of the columns: {comma_list(columns)}"
        problems.append(Problem(f"key = {key!r}", need, closest_match(str(key), columns) or ""))
    twice = sorted({name for name in columns if columns.count(name) > 1})
    if twice:
        problems.append(Problem(f"several columns named {comma_list(twice)}", "one of each name", "AS another_name"))
    if problems:
        raise DataError(problems, where=where)
    return columns


# ---- columns ---------------------------------------------------------------------------------------------------------


NPY_MAGIC = b"\x93NUMPY"
NUMBERS = (bool, int, float)
NEARLY_ALL = 0.9


class Npy(bytes):
    """The type of a value that is the content of a .npy file, for messages too; the value itself is bytes."""


TYPES = (*NUMBERS, str, bytes, Npy, list)


class ArrayForm:
    """The arrays of a binary column."""

    def __init__(self, dtype: str, shape: Sequence[int]) -> None:
        """Raises TypeError or ValueError for a dtype that tensors do not have, and for a shape that is none."""
        self.dtype, self.shape = np.dtype(dtype), tuple(shape)
        torch.from_numpy(np.empty(0, self.dtype))
        if not all(type(size) is int and size >= 0 for size in self.shape):
            raise ValueError(f"a shape of {self.shape}")
        self.num_bytes = math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


class Columns:
    """The columns of a query, and which of them are what in a sample."""

    def __init__(
        self, names: Sequence[str], *, key: str, target: str | None, arrays: Mapping[str, tuple[str, Sequence[int]]]
    ) -> None:
        """Raises DataError for columns that are not there, and for arrays that cannot be."""
        self.key, self.key_place = key, list(names).index(key)
        self._places = {name: place for place, name in enumerate(names) if name != key}
        self._target = target
        self._check_names(arrays)
        self._arrays = _array_forms(arrays)
        self._types, self._forms = dict[str, type](), dict[str, str]()

    def learn(self, rows: Iterable[Row]) -> None:
        """Take the types and forms of the columns from some rows."""
        types, forms = ({name: Counter[Any]() for name in self._places} for _ in range(2))
        for row in rows:
            for name, place in self._places.items():
                if row[place] is not None:
                    types[name][_type(row[place])] += 1
                    with contextlib.suppress(ValueError, OverflowError):
                        forms[name][_form(self._value(name, row[place]))] += 1
        self._types = {name: each.most_common(1)[0][0] for name, each in types.items() if each}
        for name, each in forms.items():
            for form, count in each.most_common(1):
                if form and count >= NEARLY_ALL * each.total():
                    self._forms[name] = form

    def _check_names(self, arrays: Mapping[str, Any]) -> None:
        problems = []
        if not self._places:
            problems.append(Problem(f"a query with no column but {self.key}", "the columns of a sample"))
        for what, names in (("target", () if self._target is None else (self._target,)), ("arrays", arrays)):
            found = argument_checks.unknown_name_problems("column", names, list(self._places))
            problems += [problem._replace(got=f"{what}: {problem.got}") for problem in found]
        if list(self._places) == [self._target]:
            problems.append(Problem(f"no column but the target {self._target}", "at least one of the inputs"))
        if problems:
            raise DataError(problems, where="the database")

    def sample(self, row: Row, *, in_batch: bool = False) -> Any:
        """The sample of a row. Raises ValueError for a value that its column does not have, or a batch of it."""
        values = {name: self._value(name, row[place]) for name, place in self._places.items()}
        for name, form in self._forms.items() if in_batch else ():
            if (found := _form(values[name])) != form:
                raise ValueError(f"{name} is {found}, not {form}, as nearly all of its column")
        return self._arranged(values)

    def batch(self, rows: Sequence[Row]) -> Any:
        """The samples of some rows, stacked; None: they have to be made one by one."""
        by_place = list(zip(*rows, strict=True))
        stacked = {name: self._stacked(name, by_place[place]) for name, place in self._places.items()}
        return None if any(each is None for each in stacked.values()) else self._arranged(stacked)

    def _arranged(self, values: dict[str, Any]) -> Any:
        if self._target is None:
            return values
        target = values.pop(self._target)
        return (next(iter(values.values())) if len(values) == 1 else values), target

    def _stacked(self, name: str, values: Sequence[Any]) -> torch.Tensor | None:
        form, kinds = self._arrays.get(name), {*map(type, values)}
        if kinds != {bytes if form is not None else self._types.get(name)}:  # perhaps damage
            return None
        if form is None and next(iter(kinds)) in NUMBERS:
            # As torch collates numbers: a Python float is a float64.
            return torch.tensor(values, dtype=torch.float64 if kinds == {float} else None)
        if kinds != {bytes}:
            return None
        sizes = {*map(len, values)}
        if form is None and (len(sizes) > 1 or any(value.startswith(NPY_MAGIC) for value in values)):
            return None
        if form is not None and sizes != {form.num_bytes}:
            return None
        dtype, shape = (np.dtype(np.uint8), (len(values[0]),)) if form is None else (form.dtype, form.shape)
        if form is None and self._forms.get(name, f"uint8 {list(shape)}") != f"uint8 {list(shape)}":
            return None
        return torch.from_numpy(np.frombuffer(bytearray().join(values), dtype).reshape(len(values), *shape))

    def _value(self, name: str, value: Any) -> Any:
        form, kind = self._arrays.get(name), _type(value)
        if form is not None and kind is Npy:  # numbers that begin like one
            kind = bytes
        usual = bytes if form is not None else self._types.get(name, kind)
        if usual is float and kind is int and int(float(value)) == value:  # SQLite's 1, where others are 0.5
            value, kind = float(value), float
        if kind is not usual or kind not in TYPES:
            got = "missing, or NULL" if value is None else kind.__name__
            need = usual.__name__ if usual in TYPES else "a number, text, bytes or a list of numbers"
            raise ValueError(f"{name} is {got}, not {need}; the query can convert it, or leave such rows out")
        if kind is list:
            return _number_array(value, name)
        if kind not in (bytes, Npy):
            return value
        if form is not None:
            if len(value) != form.num_bytes:
                raise ValueError(f"{name} has {len(value)} bytes, not {form.num_bytes}, for {form}")
            return np.frombuffer(bytearray(value), form.dtype).reshape(form.shape)
        if kind is bytes:
            return np.frombuffer(bytearray(value), np.uint8)
        try:
            return parse_npy(value)
        except ValueError as error:
            raise ValueError(f"{name}, a .npy file: {error}") from error


def _type(value: Any) -> type:
    """The one of TYPES that a value is of, or its own: databases have subclasses of them."""
    if isinstance(value, bytes) and value.startswith(NPY_MAGIC):
        return Npy
    return next((each for each in TYPES if isinstance(value, each)), type(value))


def _form(value: Any) -> str:
    """The dtype and shape of an array; nothing of other values."""
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, np.ndarray) else ""


def _array_forms(arrays: Mapping[str, tuple[str, Sequence[int]]]) -> dict[str, ArrayForm]:
    forms, problems = {}, []
    for name, given in arrays.items():
        try:
            forms[name] = ArrayForm(*given)
        except (TypeError, ValueError):
            problems.append(
                Problem(f"arrays: {name} = {given!r}", "a dtype of numbers and a shape", '("uint8", (28, 28))')
            )
    if problems:
        raise DataError(problems, where="the database")
    return forms


def _number_array(values: list[Any], name: str) -> np.ndarray:
    try:
        array = np.asarray(values)
    except ValueError:  # rows of different lengths
        array = np.empty(0, dtype=object)
    if array.dtype.kind not in "biuf":
        raise ValueError(f"{name} is a list of other things than numbers, or of rows of several lengths")
    return array
