"""`ff.sql`: the rows of a query in PostgreSQL and SQLite as a source.

query   one SELECT; it runs as a subquery, on a connection that cannot write
Law: nothing that is sent to the server is made of values; the key's name is quoted, keys are parameters.
"""

import os
import re
import sqlite3
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from fourfold.feed.optional_package import import_optional
from fourfold.feed.rows.database import OPENING, Columns, Connections, Database, Row, check_columns, retried
from fourfold.feed.rows.source import RowSource
from fourfold.feed.staging.origin import Backoff, without_password
from fourfold.words import argument_checks
from fourfold.words.errors import DataError, Problem, first_line


def sql(
    url: str,
    query: str,
    *,
    key: str,
    target: str | None = None,
    arrays: Mapping[str, tuple[str, Sequence[int]]] | None = None,
    index: str | None = None,
) -> RowSource:
    """The rows of a query as a source for `ff.Feed` and `ff.Data`.

    url     sqlite:///FILE, or postgresql://USER@HOST:PORT/NAME (pip install 'fourfold[postgres]')
    query   one SELECT
    key     its column that is different in each row; whole numbers or text
    target  a column: samples are pairs (the other columns, target), instead of dicts. With one other column, the
            inputs are its values
    arrays  by binary column: the dtype and shape of its arrays, such as {"image": ("uint8", (3, 32, 32))}. A binary
            column without an entry holds the bytes of .npy files, or is an array of bytes; nothing is unpickled
    index   a folder for the keys and the digests of all rows, which are read once; it may be shared by ranks, and kept
            for a run that resumes. None: a temporary one for this process

    Raises DataError for a query that cannot be read, and for keys that are not unique.
    """
    problems = argument_checks.str_problems("url", url, attempt=f"sqlite:///{url}")
    problems += argument_checks.str_problems("query", query, attempt="its text, such as Path.read_text()")
    problems += argument_checks.str_problems("key", key)
    problems += argument_checks.str_problems("target", target, optional=True)
    problems += argument_checks.mapping_problems("arrays", arrays, optional=True)
    problems += argument_checks.str_problems("index", index, optional=True, path=True)
    if problems:
        raise DataError(problems, where="ff.sql")
    database = open_database(url, query, key)
    columns = Columns(database.columns, key=key, target=target, arrays=arrays or {})
    return RowSource(database, columns, of=f"{' '.join(query.split())} by {key}, {database.url}", index=index)


# ---- databases -------------------------------------------------------------------------------------------------------


MAX_SQLITE_KEYS = 500  # 999 parameters is the limit of old versions
# Of SQL: what is quoted, where no character means anything; blanks and comments; and every other character. What has no
# end goes on to that of the query.
TOKENS = re.compile(
    r"""[eE]'(?:[^'\\]|\\.|'')*+(?:'|\Z) | '(?:[^']|'')*+(?:'|\Z) | "(?:[^"]|"")*+(?:"|\Z) | `[^`]*+(?:`|\Z)
        | \[[^\]]*+(?:\]|\Z) | \$(\w*+)\$.*?(?:\$\1\$|\Z) | (?P<gap> \s+ | --[^\n]* | /\*.*?(?:\*/|\Z) ) | .""",
    re.DOTALL | re.VERBOSE,
)
TIMEOUT_SECONDS = 5.0  # for a lock of SQLite, in one attempt


def open_database(url: str, query: str, key: str) -> Database:
    """The database at `sqlite:///FILE` or `postgresql://USER@HOST/NAME`. Raises DataError if it has no such query."""
    query = _as_subquery(query)
    scheme = url.partition("://")[0]
    if scheme == "sqlite":
        return _SqliteDatabase(url, query, key)
    if scheme in ("postgresql", "postgres"):
        return _PostgresDatabase(url, query, key)
    need = "sqlite:///FILE or postgresql://USER@HOST/NAME"
    attempt = f"sqlite:///{os.path.abspath(url)}" if os.path.isfile(url) else ""
    raise DataError(Problem(without_password(url) or repr(url), need, attempt), where="ff.sql")


def _as_subquery(query: str) -> str:
    """A query in brackets, without the semicolons at its end. A comment at its end stops before the bracket."""
    semicolons = list[int]()
    for token in TOKENS.finditer(query):
        if token[0] == ";":
            semicolons.append(token.start())
        elif token["gap"] is None:
            semicolons.clear()
    kept = (char for place, char in enumerate(query) if place not in semicolons)
    return f"({''.join(kept)}\n)"


class _SqliteDatabase:
    """A file of SQLite, opened to read only."""

    def __init__(self, url: str, query: str, key: str) -> None:
        if not url.startswith("sqlite:///"):
            attempt = f"sqlite:///{url.removeprefix('sqlite://')}"
            raise DataError(Problem(url, "sqlite:///FILE, with three slashes", attempt), where="ff.sql")
        path = Path(unquote(urlsplit(url).path.removeprefix("/")))
        self.url, self._path = f"sqlite:///{path}", path
        self._source, self._key = query, quoted(key)
        self.connections = Connections()
        if not os.path.isfile(path):
            raise DataError(Problem(f"{path}, which is no file", "a file of SQLite"), where="ff.sql")
        described = retried(self, self._describe, Backoff())
        self.columns = check_columns([each[0] for each in described], key, where="ff.sql")

    def _describe(self) -> Sequence[Any]:
        try:
            return self._connection().execute(f"SELECT * FROM {self._source} LIMIT 0").description
        except sqlite3.Error as error:
            if self.may_pass(error):
                raise
            raise DataError(Problem(f"{self.url}: {error}", "a query that can be read"), where="ff.sql") from error

    def scan(self) -> Generator[Row, None, None]:
        yield from self._connection().execute(f"SELECT * FROM {self._source} ORDER BY {self._key}")

    def rows(self, keys: Sequence[Any]) -> Generator[Row, None, None]:
        for start in range(0, len(keys), MAX_SQLITE_KEYS):
            some = list(keys[start : start + MAX_SQLITE_KEYS])
            marks = ", ".join("?" * len(some))
            text = f"SELECT * FROM {self._source} WHERE {self._key} IN ({marks})"
            yield from self._connection().execute(text, some)

    def may_pass(self, error: Exception) -> bool:
        """Another process has locked the file, or it has been moved and may return."""
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # the rest are details
        is_gone = code == sqlite3.SQLITE_CANTOPEN and not self._path.exists()
        return is_gone or code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL)

    def _connection(self) -> sqlite3.Connection:
        return self.connections.get(self._connect)

    def _connect(self) -> sqlite3.Connection:
        uri = f"{self._path.resolve().as_uri()}?mode=ro"
        connection = sqlite3.connect(uri, uri=True, check_same_thread=False, timeout=TIMEOUT_SECONDS)
        connection.text_factory = _text_or_bytes
        return connection


def _text_or_bytes(content: bytes) -> str | bytes:
    """A value of SQLite's type TEXT, which may be any bytes: in a column of text, those that are none are damage."""
    try:
        return content.decode()
    except UnicodeDecodeError:
        return content


class _PostgresDatabase:
    """A server of PostgreSQL, by psycopg; the connection is in a read-only mode."""

    def __init__(self, url: str, query: str, key: str) -> None:
        self.url, self._given = without_password(url), url
        # psycopg takes % for its own, where there are parameters. There always are: a query with parameters, even none,
        # is sent as one statement, and several are an error of the server.
        self._source, self._key = f"{query.replace('%', '%%')} AS samples", quoted(key).replace("%", "%%")
        self.connections = Connections()
        try:
            self._psycopg.conninfo.conninfo_to_dict(url)
        except self._psycopg.Error:  # which quotes the password
            need, attempt = "postgresql://USER@HOST:PORT/NAME", "%25 for % and %40 for @ in names and passwords"
            raise DataError(Problem(f"{self.url}, which cannot be read", need, attempt), where="ff.sql") from None
        described = retried(self, self._describe, OPENING)
        self.columns = check_columns([each.name for each in described], key, where="ff.sql")

    @property
    def _psycopg(self) -> Any:
        return import_optional("psycopg", "psycopg, for postgresql://", "postgres", where="ff.sql")

    def _describe(self) -> Sequence[Any]:
        try:
            with self._connection().cursor() as cursor:
                text = f"SELECT * FROM {self._source} LIMIT 0"
                return cursor.execute(text, (), prepare=True).description or []
        except self._psycopg.Error as error:
            if self.may_pass(error):
                raise
            got = f"{self.url}: {first_line(error)}"
            raise DataError(Problem(got, "a query that can be read"), where="ff.sql") from error

    def scan(self) -> Generator[Row, None, None]:
        yield from self._stream(f"SELECT * FROM {self._source} ORDER BY {self._key}", ())

    def rows(self, keys: Sequence[Any]) -> Generator[Row, None, None]:
        yield from self._stream(f"SELECT * FROM {self._source} WHERE {self._key} = ANY(%s)", [list(keys)])

    def _stream(self, text: str, parameters: Sequence[Any]) -> Generator[Row, None, None]:
        with self._connection().cursor() as cursor:
            # As they arrive: a cursor of the server would send a number of them at once.
            yield from cursor.stream(text, parameters, binary=True)

    def may_pass(self, error: Exception) -> bool:
        return isinstance(error, self._psycopg.OperationalError | self._psycopg.InterfaceError)

    def _connection(self) -> Any:
        return self.connections.get(self._connect)

    def _connect(self) -> Any:
        connection = self._psycopg.connect(self._given, autocommit=True, connect_timeout=10)
        connection.execute("SET default_transaction_read_only = on")
        return connection


def quoted(name: str) -> str:
    """A name as SQL has it, whatever characters it has."""
    return '"' + name.replace('"', '""') + '"'
