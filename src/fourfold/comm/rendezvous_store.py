"""Rendezvous store: the torch.distributed store where ranks find each other if torch's own variables do not name one.

store  on one host a file in a folder that only this user may enter; between hosts a TCPStore that rank 0 serves
note   a file in that folder where rank 0 writes, for the other ranks of the host, where the store is
Law: a note belongs to one start of one job. It is named after the job and its launcher process, read only while the
rank that wrote it lives, and removed once all ranks have met. So no rank ever joins a dead job, or another one.

A TCPStore authenticates nobody: on a machine of many users, any of them can read and write it.
"""

import contextlib
import fcntl
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

from fourfold.comm.file_store import GROUP_TIMEOUT_SECONDS, open_file_store
from fourfold.environment.launchers import RankInfo
from fourfold.environment.processes import is_alive, process_id
from fourfold.environment.rendezvous import FileRendezvous, LocalRendezvous, TCPRendezvous, find_rendezvous
from fourfold.words.errors import LaunchError, Problem, os_error_text

HOST_TIMEOUT_SECONDS = 60.0  # for the ranks of one host to join
MULTI_HOST_TIMEOUT_SECONDS = 300.0  # hosts, and pods above all, start at different times
POLL_SECONDS = 0.01
RELEASE_TIMEOUT_SECONDS = 1.0  # for another rank to release its store, which takes a millisecond
STORE_NAME_PATTERN = re.compile(r"store-([0-9]+)-([0-9]+)-[0-9a-z]+")  # pid and start ticks of its rank 0

_open_stores: list[tuple[Path, Store]] = []
"""This process's stores in files, and their folders, until `release_stores`."""


def open_store(info: RankInfo, environ: Mapping[str, str]) -> Store | None:
    """The store to make the process group with; None if torch finds its own. Returns once all ranks have come.

    Raises LaunchError, and torch's DistError if ranks do not come in time.
    """
    address = find_rendezvous(info, environ)
    if address is None:
        return None
    if isinstance(address, FileRendezvous):
        return open_file_store(address.path, info.size, GROUP_TIMEOUT_SECONDS)
    if isinstance(address, LocalRendezvous):
        return _open_host_store(info, address)
    return _open_tcp_store(info, address, MULTI_HOST_TIMEOUT_SECONDS)


def describe_address(info: RankInfo, environ: Mapping[str, str]) -> str:
    """The rendezvous address, for messages."""
    address = find_rendezvous(info, environ)
    return f"{address.host}:{address.port}" if isinstance(address, TCPRendezvous) else "this host"


def _open_host_store(info: RankInfo, address: LocalRendezvous) -> Store:
    """Returns when all ranks have come."""
    folder = _private_folder()
    note = folder / address.note_name()
    if info.rank > 0:
        return _join_store(folder / _wait_for_note(note, info), info)
    _remove_stale_stores(folder)
    pid, start_ticks = process_id(os.getpid())
    name = f"store-{pid}-{start_ticks}-{secrets.token_hex(8)}"
    part = note.with_name(f"{note.name}.{pid}")
    try:
        part.write_text(json.dumps({"store": name, "pid": pid, "began": start_ticks}))
        part.replace(note)  # renamed into place: another rank may read it at any moment
    except OSError as error:
        got = f"{note} could not be written: {os_error_text(error)}"
        raise LaunchError(Problem(got, "room for a small file", "TMPDIR=…")) from None
    try:
        return _join_store(folder / name, info)
    finally:
        note.unlink(missing_ok=True)


def _join_store(path: Path, info: RankInfo) -> Store:
    store = open_file_store(str(path), info.size, HOST_TIMEOUT_SECONDS)
    _open_stores.append((path.parent, store))
    store.set(f"here/{info.rank}", "")
    store.wait([f"here/{rank}" for rank in range(info.size)], timedelta(seconds=HOST_TIMEOUT_SECONDS))
    return store


def release_stores() -> None:
    """Release the stores in files, once no process group uses them. The last rank to do so removes the file.

    One rank at a time: torch counts a leaving rank in two steps, so if two ranks leave at once, neither may see that it
    is the last.
    """
    while _open_stores:
        folder, store = _open_stores.pop()
        with contextlib.suppress(FileNotFoundError), _folder_lock(folder):
            del store


@contextlib.contextmanager
def _folder_lock(folder: Path) -> Iterator[None]:
    """Within, this process holds the folder's lock, or has given up waiting for it: its holder may be stopped."""
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
    """Remove the stores of killed jobs: those whose rank 0 has ended."""
    for file in folder.glob("store-*"):
        match = STORE_NAME_PATTERN.fullmatch(file.name)
        if match and not is_alive(int(match[1]), int(match[2])):
            with contextlib.suppress(OSError):  # not one of ours: a folder, say
                file.unlink()


def _open_tcp_store(info: RankInfo, address: TCPRendezvous, timeout_seconds: float) -> Store:
    """Rank 0 serves. Returns once all ranks have come (torch's `wait_for_workers`)."""
    return TCPStore(
        address.host,
        address.port,
        info.size,
        is_master=info.rank == 0,
        timeout=timedelta(seconds=timeout_seconds),
    )


def _wait_for_note(note: Path, info: RankInfo) -> str:
    """The name of the store's file, once a rank 0 that is alive has written it."""
    deadline = time.monotonic() + HOST_TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            fields = json.loads(note.read_text())
            if process_id(fields["pid"]).start_ticks == fields["began"]:
                return fields["store"]
        time.sleep(POLL_SECONDS)
    got = f"rank 0 did not arrive within {HOST_TIMEOUT_SECONDS:.0f} s; rank {info.rank} looked for {note}"
    raise LaunchError(
        Problem(got, "ranks that see each other's processes and one temporary folder", "MASTER_ADDR=127.0.0.1")
    )


def _private_folder() -> Path:
    """A folder that only this user can write to. Raises LaunchError."""
    folder = Path(tempfile.gettempdir()) / f"fourfold-{os.getuid()}"
    why = ""
    try:
        with contextlib.suppress(FileExistsError):  # whatever is there
            folder.mkdir(mode=0o700)
        status = os.lstat(folder)
        if not stat.S_ISDIR(status.st_mode):
            why = "is not a folder"
        elif status.st_uid != os.getuid():
            why = "is another user's"
        elif status.st_mode & 0o077:
            why = "is open to others"
    except OSError as error:
        why = f"could not be made: {os_error_text(error)}"
    if why:
        raise LaunchError(Problem(f"{folder} {why}", "a folder of your own, mode 700", "TMPDIR=…"))
    return folder
