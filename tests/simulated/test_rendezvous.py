"""The rendezvous of one host: ranks only ever join a living rank 0 of the same job."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fourfold.comm import init, rendezvous_store
from fourfold.environment import launchers
from fourfold.environment.launchers import MPICH, RankInfo
from fourfold.environment.processes import process_id
from fourfold.environment.rendezvous import LocalRendezvous
from fourfold.words.errors import LaunchError

RANK_1 = RankInfo(MPICH, 1, 2, 1, 2)


def write(note: Path, *, pid: int, began: int) -> None:
    note.write_text(json.dumps({"store": "store-7", "pid": pid, "began": began}))


def test_a_note_is_valid_while_its_writer_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    this = process_id(os.getpid())
    write(tmp_path / "note", pid=this.pid, began=this.start_ticks)
    assert rendezvous_store._wait_for_note(tmp_path / "note", RANK_1) == "store-7"
    monkeypatch.setattr(rendezvous_store, "HOST_TIMEOUT_SECONDS", 0.1)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    reused_pid, dead = (this.pid, this.start_ticks - 1), (ended.pid, this.start_ticks)
    for pid, began in (reused_pid, dead):
        write(tmp_path / "note", pid=pid, began=began)
        with pytest.raises(LaunchError, match="rank 0 did not arrive"):
            rendezvous_store._wait_for_note(tmp_path / "note", RANK_1)


def test_the_stores_of_killed_jobs_are_removed(tmp_path: Path) -> None:
    this = process_id(os.getpid())
    kept, gone = (tmp_path / f"store-{this.pid}-{began}-ab" for began in (this.start_ticks, this.start_ticks - 1))
    for file in (kept, gone, tmp_path / "rendezvous-ab"):
        file.touch()
    rendezvous_store._remove_stale_stores(tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["rendezvous-ab", kept.name]


NAME = (
    "from fourfold.environment.rendezvous import LocalRendezvous; "
    "print(LocalRendezvous('MPICH', 'PMI_RANK').note_name())"
)
LAUNCHER = "import os, subprocess, sys; subprocess.run(sys.argv[1:], env={**os.environ, 'PMI_RANK': '0'}, check=True)"


@pytest.mark.parametrize("text", ["", "{}", "[]", "3", '{"pid": null, "began": 1, "port": 7}', "[" * 100_000])
def test_a_malformed_note_is_ignored(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous_store, "HOST_TIMEOUT_SECONDS", 0.05)
    (tmp_path / "note").write_text(text)
    with pytest.raises(LaunchError, match="rank 0 did not arrive"):
        rendezvous_store._wait_for_note(tmp_path / "note", RANK_1)


def test_ranks_look_for_the_note_of_their_own_launcher() -> None:
    def name(*command: str, **more: str) -> str:
        environ = {**{k: v for k, v in os.environ.items() if k != "PMI_RANK"}, **more}
        return subprocess.run(command, env=environ, capture_output=True, text=True, check=True, timeout=300).stdout

    rank = [sys.executable, "-c", NAME]
    alone = name(*rank, PMI_RANK="1")
    # A shell between the launcher and the rank belongs to the rank.
    assert name("sh", "-c", f'"{sys.executable}" -c "{NAME}"; true', PMI_RANK="0") == alone
    assert name(sys.executable, "-c", LAUNCHER, *rank) != alone


def test_a_folder_that_others_can_write_to_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous_store.tempfile, "gettempdir", lambda: str(tmp_path))
    folder = rendezvous_store._private_folder()
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o770)
    with pytest.raises(LaunchError, match="mode 700"):
        rendezvous_store._private_folder()
    folder.rmdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(LaunchError, match=r"is not a folder   need .*mode 700"):
        rendezvous_store._private_folder()


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("file", "is not a folder"),
        ("link to nowhere", "is not a folder"),
        ("no folder above", "could not be made: not a directory"),
        ("another user", "is another user's"),
    ],
)
def test_the_error_says_why_the_folder_is_unusable(
    kind: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    above = tmp_path / "file" if kind == "no folder above" else tmp_path
    (tmp_path / "file").touch()
    monkeypatch.setattr(rendezvous_store.tempfile, "gettempdir", lambda: str(above))
    folder = above / f"fourfold-{os.getuid()}"
    if kind == "file":
        folder.touch()
    elif kind == "link to nowhere":
        folder.symlink_to("nowhere")
    elif kind == "another user":
        another = os.getuid() + 1
        monkeypatch.setattr(rendezvous_store.os, "getuid", lambda: another)
        folder = above / f"fourfold-{another}"
        folder.mkdir(mode=0o700)
    with pytest.raises(LaunchError, match=re.escape(f"{folder} {message}")):
        rendezvous_store._private_folder()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_a_note_that_a_full_disk_rejects_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous_store.tempfile, "gettempdir", lambda: str(tmp_path))
    folder, address = rendezvous_store._private_folder(), LocalRendezvous("MPICH", "PMI_RANK")
    (folder / f"{address.note_name()}.{os.getpid()}").symlink_to("/dev/full")
    with pytest.raises(LaunchError, match="could not be written: no space left on device   need room"):
        rendezvous_store._open_host_store(RankInfo(MPICH, 0, 2, 0, 2), address)


def test_a_store_for_which_the_disk_has_no_room_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise torch.distributed.DistStoreError("No space left on device\nException raised from …")

    monkeypatch.setattr(rendezvous_store, "open_store", full)
    monkeypatch.setattr(launchers, "detect", lambda _: RankInfo(launchers.TORCHRUN, 0, 2, 0, 2))
    with pytest.raises(LaunchError, match=r"No space left on device +need room .* try TMPDIR="):
        init._init_process_group("gloo")


def test_files_that_are_not_stores_are_kept(tmp_path: Path) -> None:
    this = process_id(os.getpid())
    gone = tmp_path / f"store-{this.pid}-{this.start_ticks - 1}-ab"
    for name in ("store-ab", "store-1-2-3-4-5", "store-x-y-ab"):
        (tmp_path / name).touch()
    (tmp_path / f"store-1-{this.start_ticks}-folder").mkdir()
    gone.touch()
    rendezvous_store._remove_stale_stores(tmp_path)
    assert not gone.exists()
    assert len(list(tmp_path.iterdir())) == 4


LEAVE = """
import multiprocessing, sys
from pathlib import Path
from fourfold.environment import launchers
from fourfold.environment.launchers import MPICH, RankInfo
from fourfold.comm import init, rendezvous_store

def take_part(rank, folder, barrier):
    for number in range(300):
        rendezvous_store._join_store(folder / f"store-{number}", RankInfo(MPICH, rank, 2, rank, 2))
        barrier.wait()
        rendezvous_store.release_stores()

context = multiprocessing.get_context("fork")
barrier = context.Barrier(2, timeout=60)
ranks = [context.Process(target=take_part, args=(rank, Path(sys.argv[1]), barrier)) for rank in range(2)]
for rank in ranks:
    rank.start()
for rank in ranks:
    rank.join()
sys.exit(any(rank.exitcode for rank in ranks))
"""


def test_ranks_that_leave_at_the_same_time_leave_no_store_behind(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", LEAVE, str(tmp_path)], check=True, timeout=300)
    assert list(tmp_path.iterdir()) == []
