"""Meeting: the store through which the ranks of a job find each other, where torch's own variables do not say it.

store     on one host a file in a folder that only this user may enter; between hosts a TCPStore that rank 0 serves
note      a file in that folder that tells the other ranks of this host where the store is
launcher  the nearest ancestor of a process that has not the rank's variable in its environment: mpirun, or its helper
Law: a note belongs to one start of one job: it is named by the job and its launcher process, read only while the
rank that wrote it lives, and removed once all have met. So neither a dead job nor a neighbour's is ever joined.

A TCPStore asks nobody who he is: on a machine of many users, any of them can read and write it.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import secrets
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path

from torch.distributed import Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from fourfold.environment.launchers import RankInfo
from fourfold.environment.processes import ProcessId, has_variable, is_alive, parent_pid, process_id
from fourfold.environment.rendezvous import FileRendezvous, LocalRendezvous, TCPRendezvous
from fourfold.environment.rendezvous import find_rendezvous as place_of
from fourfold.parts.comm.file_store import GROUP_TIMEOUT_SECONDS, open_file_store
from fourfold.words.errors import LaunchError, Problem, os_error_text

HOST_TIMEOUT_SECONDS = 60.0  # for the ranks of one host to meet
MULTI_HOST_TIMEOUT_SECONDS = 300.0  # hosts, and pods above all, do not start at the same time
POLL_SECONDS = 0.01
RELEASE_TIMEOUT_SECONDS = 1.0  # for another rank to let go of its store: it takes a millisecond
STORE_NAME_PATTERN = re.compile(
    r"store-([0-9]+)-([0-9]+)-[0-9a-z]+"
)  # its rank 0: the process's number, and when it began

_open_stores: list[tuple[Path, Store]] = []
"""The stores in files that this process has, with their folders, until `release`."""


def open_store(seat: RankInfo, environ: Mapping[str, str]) -> Store | None:
    """The store to make the process group with, when all ranks have come; None where torch finds its own.

    Raises LaunchError, and torch's DistError where ranks do not come in time.
    """
    place = place_of(seat, environ)
    if place is None:
        return None
    if isinstance(place, FileRendezvous):
        return open_file_store(place.path, seat.size, GROUP_TIMEOUT_SECONDS)
    if isinstance(place, LocalRendezvous):
        return _open_host_store(seat, place)
    return _open_tcp_store(seat, place, MULTI_HOST_TIMEOUT_SECONDS)


def describe_address(seat: RankInfo, environ: Mapping[str, str]) -> str:
    """The meeting place, for people."""
    place = place_of(seat, environ)
    return f"{place.host}:{place.port}" if isinstance(place, TCPRendezvous) else "this host"


def _open_host_store(seat: RankInfo, place: LocalRendezvous) -> Store:
    """Returns when all ranks have come."""
    folder = _private_folder()
    note = folder / _note_name(place)
    if seat.rank > 0:
        return _join_store(folder / _wait_for_note(note, seat), seat)
    _remove_stale_stores(folder)
    pid, began = process_id(os.getpid())
    name = f"store-{pid}-{began}-{secrets.token_hex(8)}"
    part = note.with_name(f"{note.name}.{pid}")
    try:
        part.write_text(json.dumps({"store": name, "pid": pid, "began": began}))
        part.replace(note)  # Renamed into place: another rank may read it at any moment.
    except OSError as error:
        got = f"{note} could not be written: {os_error_text(error)}"
        raise LaunchError(Problem(got, "room for a small file", "TMPDIR=…")) from None
    try:
        return _join_store(folder / name, seat)
    finally:
        note.unlink(missing_ok=True)


def _join_store(path: Path, seat: RankInfo) -> Store:
    store = open_file_store(str(path), seat.size, HOST_TIMEOUT_SECONDS)
    _open_stores.append((path.parent, store))
    store.set(f"here/{seat.rank}", "")
    store.wait([f"here/{rank}" for rank in range(seat.size)], timedelta(seconds=HOST_TIMEOUT_SECONDS))
    return store


def release_stores() -> None:
    """Let go of the stores in files, once no process group uses them: the last rank removes the file.

    One rank at a time: torch counts a rank that leaves in two steps, and of two ranks that leave at once neither may
    see that it is the last.
    """
    while _open_stores:
        folder, store = _open_stores.pop()
        with contextlib.suppress(FileNotFoundError), _folder_lock(folder):
            del store


@contextlib.contextmanager
def _folder_lock(folder: Path) -> Iterator[None]:
    """Within, no other process is in here; unless one that was stopped in here keeps the rest waiting."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    deadline = time.monotonic() + RELEASE_TIMEOUT_SECONDS
    try:
        while time.monotonic() < deadline:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            time.sleep(POLL_SECONDS)
        yield
    finally:
        os.close(descriptor)


def _remove_stale_stores(folder: Path) -> None:
    """Remove the stores of jobs that were killed: those whose rank 0 has gone."""
    for file in folder.glob("store-*"):
        match = STORE_NAME_PATTERN.fullmatch(file.name)
        if match and not is_alive(int(match[1]), int(match[2])):
            with contextlib.suppress(OSError):  # somebody else's: a folder, say
                file.unlink()


def _open_tcp_store(seat: RankInfo, address: TCPRendezvous, timeout_seconds: float) -> Store:
    """Rank 0 serves. Returns when all ranks have come (torch's `wait_for_workers`)."""
    return TCPStore(
        address.host,
        address.port,
        seat.size,
        is_master=seat.rank == 0,
        timeout=timedelta(seconds=timeout_seconds),
    )


def _wait_for_note(note: Path, seat: RankInfo) -> str:
    """The store's file, as soon as a rank 0 that lives has told it."""
    deadline = time.monotonic() + HOST_TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            told = json.loads(note.read_text())
            if process_id(told["pid"]).start_ticks == told["began"]:
                return told["store"]
        time.sleep(POLL_SECONDS)
    got = f"rank 0 did not come within {HOST_TIMEOUT_SECONDS:.0f} s; rank {seat.rank} looked for {note}"
    raise LaunchError(
        Problem(got, "ranks that see each other's processes and one temporary folder", "MASTER_ADDR=127.0.0.1")
    )


def _private_folder() -> Path:
    """A folder of this user's that nobody else can write to."""
    folder = Path(tempfile.gettempdir()) / f"fourfold-{os.getuid()}"
    why = ""
    try:
        with contextlib.suppress(FileExistsError):  # whatever is there
            folder.mkdir(mode=0o700)
        found = os.lstat(folder)
        if not stat.S_ISDIR(found.st_mode):
            why = "is no folder"
        elif found.st_uid != os.getuid():
            why = "is another user's"
        elif found.st_mode & 0o077:
            why = "is open to others"
    except OSError as error:
        why = f"could not be made: {os_error_text(error)}"
    if why:
        raise LaunchError(Problem(f"{folder} {why}", "a folder of your own, mode 700", "TMPDIR=…"))
    return folder


def _note_name(place: LocalRendezvous) -> str:
    launcher = _launcher_process(place.variable)
    told = json.dumps([place.job, *launcher])
    return f"rendezvous-{hashlib.sha256(told.encode()).hexdigest()[:24]}"


def _launcher_process(variable: str) -> ProcessId:
    """The nearest ancestor that is no part of the rank: between it and us there may be shells and wrappers."""
    pid = parent_pid(os.getpid())
    while pid > 1 and has_variable(pid, variable):
        pid = parent_pid(pid)
    return process_id(pid)
