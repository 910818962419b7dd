"""Databases: the rows of a query, all in the order of a key, or those with some keys. PostgreSQL and SQLite.

query   one SELECT; it runs as a subquery, on a connection that cannot write
key     a column of the query, different in each row
Law: nothing that is sent to the server is made of values; the key's name is quoted, keys are parameters.
"""

import os
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

from fourfold.feed.staging.origin import without_password
from fourfold.words.errors import DataError, Problem

Row = tuple[Any, ...]
SCAN_ROWS = 1000
MAX_SQLITE_KEYS = 500  # 999 parameters is the limit of old versions
INSTALL = "pip install 'fourfold[postgres]'"


class Database(Protocol):
    """The rows of one query. Connections are made when they are needed, for each thread of each process."""

    @property
    def url(self) -> str:
        """For people: without a password."""
        ...

    @property
    def columns(self) -> Sequence[str]:
        """The names of the query's columns."""
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


def open_database(url: str, query: str, key: str) -> Database:
    """The database at `sqlite:///FILE` or `postgresql://USER@HOST/NAME`. Raises DataError if it has no such query."""
    query = query.strip().rstrip(";")
    scheme = url.partition("://")[0]
    if scheme == "sqlite":
        return SqliteDatabase(url, query, key)
    if scheme in ("postgresql", "postgres"):
        return PostgresDatabase(url, query, key)
    need = "sqlite:///FILE or postgresql://USER@HOST/NAME"
    raise DataError(Problem(without_password(url) or repr(url), need), where="ff.sql")


class _Connections:
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


class SqliteDatabase:
    """A file of SQLite, opened to read only."""

    def __init__(self, url: str, query: str, key: str) -> None:
        path = Path(unquote(urlsplit(url).path.removeprefix("/")))
        self.url, self._path = f"sqlite:///{path}", path
        self._source, self._key = f"({query})", quoted(key)
        self._connections = _Connections()
        if not path.is_file():
            raise DataError(Problem(f"{path}, which is no file", "a file of SQLite"), where="ff.sql")
        try:
            described = self._connection().execute(f"SELECT * FROM {self._source} LIMIT 0").description
        except sqlite3.Error as error:
            raise DataError(Problem(f"{self.url}: {error}", "a query that can be read"), where="ff.sql") from error
        self.columns = check_columns([each[0] for each in described], key)

    def scan(self) -> Iterator[Row]:
        cursor = self._connection().execute(f"SELECT * FROM {self._source} ORDER BY {self._key}")
        while rows := cursor.fetchmany(SCAN_ROWS):
            yield from rows

    def rows(self, keys: Sequence[Any]) -> list[Row]:
        found: list[Row] = []
        for start in range(0, len(keys), MAX_SQLITE_KEYS):
            some = list(keys[start : start + MAX_SQLITE_KEYS])
            marks = ", ".join("?" * len(some))
            text = f"SELECT * FROM {self._source} WHERE {self._key} IN ({marks})"
            found += self._connection().execute(text, some).fetchall()
        return found

    def disconnect(self) -> None:
        self._connections.close()

    def may_pass(self, error: Exception) -> bool:
        return isinstance(error, sqlite3.OperationalError) and "locked" in str(error)

    def _connection(self) -> sqlite3.Connection:
        return self._connections.get(
            lambda: sqlite3.connect(f"{self._path.resolve().as_uri()}?mode=ro", uri=True, check_same_thread=False)
        )


class PostgresDatabase:
    """A server of PostgreSQL, by psycopg; the connection is in a read-only mode."""

    def __init__(self, url: str, query: str, key: str) -> None:
        self.url, self._given = without_password(url), url
        # psycopg takes % for its own, where there are parameters. There always are: a query with parameters, even none,
        # is sent as one statement, and several are an error of the server.
        self._source, self._key = f"({query.replace('%', '%%')}) AS samples", quoted(key).replace("%", "%%")
        self._connections = _Connections()
        self._psycopg = _import_psycopg()
        try:
            with self._connection().cursor() as cursor:
                text = f"SELECT * FROM {self._source} LIMIT 0"
                described = cursor.execute(text, (), prepare=True).description or []
        except self._psycopg.Error as error:
            got = f"{self.url}: {_first_line(error)}"
            raise DataError(Problem(got, "a query that can be read"), where="ff.sql") from error
        self.columns = check_columns([each.name for each in described], key)

    def scan(self) -> Iterator[Row]:
        connection = self._connection()
        with connection.transaction(), connection.cursor(name="fourfold_scan", binary=True) as cursor:
            cursor.itersize = SCAN_ROWS
            yield from cursor.execute(f"SELECT * FROM {self._source} ORDER BY {self._key}", ())

    def rows(self, keys: Sequence[Any]) -> list[Row]:
        with self._connection().cursor(binary=True) as cursor:
            return cursor.execute(f"SELECT * FROM {self._source} WHERE {self._key} = ANY(%s)", [list(keys)]).fetchall()

    def disconnect(self) -> None:
        self._connections.close()

    def may_pass(self, error: Exception) -> bool:
        return isinstance(error, self._psycopg.OperationalError | self._psycopg.InterfaceError)

    def _connection(self) -> Any:
        return self._connections.get(self._connect)

    def _connect(self) -> Any:
        connection = self._psycopg.connect(self._given, autocommit=True, connect_timeout=10)
        connection.execute("SET default_transaction_read_only = on")
        return connection

    def __getstate__(self) -> Any:
        raise TypeError("a connection with a password is not copied to other processes")


def _import_psycopg() -> Any:
    try:
        import psycopg
    except ImportError as error:
        raise DataError(Problem(_first_line(error), "psycopg, for postgresql://", INSTALL), where="ff.sql") from None
    return psycopg


def quoted(name: str) -> str:
    """A name as SQL has it, whatever characters it has."""
    return '"' + name.replace('"', '""') + '"'


def check_columns(columns: list[str], key: str) -> list[str]:
    """The columns. Raises DataError if the key is none of them, or two have one name."""
    problems = []
    if key not in columns:
        problems.append(Problem(f"key = {key!r}", f"one of the query's columns: {', '.join(columns)}"))
    twice = sorted({name for name in columns if columns.count(name) > 1})
    if twice:
        problems.append(Problem(f"several columns named {', '.join(twice)}", "one of each name", "AS another_name"))
    if problems:
        raise DataError(problems, where="ff.sql")
    return columns


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
