"""Databases: rows, all in the order of a key, or those with some keys. What every kind of database gives a source.

row     the values of a query's columns, or of a document's fields
key     a column that is different in each row
Law: `rows` gives what `scan` gave for the same keys, until somebody changes them.
"""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

from fourfold.feed.staging.origin import Backoff, retry
from fourfold.words.errors import DataError, Problem, closest_match

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

    def scan(self) -> Iterator[Row]:
        """All rows, in the order of the key, of one snapshot."""
        ...

    def rows(self, keys: Sequence[Any]) -> list[Row]:
        """The rows with these keys, in any order."""
        ...

    def disconnect(self) -> None:
        """Close this thread's connection; the next call makes another."""
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
            database.disconnect()
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

    def close(self) -> None:
        if getattr(self._local, "process", None) == os.getpid():
            self._local.process = None
            self._local.connection.close()


def check_columns(columns: list[str], key: str, *, where: str) -> list[str]:
    """The columns. Raises DataError if the key is none of them, or two have one name."""
    problems = []
    if key not in columns:
        need = f"one of the columns: {', '.join(columns)}"
        problems.append(Problem(f"key = {key!r}", need, closest_match(str(key), columns) or ""))
    twice = sorted({name for name in columns if columns.count(name) > 1})
    if twice:
        problems.append(Problem(f"several columns named {', '.join(twice)}", "one of each name", "AS another_name"))
    if problems:
        raise DataError(problems, where=where)
    return columns


def first_line(error: Exception) -> str:
    """The first line of an error's message, or its class."""
    return (str(error).splitlines() or [type(error).__name__])[0]
