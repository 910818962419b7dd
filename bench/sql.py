"""SQL source: rows of 10 kB from a PostgreSQL server on this machine, in random order.

    PYTHONPATH=src:. python -m bench.sql [--rounds 5] [--rows 20000]

feed        batches of 64 rows by `ff.sql`, digests checked, prefetched by `ff.Feed`
DataLoader  torch's, whose dataset makes one query for each sample; 0 and 2 workers
cursor      one server-side cursor over all rows in the order of the table, nothing decoded
Law: all of them read the same rows; a ratio is a median over rounds, in which they alternate.
"""

import argparse
import contextlib
import os
import pwd
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psycopg
import torch
from torch.utils.data import DataLoader, Dataset

from bench.measurement import describe_machine, format_table
from fourfold.feed.feed import Feed
from fourfold.feed.rows.sql import sql

ROW_BYTES, BATCH = 10_000, 64
QUERY = "SELECT id, id AS label, content FROM samples"


class OneByOne(Dataset[Any]):
    """A dataset as it is often written: one query for each sample."""

    def __init__(self, url: str, num_rows: int) -> None:
        self._url, self._num_rows = url, num_rows
        self._connection: Any = None

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        if self._connection is None:
            self._connection = psycopg.connect(self._url, autocommit=True)
        cursor = self._connection.execute("SELECT content FROM samples WHERE id = %s", [number], binary=True)
        return torch.from_numpy(np.frombuffer(bytearray(cursor.fetchone()[0]), np.uint8)), number


@contextlib.contextmanager
def server() -> Iterator[str]:
    """The URL of a server that lives as long as the block. Its files are in memory where /dev/shm is."""
    programs = Path(next(iter(sorted(Path("/usr/lib/postgresql").glob("*/bin"))), shutil.which("initdb") or ""))
    user = "postgres" if os.getuid() == 0 else None
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        if user:
            os.chown(folder, pwd.getpwnam(user).pw_uid, -1)

        def run(name: str, *arguments: str) -> None:
            command = [str(programs / name), "-D", f"{folder}/data", *arguments]
            subprocess.run(command, check=True, user=user, cwd="/", stdout=subprocess.DEVNULL)

        run("initdb", "-U", "tester", "--auth=trust", "--no-sync")
        options = f"-c listen_addresses='' -c shared_buffers=1GB -k {folder} -F"
        run("pg_ctl", "-o", options, "-w", "-l", f"{folder}/log", "start")
        try:
            yield f"postgresql://tester@/postgres?host={folder}"
        finally:
            run("pg_ctl", "-w", "-m", "immediate", "stop")


def fill(url: str, num_rows: int) -> None:
    generator = np.random.default_rng(0)
    with psycopg.connect(url) as connection:
        connection.execute("CREATE TABLE samples (id INTEGER PRIMARY KEY, content BYTEA)")
        connection.execute("ALTER TABLE samples ALTER COLUMN content SET STORAGE EXTERNAL")
        with connection.cursor().copy("COPY samples FROM STDIN (FORMAT BINARY)") as copy:
            copy.set_types(["int4", "bytea"])
            for number in range(num_rows):
                copy.write_row([number, generator.bytes(ROW_BYTES)])


def read_cursor(url: str) -> int:
    with psycopg.connect(url) as connection, connection.cursor(name="all", binary=True) as cursor:
        cursor.itersize = BATCH
        return sum(len(content) for _, _, content in cursor.execute(QUERY))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=20_000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(describe_machine())
    with server() as url:
        fill(url, options.rows)
        begin = time.perf_counter()
        source = sql(url, QUERY, key="id", target="label")
        print(f"keys and digests of {options.rows} rows: {time.perf_counter() - begin:.2f} s")
        feed = Feed(source, batch_size=BATCH)
        loaders = {n: DataLoader(OneByOne(url, options.rows), BATCH, shuffle=True, num_workers=n) for n in (0, 2)}
        kinds: dict[str, Callable[[], int]] = {
            "feed": lambda: sum(content.numel() for content, _ in feed),
            "DataLoader, 0 workers": lambda: sum(content.numel() for content, _ in loaders[0]),
            "DataLoader, 2 workers": lambda: sum(content.numel() for content, _ in loaders[2]),
            "cursor": lambda: read_cursor(url),
        }
        seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
        for _ in range(options.rounds):
            for kind, read in kinds.items():
                begin = time.perf_counter()
                assert read() == options.rows * ROW_BYTES
                seconds[kind].append(time.perf_counter() - begin)
        report(seconds, options.rows)


def report(seconds: dict[str, list[float]], num_rows: int) -> None:
    rows = [["", "MB/s", "feed's rate / this"]]
    for kind, times in seconds.items():
        ratio = statistics.median(t / f for t, f in zip(times, seconds["feed"], strict=True))
        rows.append([kind, f"{num_rows * ROW_BYTES / statistics.median(times) / 1e6:.0f}", f"{ratio:.2f}"])
    print(format_table(rows))


if __name__ == "__main__":
    main()
