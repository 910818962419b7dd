"""Laws of temporary folders: what a killed process leaves is removed at the next start, and nothing that is in use."""

import importlib
import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import fourfold as ff
from fourfold.checkpoint import export
from fourfold.environment.temporary_folder import temporary_folder
from fourfold.launcher import local_job


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The temporary folder of the system, as this test sees it."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def killed(code: str, folder: Path) -> None:
    """Run the code in a process that is killed in the middle of it, by itself or at the end."""
    code = f"import os, signal\n{code}\nos.kill(os.getpid(), signal.SIGKILL)"
    process = subprocess.run([sys.executable, "-c", code], env={**os.environ, "TMPDIR": str(folder)}, timeout=60)
    assert process.returncode == -signal.SIGKILL


def test_a_folder_of_a_killed_process_is_removed_when_the_next_is_made(here):
    killed(
        "from fourfold.environment.temporary_folder import temporary_folder\n"
        "with temporary_folder() as folder:\n"
        "    (folder / 'file').write_bytes(b'x')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)",
        here,
    )
    (left,) = here.iterdir()
    with temporary_folder() as folder, temporary_folder() as other:
        assert {*here.iterdir()} == {folder, other}  # and none that is in use
        assert folder.stat().st_mode & 0o777 == 0o700
    assert left not in (folder, other)
    assert not [*here.iterdir()]


@pytest.mark.parametrize("name", ["tempfile.mkdtemp", "fourfold.environment.temporary_folder._open"])
def test_a_folder_that_is_taken_for_a_leftover_before_it_is_locked_is_made_again(here, monkeypatch, name):
    module, function = name.rsplit(".", 1)
    original = getattr(importlib.import_module(module), function)

    def make_and_remove_once(*arguments: Any, **options: Any) -> Any:
        made = original(*arguments, **options)
        monkeypatch.setattr(name, original)
        for left in here.iterdir():
            left.rmdir()
        return made

    monkeypatch.setattr(name, make_and_remove_once)
    with temporary_folder() as folder:
        assert [*here.iterdir()] == [folder]


def test_a_killed_reader_of_a_database_leaves_no_index(here):
    with sqlite3.connect(here / "rows.db") as connection:
        connection.execute("CREATE TABLE t(id INTEGER PRIMARY KEY, y INTEGER)")
        connection.executemany("INSERT INTO t VALUES(?, ?)", [(number, 2 * number) for number in range(9)])
    arguments = f"'sqlite:///{here}/rows.db', 'SELECT id, y FROM t', key='id'"
    killed(f"import fourfold as ff\nsource = ff.sql({arguments})\nassert source[4] == {{'y': 8}}", here)
    assert [path.name for path in here.iterdir()] == ["rows.db"]
    source = ff.sql(f"sqlite:///{here}/rows.db", "SELECT id, y FROM t", key="id")
    assert [path.name for path in here.iterdir()] == ["rows.db"]
    assert source.fetch([8, 0])["y"].tolist() == [16, 0]  # type: ignore[index]


def test_an_export_that_was_killed_is_removed_by_the_next(here):
    killed(
        "from pathlib import Path\n"
        "from fourfold.checkpoint.export import _staged\n"
        f"with _staged(Path({str(here)!r}, 'weights')) as staging:\n"
        "    staging.write_bytes(b'half')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)",
        here,
    )
    with export._staged(here / "weights") as staging:
        staging.write_bytes(b"whole")
    assert [path.name for path in here.iterdir()] == ["weights"]


def test_a_launcher_removes_what_a_killed_one_has_left(here):
    """The second launcher is stopped by its own start function: no rank is needed."""
    killed(
        "from fourfold.launcher import local_job\n"
        "def kill(*_, **__): os.kill(os.getpid(), signal.SIGKILL)\n"
        "local_job.launch(['-c'], num_processes=1, start_rank=kill)",
        here,
    )
    (left,) = here.iterdir()

    def stop(*_: object, **__: object) -> None:
        seen.extend(here.iterdir())
        signal.raise_signal(signal.SIGINT)

    seen: list[Path] = []
    assert local_job.launch(["-c"], num_processes=1, start_rank=stop).exit_code != 0  # type: ignore[arg-type]
    assert len(seen) == 1
    assert left not in seen
    assert not [*here.iterdir()]
