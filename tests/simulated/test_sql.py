"""Laws of SQL sources, the same on SQLite and on a real server of PostgreSQL that the test starts."""

import contextlib
import gc
import io
import itertools
import logging
import os
import pickle
import pwd
import random
import re
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fourfold.feed import unpacked
from fourfold.feed.feed import Feed
from fourfold.feed.pack.schema import leaves
from fourfold.feed.rows import sql as sql_module
from fourfold.feed.rows.source import RowSource, open_index, row_digest
from fourfold.feed.rows.sql import open_database, sql
from fourfold.feed.staging.origin import Backoff
from fourfold.words.errors import DamagedSample, DataError

QUICK = Backoff(first=0.01, longest=0.05, give_up=0.3)
NUM_ROWS = 23
names = itertools.count()


def find_program(name: str) -> str | None:
    found = shutil.which(name)
    return found or next(map(str, sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))), None)


class Server:
    """A server of PostgreSQL on a socket in a folder of its own, as a user who may not be root."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.data = folder, folder / "data"
        self.url = f"postgresql://tester@/postgres?host={folder}"
        self._user = "postgres" if os.getuid() == 0 else None
        if self._user:
            os.chown(folder, pwd.getpwnam(self._user).pw_uid, -1)
        self._run("initdb", "-D", str(self.data), "-U", "tester", "--auth=trust", "--no-sync", "-E", "UTF8")
        self.start()

    def start(self) -> None:
        options = f"-c listen_addresses='' -k {self.folder} -F"
        self._run(
            "pg_ctl", "-D", str(self.data), "-o", options, "-w", "-t", "30", "-l", str(self.folder / "log"), "start"
        )

    def stop(self) -> None:
        self._run("pg_ctl", "-D", str(self.data), "-w", "-t", "30", "-m", "immediate", "stop")

    def _run(self, name: str, *arguments: str) -> None:
        program = find_program(name)
        assert program is not None
        subprocess.run(
            [program, *arguments], check=True, user=self._user, cwd="/", stdout=subprocess.DEVNULL, timeout=60
        )


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    pytest.importorskip("psycopg")
    if find_program("initdb") is None:
        pytest.skip("no PostgreSQL on this machine")
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        made = Server(Path(folder))
        try:
            yield made
        finally:
            with contextlib.suppress(subprocess.CalledProcessError):
                made.stop()


class Place:
    """A database in which a test makes a table."""

    def __init__(self, url: str, connect: Callable[[], Any], binary: str) -> None:
        self.url, self._connect, self.binary, self.mark = url, connect, binary, "?" if "sqlite" in url else "%s"

    def run(self, text: str, rows: list[Any] | None = None) -> None:
        with contextlib.closing(self._connect()) as connection:
            cursor = connection.cursor()
            cursor.executemany(text.replace("?", self.mark), rows) if rows is not None else cursor.execute(text)
            connection.commit()

    def make(self, key: str = "INTEGER") -> str:
        """The name of a table of random rows, with gaps between their keys; in no order."""
        table, generator = f"samples_{next(names)}", random.Random(1)
        self.run(
            f"CREATE TABLE {table} (id {key} PRIMARY KEY, image {self.binary}, label INTEGER, weight DOUBLE PRECISION)"
        )
        keys = generator.sample(range(-10, 1000), NUM_ROWS)
        rows = [(f"k{k}" if key == "TEXT" else k, image(k).tobytes(), k % 7, k / 3) for k in keys]
        self.run(f"INSERT INTO {table} VALUES (?, ?, ?, ?)", rows)
        return table


def image(key: int) -> np.ndarray:
    return np.random.default_rng(key + 10).integers(0, 255, (3, 4), np.uint8)


@pytest.fixture(params=["sqlite", "postgresql"])
def place(request: Any, tmp_path: Path) -> Place:
    if request.param == "sqlite":
        path = tmp_path / "with space.db"
        with sqlite3.connect(path) as connection:
            connection.execute("CREATE TABLE another (x)")
        return Place(f"sqlite:///{path}", lambda: sqlite3.connect(path), "BLOB")
    import psycopg

    url = request.getfixturevalue("server").url
    return Place(url, lambda: psycopg.connect(url), "BYTEA")


def open_source(place: Place, table: str, **options: Any) -> RowSource:
    arrays = {"image": ("uint8", (3, 4))}
    return sql(place.url, f"SELECT * FROM {table};", key="id", target="label", **{"arrays": arrays, **options})


@pytest.mark.parametrize("key", ["INTEGER", "TEXT"])
def test_sample_i_is_the_row_with_the_ith_key(place, key):
    source = open_source(place, place.make(key))
    assert len(source) == NUM_ROWS
    keys = [source.sample_key(i).removeprefix("id = ") for i in range(NUM_ROWS)]
    found = [int(each.strip("'").removeprefix("k")) for each in keys]
    assert len(set(found)) == NUM_ROWS
    if key == "INTEGER":
        assert found == sorted(found)
    for number, row in enumerate(found):
        inputs, label = source[number]
        assert np.array_equal(inputs["image"], image(row))
        assert (inputs["weight"], label) == (row / 3, row % 7)


def test_a_batch_is_the_stack_of_its_samples_in_any_order(place):
    source = open_source(place, place.make())
    generator = random.Random(0)
    for size in (1, 5, NUM_ROWS, 0):
        numbers = [generator.randrange(NUM_ROWS) for _ in range(size)]
        inputs, labels = source.fetch(numbers)
        assert inputs["image"].shape == (size, 3, 4)
        assert labels.tolist() == [source[n][1] for n in numbers]
        for row, number in zip(inputs["image"], numbers, strict=True):
            assert np.array_equal(row, source[number][0]["image"])


def test_a_copy_for_a_worker_reads_the_same_rows_on_a_connection_of_its_own(place):
    source = open_source(place, place.make("TEXT"))
    source[0]
    copy = pickle.loads(pickle.dumps(source))
    for found, expected in zip(leaves(copy.fetch([3, 1])), leaves(source.fetch([3, 1])), strict=True):
        assert torch.equal(found[1], expected[1])


def test_an_epoch_of_a_feed_has_every_row_once_on_any_number_of_ranks(place):
    source = open_source(place, place.make())
    batches = [labels for _, labels in Feed(source, batch_size=4, seed=3)]
    assert sorted(torch.cat(batches).tolist()) == sorted(source[i][1] for i in range(NUM_ROWS))


def test_opening_holds_few_rows_at_once_and_a_batch_no_more_than_fit(place, monkeypatch):
    table, size = f"samples_{next(names)}", 2**20
    place.run(f"CREATE TABLE {table} (id INTEGER PRIMARY KEY, volume {place.binary})")
    place.run(f"INSERT INTO {table} VALUES (?, ?)", [(n, bytes([n]) * size) for n in range(80)])
    tracemalloc.start()
    try:
        source = sql(place.url, f"SELECT * FROM {table}", key="id")
        assert tracemalloc.get_traced_memory()[1] < 8 * size
    finally:
        tracemalloc.stop()
    monkeypatch.setattr(unpacked, "share_bytes", lambda: 10 * size)
    assert source.fetch(range(10))["volume"][:, -1].tolist() == [*range(10)]
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match=r"a batch of 11 rows or more of 11\d* bytes.* need a batch that fits"):
            source.fetch(range(80))
        assert tracemalloc.get_traced_memory()[1] < 14 * size
    finally:
        tracemalloc.stop()
    assert source.fetch(range(10))["volume"][:, -1].tolist() == [*range(10)]


def test_rows_that_change_or_go_are_named_and_others_can_be_read(place):
    table = place.make()
    source = open_source(place, table)
    keys = [int(source.sample_key(i).removeprefix("id = ")) for i in range(NUM_ROWS)]
    place.run(f"UPDATE {table} SET label = 100 WHERE id = {keys[3]}")
    place.run(f"DELETE FROM {table} WHERE id = {keys[5]}")
    with pytest.raises(DataError, match=rf"id = {keys[3]} cannot be read: its row has changed"):
        source.fetch([2, 3])
    with pytest.raises(DataError, match=rf"id = {keys[5]} cannot be read: its row is gone"):
        source[5]
    place.run(f"INSERT INTO {table} VALUES ({max(keys) + 1}, NULL, 0, 0)")
    assert len(source) == NUM_ROWS
    assert source[4][1] == keys[4] % 7


def test_an_index_that_is_kept_finds_changes_between_runs(place, tmp_path):
    table = place.make()
    first = open_source(place, table, index=str(tmp_path / "index"))
    keys = [first.sample_key(i) for i in range(NUM_ROWS)]
    place.run(f"UPDATE {table} SET weight = 0.5 WHERE {keys[0]}")
    place.run(f"INSERT INTO {table} VALUES (5000, NULL, 0, 0)")
    second = open_source(place, table, index=str(tmp_path / "index"))
    assert [second.sample_key(i) for i in range(NUM_ROWS)] == keys
    with pytest.raises(DataError, match="has changed"):
        second[0]
    with pytest.raises(DataError, match="the index of SELECT"):
        sql(place.url, f"SELECT id, label FROM {table}", key="id", index=str(tmp_path / "index"))


@pytest.mark.parametrize(("query", "options", "message"), [
    ("SELECT * FROM {t}", {"key": "number"}, "key = 'number' +need one of the columns: id, image"),
    ("SELECT label AS id, weight FROM {t}", {"key": "id"}, "several rows with the key"),
    ("SELECT weight AS id, label FROM {t}", {"key": "id"}, "a key that is a float"),
    ("SELECT * FROM {t} WHERE id > 10000", {"key": "id"}, "a query without rows"),
    ("SELECT id FROM {t}", {"key": "id"}, "no column but id"),
    ("SELECT * FROM {t}", {"key": "id", "target": "labels"}, "target: no column 'labels' +need one of image, label"),
    ("SELECT * FROM {t}", {"key": "id", "arrays": {"image": ("O", (3,))}}, r"arrays: image = \('O'"),
    ("SELECT * FROM missing", {"key": "id"}, "missing.*need a query that can be read"),
    ("DELETE FROM {t}", {"key": "id"}, "need a query that can be read"),
])  # fmt: skip
def test_what_cannot_be_a_source_is_refused_with_the_reason(place, query, options, message, monkeypatch):
    unraisable = []
    monkeypatch.setattr("sys.unraisablehook", unraisable.append)
    table = place.make()
    with pytest.raises(DataError, match=message):
        sql(place.url, query.format(t=table), **options)
    gc.collect()
    assert not unraisable


def test_of_many_columns_few_are_listed(place):
    columns = ", ".join(f"{n} AS feature_{n}" for n in range(500))
    with pytest.raises(DataError, match=r"need one of the columns: feature_0, feature_1, .* …") as caught:
        sql(place.url, f"SELECT {columns}", key="id")
    assert len(str(caught.value)) < 800


def test_columns_of_one_name_are_named(server):
    with pytest.raises(DataError, match=r"several columns named label +need one of each name +try AS another_name"):
        sql(server.url, "SELECT 1 AS id, 2 AS label, 3 AS label", key="id")


def test_percent_signs_and_strange_names_are_as_in_any_query(place):
    table = place.make("TEXT")
    query = f'SELECT id AS "the % ""key""", label FROM {table} WHERE id LIKE \'k%\''
    source = sql(place.url, query, key='the % "key"')
    assert len(source) == NUM_ROWS
    assert source.fetch([0, 1])["label"].shape == (2,)


@pytest.mark.parametrize("end", [
    " -- the small ones", "; -- done", "\n/* the ; small ones */ ;;", " -- it's\n;", " AND label < 99 -- ';'",
])  # fmt: skip
def test_a_query_may_end_in_comments_and_semicolons(place, end):
    table = place.make()
    query = f"/* ; */ SELECT id, label, ';-- \"' AS text FROM {table} WHERE ';' = ';' AND '; --' <> ''{end}"
    assert sql(place.url, query, key="id")[0]["text"] == ';-- "'


def test_a_query_cannot_write(place):
    table = place.make()
    with pytest.raises(DataError):
        sql(place.url, f"SELECT 1 AS id, 2 AS x) AS a; DELETE FROM {table}; SELECT * FROM (SELECT 1", key="id")
    assert len(open_source(place, table)) == NUM_ROWS


def npy(array: np.ndarray, *, allow_pickle: bool = False) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=allow_pickle)
    return file.getvalue()


class Trap:
    """What must not be unpickled."""

    def __reduce__(self) -> Any:
        return pytest.fail, ("unpickled",)


@pytest.mark.parametrize(("content", "expected"), [
    (npy(np.arange(6.0).reshape(2, 3)), np.arange(6.0).reshape(2, 3)),
    (b"abc", np.frombuffer(b"abc", np.uint8)),
    (npy(np.array([Trap()], dtype=object), allow_pickle=True), "content, a .npy file: an array of Python objects"),
    (npy(np.arange(6.0))[:-5], "id = 1 cannot be read: content, a .npy file: 43 bytes for an array of float64"),
    (None, "id = 1 cannot be read: content is missing, or NULL"),
])  # fmt: skip
def test_binary_columns_are_arrays_and_never_unpickled(place, content, expected):
    table = f"samples_{next(names)}"
    place.run(f"CREATE TABLE {table} (id INTEGER, content {place.binary})")
    place.run(f"INSERT INTO {table} VALUES (?, ?)", [(1, content)])
    source = sql(place.url, f"SELECT * FROM {table}", key="id")
    if isinstance(expected, str):
        with pytest.raises(DataError, match=expected):
            source[0]
    else:
        np.testing.assert_array_equal(source[0]["content"], expected)


def test_an_array_of_another_size_is_named(place):
    source = open_source(place, place.make(), arrays={"image": ("uint8", (3, 5))})
    with pytest.raises(DataError, match=r"id = -?\d+ cannot be read: image has 12 bytes, not 15, for uint8 \[3, 5\]"):
        source[0]
    source = open_source(place, place.make(), arrays={"image": ("uint8", (2**32, 2**32))})
    with pytest.raises(DataError, match=f"12 bytes, not {2**64}"):
        source[0]


@pytest.mark.parametrize(("column", "value"), [
    ("image", b"short"), ("image", "text"), ("image", None), ("label", "text"), ("label", 0.5), ("label", None),
    ("label", b"blob"), ("name", b"\xff"), ("name", "\udcff".encode("utf-8", "surrogatepass")), ("weight", "text"),
    ("array", b"\x93NUMPY, and no more"), ("array", npy(np.zeros(2))[:-1]), ("array", b""), ("array", bytes(144)),
])  # fmt: skip
def test_a_row_with_a_value_that_its_column_cannot_have_is_a_damaged_sample(tmp_path, column, value):
    path = tmp_path / "x.db"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, image, label, name TEXT, weight, array)")
        rows = [(i, image(i).tobytes(), i, "name", i / 2 if i % 3 else i, npy(np.zeros(2))) for i in range(100)]
        connection.executemany("INSERT INTO t VALUES (?, ?, ?, ?, ?, ?)", rows)
        cast = "CAST(? AS TEXT)" if column == "name" else "?"
        connection.execute(f"UPDATE t SET {column} = {cast} WHERE id = 77", [value])
    source = sql(f"sqlite:///{path}", "SELECT * FROM t", key="id", target="label", arrays={"image": ("uint8", (3, 4))})
    with pytest.raises(DamagedSample, match=f"sample id = 77 cannot be read: {column}"):
        source.fetch(range(70, 80))

    def without_text(sample: Any, generator: torch.Generator) -> Any:
        return {name: each for name, each in sample[0].items() if name != "name"}, sample[1]

    with pytest.raises(DamagedSample, match="id = 77"):
        list(Feed(source, batch_size=10, transform=without_text))
    batches = list(Feed(source, batch_size=10, bad_samples=1, transform=without_text))
    assert sorted(torch.cat([labels for _, labels in batches]).tolist()) == sorted({*range(100)} - {77})
    assert all(inputs["weight"].dtype == torch.float64 for inputs, _ in batches)


def table_of(path: Path, values: dict[str, Any]) -> RowSource:
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE t (id TEXT PRIMARY KEY, x, y)")
        connection.executemany("INSERT INTO t VALUES (?, ?, 0)", values.items())
    return sql(f"sqlite:///{path}", "SELECT * FROM t", key="id", target="y")


@pytest.mark.parametrize("usual", [npy(np.zeros(4, np.float32)), bytes(16)])
@pytest.mark.parametrize("other", [npy(np.zeros(3, np.float32)), npy(np.zeros(4)), bytes(15)])
def test_an_array_of_another_form_than_nearly_all_is_damaged_in_a_batch(tmp_path, usual, other):
    source = table_of(tmp_path / "x.db", {f"img-{i:03}": other if i == 7 else usual for i in range(40)})
    with pytest.raises(DamagedSample, match="sample id = 'img-007' cannot be read: x is"):
        source.fetch(range(16))
    assert sum(len(y) for _, y in Feed(source, batch_size=8, bad_samples=1)) == 39


def test_arrays_of_several_forms_are_named_by_their_keys_where_they_do_not_stack(tmp_path):
    source = table_of(tmp_path / "x.db", {f"img-{i:03}": bytes(3 if i % 4 else 5) for i in range(40)})
    assert source[0][0].shape == source.fetch([0])[0][0].shape == (5,)
    with pytest.raises(DataError, match=r"uint8 \[5\] in sample 4 \(id = 'img-004'\), uint8 \[3\] in sample 5 "):
        source.fetch([4, 5, 6])


@pytest.mark.parametrize("value", [b"blob", 2**53 + 1])
def test_a_value_is_damage_and_a_dtype_the_same_whatever_rows_are_read_with_it(tmp_path, value):
    with sqlite3.connect(tmp_path / "x.db") as connection:
        connection.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, x, y)")
        connection.executemany("INSERT INTO t VALUES (?, ?, ?)", [(i, i / 2 if i % 3 else i, i) for i in range(20)])
        connection.execute("UPDATE t SET x = ? WHERE id = 7", [value])
    source = sql(f"sqlite:///{tmp_path}/x.db", "SELECT * FROM t", key="id", target="y")
    with pytest.raises(DamagedSample, match=r"id = 7 cannot be read: x is (bytes|int), not float"):
        source.fetch([7])
    batches = list(Feed(source, batch_size=1, shuffle=False, bad_samples=1))
    assert {inputs.dtype for inputs, _ in batches} == {torch.float64}  # though SQLite has 0 and 3 as whole numbers
    assert torch.cat([targets for _, targets in batches]).tolist() == [i for i in range(20) if i != 7]


def test_a_server_that_goes_away_and_comes_back_is_waited_for(server, caplog):
    import psycopg

    place = Place(server.url, lambda: psycopg.connect(server.url), "BYTEA")
    source = open_source(place, place.make())
    source._backoff = Backoff(first=0.02, longest=0.1, give_up=20.0)
    expected = source[0][1]
    server.stop()
    restart = threading.Timer(0.15, server.start)
    restart.start()
    assert source[0][1] == expected  # by another connection than before
    restart.join()
    assert any("again in" in each for each in caplog.messages)


def test_a_server_that_is_away_when_a_source_is_opened_is_waited_for(server, caplog):
    import psycopg

    place = Place(server.url, lambda: psycopg.connect(server.url), "BYTEA")
    table = place.make()
    server.stop()
    restart = threading.Timer(0.15, server.start)
    restart.start()
    assert len(open_source(place, table)) == NUM_ROWS
    restart.join()
    assert any("again in" in each for each in caplog.messages)


def test_a_server_that_stays_away_ends_the_run_with_its_url_and_no_password(server):
    import psycopg

    place = Place(server.url, lambda: psycopg.connect(server.url), "BYTEA")
    source = open_source(place, place.make())
    source._backoff = QUICK
    server.stop()
    try:
        with pytest.raises(DataError, match="need an origin that can be reached"):
            source[0]
    finally:
        server.start()


class Released(logging.Handler):
    """Calls a function when the first attempt has failed: the retry is logged."""

    def __init__(self, release: Callable[[], object]) -> None:
        super().__init__()
        self.on_first, self.texts = release, list[str]()

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())
        if len(self.texts) == 1:
            self.on_first()


@contextlib.contextmanager
def released_by_retry(release: Callable[[], object]) -> Iterator[list[str]]:
    handler, log = Released(release), logging.getLogger("fourfold")
    log.addHandler(handler)
    try:
        yield handler.texts
    finally:
        log.removeHandler(handler)
        assert handler.texts


def test_a_file_of_sqlite_that_is_locked_is_waited_for_when_it_is_opened_and_read(tmp_path, monkeypatch):
    monkeypatch.setattr(sql_module, "TIMEOUT_SECONDS", 0.01)
    path = tmp_path / "rows.db"
    writer = sqlite3.connect(path, isolation_level=None)
    writer.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, x REAL)")
    writer.executemany("INSERT INTO t VALUES (?, ?)", [(n, float(n)) for n in range(4)])
    found = []
    for read in (lambda: found.append(sql(f"sqlite:///{path}", "SELECT * FROM t", key="id")), lambda: found[0][3]):
        writer.execute("BEGIN EXCLUSIVE")
        with released_by_retry(lambda: writer.execute("COMMIT")) as texts:
            read()
        assert "database is locked; again in" in texts[0]
    writer.close()


def test_a_file_of_sqlite_that_was_moved_is_waited_for_until_it_returns(tmp_path):
    path, elsewhere = tmp_path / "rows.db", tmp_path / "elsewhere.db"
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, x REAL)")
        connection.executemany("INSERT INTO t VALUES (?, ?)", [(n, float(n)) for n in range(4)])
    feed = Feed(sql(f"sqlite:///{path}", "SELECT * FROM t", key="id"), batch_size=2)
    assert len(list(feed)) == 2
    path.rename(elsewhere)
    with released_by_retry(lambda: elsewhere.rename(path)):
        assert len(list(feed)) == 2


def test_passwords_are_neither_shown_nor_stored(monkeypatch):
    pytest.importorskip("psycopg")
    monkeypatch.setattr(sql_module, "OPENING", Backoff(give_up=0.0))
    url = "postgresql://me:secret@127.0.0.1:1/name?password=secret"
    with pytest.raises(DataError) as found:
        sql(url, "SELECT 1", key="id")
    assert "secret" not in str(found.value)
    assert "postgresql://127.0.0.1:1/name" in str(found.value)
    for url in ("postgresql://me:secret%zz@host/name", "postgresql://me:secret@[/name"):  # which libpq quotes
        with pytest.raises(DataError, match=r"postgresql://(host|\[)/name, which cannot be read") as found:
            sql(url, "SELECT 1", key="id")
        assert "secret" not in str(found.value)
        assert found.value.__suppress_context__


def test_a_path_is_no_url_and_no_query(tmp_path):
    path = tmp_path / "x.db"
    path.touch()
    with pytest.raises(DataError, match=rf"url of type PosixPath +need a string +try sqlite:///{path}"):
        sql(path, "SELECT 1", key="id")
    with pytest.raises(DataError, match=rf"{path} +need sqlite:///FILE .* try sqlite:///{path}"):
        sql(str(path), "SELECT 1", key="id")
    with pytest.raises(DataError, match=r"query of type PosixPath +need a string +try .*read_text"):
        sql(f"sqlite:///{path}", path, key="id")


def test_urls_of_no_known_database_are_named(tmp_path, monkeypatch):
    with pytest.raises(DataError, match=r"mysql://host/name +need sqlite:///FILE or postgresql"):
        sql("mysql://me:secret@host/name", "SELECT 1", key="id")
    for path in (f"{tmp_path}/missing.db", "a" * 5000, "a\0b", "\ud800"):
        with pytest.raises(DataError, match="which is no file"):
            sql(f"sqlite:///{path}", "SELECT 1", key="id")
    for path in ("[", "x.db", ""):
        with pytest.raises(DataError, match=rf"sqlite://{re.escape(path)} +need .* three slashes +try sqlite:///"):
            sql(f"sqlite://{path}", "SELECT 1", key="id")
    wrong: Any = ["image"]
    with pytest.raises(DataError, match=r"arrays of type list +need a dict"):
        sql("sqlite:///x.db", "SELECT 1", key="id", arrays=wrong)
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(DataError, match=r"try pip install 'fourfold\[postgres\]'"):
        open_database("postgresql://host/name", "SELECT 1", "id")


def test_an_index_is_made_once_by_processes_that_open_it_at_once(tmp_path):
    scans = []

    def rows() -> Iterator[tuple[int, int]]:
        scans.append(1)
        yield from ((n, n) for n in range(1000))

    threads = [threading.Thread(target=lambda: open_index(tmp_path, "a query", rows())) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(scans) == 1
    assert open_index(tmp_path, "a query", iter(())).rows([999]) == [(999, 999)]


@pytest.mark.parametrize("name", ["keys", "digests", "manifest.json", "ends"])
def test_a_damaged_index_is_named(tmp_path, name):
    open_index(tmp_path, "a query", [(f"key {n}", n) for n in range(10)])
    content = (tmp_path / name).read_bytes()
    for damaged in (content[:-3], content + b"x", b""):
        (tmp_path / name).write_bytes(damaged)
        with pytest.raises(DataError, match=name):
            open_index(tmp_path, "a query", iter(()))


@pytest.mark.parametrize("name", ["lock", "manifest.json", "keys"])
def test_an_index_with_a_pipe_is_damaged_and_not_waited_for(tmp_path, name):
    os.mkfifo(tmp_path / name)
    with pytest.raises(DataError, match=f"{name}, which is damaged"):
        open_index(tmp_path, "a query", [(1, 1)])


def test_keys_of_an_index_that_are_no_text_are_named_and_a_lock_is_not_emptied(tmp_path):
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "index").mkdir()
    (tmp_path / "index" / "lock").symlink_to(tmp_path / "mine")
    index = open_index(tmp_path / "index", "a query", [(f"key {n}", n) for n in range(10)])
    assert (tmp_path / "mine").read_text() == "mine"
    (tmp_path / "index" / "keys").write_bytes(b"\xff" * 50)
    with pytest.raises(DataError, match="keys, which is damaged"):
        index.rows([3])


def test_an_index_that_was_being_made_when_its_process_ended_is_made_again(tmp_path):
    def ends() -> Iterator[tuple[int, int]]:
        yield 1, 1
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        open_index(tmp_path, "a query", ends())
    assert len(open_index(tmp_path, "a query", [(1, 1), (2, 2)])) == 2


def test_rows_with_other_values_or_types_have_other_digests():
    rows = [
        (1, "a"),
        (1, "b"),
        ("1", "a"),
        (1.0, "a"),
        (b"1", "a"),
        (None, "a"),
        (1, "a", None),
        ("1a",),
        ("1", "", "a"),
    ]
    assert len({row_digest(row) for row in rows}) == len(rows)
