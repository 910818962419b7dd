"""A run's folder: the resolved plan, the settings, the log, the checkpoints. Written by rank 0 alone.

runs/NAME/plan.toml      every field, as it was resolved
runs/NAME/settings.json  the command's settings, the transport, the versions, and what makes it the same run
runs/NAME/metrics.jsonl  a line per step, per evaluation and per checkpoint
runs/NAME/checkpoints/   see `run.checkpoint`
runs/NAME/faults.jsonl   see `run.faults`; the launcher of a job on one machine writes there too
Law: a folder belongs to one run; that run goes on in it, and any other is refused.
"""

import contextlib
import errno
import fcntl
import os
import platform
import secrets
import shutil
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch

from fourfold.checkpoint.store import CHECKPOINTS_DIR as CHECKPOINTS
from fourfold.environment.atomic_file import write_atomically
from fourfold.plan.decode import check_not_pipe
from fourfold.plan.plan import Plan
from fourfold.trainer.run_identity import LOG_FILE, PLAN_FILE, SETTINGS_FILE, check_run_name, read_finished_record
from fourfold.trainer.settings import Identity
from fourfold.words.errors import Problem, SettingError, TrainingError, os_error_text
from fourfold.words.version import VERSION


class RunInfo(NamedTuple):
    """What a folder told when it was opened: JSON. `finished`: the log's last line, where the run has ended."""

    path: str
    token: str
    finished_record: dict[str, Any] | None


class RunDir:
    """The files of one run. `line` appends to the log; what a full disk does not take is kept, and comes before the
    next line. The log may be used by two threads."""

    def __init__(self, parent: Path, name: str | None, *, label: str, identity: Identity) -> None:
        """Opens the run's folder, or makes one. Raises SettingError where it is another run's, or in use.

        Raises TrainingError, here and in `describe`, where the disk does not take it.
        """
        check_run_name(parent, name, identity)
        self._encoder = msgspec.json.Encoder()
        self._identity = identity
        self.path = _create(parent, name, label=label, identity=identity)
        self.finished_record = read_finished_record(self.path)
        _check_is_dir(self.path / CHECKPOINTS)
        with _wrap_write_errors(self.path / LOG_FILE):
            check_not_pipe(self.path / LOG_FILE)
            self._log = (self.path / LOG_FILE).open("a+b", buffering=0)
        self._description_files: dict[Path, bytes] = {}
        """What `describe` has written, by its file; whole paths, for a task may change the working directory."""
        self._absolute_path = self.path.absolute()
        self._unwritten = b""
        self._log_lock = threading.Lock()
        _lock_run(self._log, self.path)

    def write_plan_and_settings(self, plan: Plan, settings: Mapping[str, Any]) -> None:
        """Write down what was asked for, and where it runs."""
        versions = {
            "fourfold": VERSION,
            "torch": str(torch.__version__),
            "python": platform.python_version(),
        }
        record = {**settings, "versions": versions, "machine": platform.machine(), "cores": os.cpu_count()}
        settings_text = _encode_settings({**record, "identity": self._identity})
        self._description_files = {
            self._absolute_path / PLAN_FILE: plan.to_toml(defaults=True).encode(),
            self._absolute_path / SETTINGS_FILE: settings_text,
        }
        for path, text in self._description_files.items():
            _write_file(path, text)

    def append_record(self, record: Mapping[str, Any]) -> OSError | None:
        """Append one line to the log. Returns why it is not there yet; a run is worth more than its log."""
        with self._log_lock:
            self._unwritten += self._encoder.encode(record) + b"\n"
            try:
                self._flush()
            except OSError as error:
                return error
        return None

    def _flush(self) -> None:
        """Write what is late, in order. Raises OSError; what has been written by then is not written again."""
        while self._unwritten:
            self._unwritten = self._unwritten[self._log.write(self._unwritten) :]

    def log_bytes(self) -> int:
        """The log's size in bytes, with what is late."""
        with self._log_lock:
            return self._file_bytes() + len(self._unwritten)

    def _file_bytes(self) -> int:
        return os.fstat(self._log.fileno()).st_size

    def truncate_log(self, num_bytes: int) -> None:
        """Forget what the log says after `position`: it is about steps that will be done again."""
        with self._log_lock:
            self._unwritten = self._unwritten[: max(0, num_bytes - self._file_bytes())]
            self._log.truncate(min(num_bytes, self._file_bytes()))

    def sync(self) -> None:
        """Have the log on the disk, in a folder that the same command goes on in. Raises OSError.

        A folder that was removed in mid-run is made again. One that another process trains in since is left to it.
        """
        with self._log_lock:
            self._check_owned()
            self._flush()
        os.fsync(self._log.fileno())

    def _check_owned(self) -> None:
        try:
            found = (self._absolute_path / LOG_FILE).stat()
        except FileNotFoundError:
            self._recreate()
            return
        ours = os.fstat(self._log.fileno())
        if (found.st_dev, found.st_ino) != (ours.st_dev, ours.st_ino):
            with (self._absolute_path / LOG_FILE).open("ab") as log:
                if not _try_lock(log):  # no editor has replaced it, but a run
                    raise OSError(f"{self.path} is another run's now")

    def _recreate(self) -> None:
        text = os.pread(self._log.fileno(), self._file_bytes(), 0)  # it is gone, and can be read
        self._absolute_path.mkdir(parents=True, exist_ok=True)
        for path, content in self._description_files.items():
            write_atomically(path, content)
        log = (self._absolute_path / LOG_FILE).open("a+b", buffering=0)
        _try_lock(log)
        self._log.close()
        self._log, self._unwritten = log, text + self._unwritten

    def close(self) -> None:
        self._log.close()


def archive_run(path: Path) -> Path | None:
    """Give a run's folder another name, so that the run can start over; None where there is no folder."""
    if not path.exists():
        return None
    with _wrap_write_errors(path / LOG_FILE):
        check_not_pipe(path / LOG_FILE)
    with (path / LOG_FILE).open("ab") as log:
        _lock_run(log, path)
    number = 1
    while (target := path.with_name(f"{path.name}-before-{number}")).exists():
        number += 1
    path.rename(target)
    return target


def _create(parent: Path, name: str | None, *, label: str, identity: Identity) -> Path:
    """The folder, with its identity in it from the first moment."""
    if name is not None and (parent / name).exists():
        return parent / name
    staging = parent / f".new-{secrets.token_hex(8)}"
    with _wrap_write_errors(staging):
        staging.mkdir(parents=True)
    try:
        _write_settings(staging, {"identity": identity})
    except TrainingError:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    for number in range(1, 10_000):
        path = parent / (name if name is not None else f"{label}-{number}")
        with contextlib.suppress(OSError):
            staging.rename(path)  # fails where there is a folder with anything in it
            return path
        if name is not None:
            break
    (staging / SETTINGS_FILE).unlink()
    staging.rmdir()
    raise SettingError(Problem(f"{parent / (name or label)}-… cannot be made", "a folder", "name=another"))


def _check_is_dir(path: Path) -> None:
    """Raise SettingError where something else has the place of a folder: nothing could be saved there."""
    if os.path.lexists(path) and not path.is_dir():
        got = f"{path} is {'a link to nothing' if path.is_symlink() else 'no folder'}"
        raise SettingError(Problem(got, "a folder for the checkpoints", "another name for what is there"))


def _write_settings(path: Path, record: Mapping[str, Any]) -> None:
    _write_file(path / SETTINGS_FILE, _encode_settings(record))


def _encode_settings(record: Mapping[str, Any]) -> bytes:
    return msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n"


def _write_file(path: Path, text: bytes) -> None:
    with _wrap_write_errors(path):
        write_atomically(path, text)


@contextlib.contextmanager
def _wrap_write_errors(path: Path) -> Iterator[None]:
    """Within: what the disk does not take is told with its name, which an error of `write` has not."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        need = "room on its disk" if full else "a folder that can be written"
        attempt = "the same command when there is room" if full else "the same command elsewhere"
        raise TrainingError(Problem(f"{path} could not be written: {os_error_text(error)}", need, attempt)) from None


def _lock_run(file: Any, path: Path) -> None:
    """Hold the run until this process ends. Raises SettingError where another one does."""
    if not _try_lock(file):
        raise SettingError(Problem(f"{path} is being trained by another process", "one at a time", "name=another"))


def _try_lock(file: Any) -> bool:
    """Whether no other process holds this file, which this one holds from now on."""
    with contextlib.suppress(OSError):  # a file system without locks
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True
