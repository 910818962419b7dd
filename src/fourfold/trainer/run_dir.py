"""Run folders: the resolved plan, the settings, the log and the checkpoints of one run. Only rank 0 writes them.

runs/NAME/plan.toml      every field of the plan, as resolved
runs/NAME/config.toml    a settings file that starts the same run; only where a command named the task
runs/NAME/settings.json  the command's settings, the transport, the versions, and the run's identity
runs/NAME/metrics.jsonl  the log: a line per step, evaluation and checkpoint
runs/NAME/checkpoints/   see `fourfold.checkpoint`
runs/NAME/faults.jsonl   see `fault_log`; the launcher of a job on one machine writes there too
Law: a folder belongs to one run. That run continues in it; any other run is refused.
"""

import contextlib
import fcntl
import os
import platform
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch

from fourfold.checkpoint.store import CHECKPOINTS_DIR
from fourfold.environment.atomic_file import write_atomically
from fourfold.environment.known_waits import waiting_for
from fourfold.environment.temporary_folder import temporary_folder
from fourfold.plan.decode import check_not_pipe
from fourfold.plan.plan import Plan
from fourfold.trainer.run_identity import Identity, check_run_name, read_finished_record
from fourfold.words.errors import DISK_FULL, Problem, SettingError, TrainingError, os_error_text
from fourfold.words.run_files import CONFIG_FILE, LOG_FILE, PLAN_FILE, SETTINGS_FILE
from fourfold.words.version import VERSION

MAX_UNNAMED_RUNS = 10_000


class RunInfo(NamedTuple):
    """What rank 0 sends the other ranks about the run's folder: JSON values.

    token            a random word for this attempt, in the names of its unfinished files
    finished_record  the last line of the log, if the run has finished
    """

    path: str
    token: str
    finished_record: dict[str, Any] | None


class RunDir:
    """The files of one run.

    Lines that a full disk does not take are kept in memory and written before the next line. Two threads may use the
    log: training, and the checkpoint writer.
    """

    def __init__(self, parent: Path, name: str | None, *, run_prefix: str, identity: Identity) -> None:
        """Open the run's folder, or make one. Raises SettingError if it is another run's, or in use.

        Raises TrainingError, here and in `write_plan_and_settings`, if the folder cannot be written.
        """
        check_run_name(parent, name, identity)
        self._encoder = msgspec.json.Encoder()
        self._identity = identity
        self.path = _create(parent, name, run_prefix=run_prefix, identity=identity)
        self.finished_record = read_finished_record(self.path)
        _check_is_dir(self.path / CHECKPOINTS_DIR)
        with _wrap_write_errors(self.path / LOG_FILE):
            check_not_pipe(self.path / LOG_FILE)
            self._log = (self.path / LOG_FILE).open("a+b", buffering=0)
        self._description_files: dict[Path, bytes] = {}
        """What `write_plan_and_settings` has written, by absolute path: a task may change the working directory."""
        self._absolute_path = self.path.absolute()
        self._unwritten = b""
        self._log_lock = threading.Lock()
        _lock_run(self._log, self.path)

    def write_plan_and_settings(
        self, plan: Plan, settings: Mapping[str, Any], *, config_text: str | None = None
    ) -> None:
        """Write plan.toml and settings.json: what was asked for, and the machine and versions it runs on.

        config_text: of config.toml; None: there is none
        """
        versions = {
            "fourfold": VERSION,
            "torch": str(torch.__version__),
            "python": platform.python_version(),
        }
        record = {**settings, "versions": versions, "machine": platform.machine(), "cores": os.cpu_count()}
        self._description_files = {
            self._absolute_path / PLAN_FILE: plan.to_toml(defaults=True).encode(),
            self._absolute_path / SETTINGS_FILE: _encode_settings({**record, "identity": self._identity}),
        }
        if config_text is not None:
            self._description_files[self._absolute_path / CONFIG_FILE] = config_text.encode()
        for path, content in self._description_files.items():
            _write_file(path, content)

    def append_record(self, record: Mapping[str, Any]) -> OSError | None:
        """Append a line to the log. Returns the error if the disk does not take it: training must not end for it."""
        with self._log_lock:
            self._unwritten += self._encoder.encode(record) + b"\n"
            try:
                self._flush()
            except OSError as error:
                return error
        return None

    def _flush(self) -> None:
        """Write the lines that are kept, in order. Raises OSError; bytes written before it are not written again."""
        with waiting_for(f"the disk of {self.path}"):
            while self._unwritten:
                self._unwritten = self._unwritten[self._log.write(self._unwritten) :]

    def log_bytes(self) -> int:
        """The log's size in bytes, with the lines that are not written yet."""
        with self._log_lock:
            return self._file_bytes() + len(self._unwritten)

    def _file_bytes(self) -> int:
        return os.fstat(self._log.fileno()).st_size

    def truncate_log(self, num_bytes: int) -> None:
        """Remove what follows the first `num_bytes` of the log: the steps it is about will be done again."""
        with self._log_lock:
            self._unwritten = self._unwritten[: max(0, num_bytes - self._file_bytes())]
            self._log.truncate(min(num_bytes, self._file_bytes()))

    def sync(self) -> None:
        """Wait until the disk has the log, in a folder where the same command continues. Raises OSError.

        Makes the folder again if it was removed during the run. Raises OSError if another run has taken its place.
        """
        with self._log_lock:
            self._check_owned()
            self._flush()
        os.fsync(self._log.fileno())

    def _check_owned(self) -> None:
        try:
            there = (self._absolute_path / LOG_FILE).stat()
        except FileNotFoundError:
            self._recreate()
            return
        ours = os.fstat(self._log.fileno())
        if (there.st_dev, there.st_ino) != (ours.st_dev, ours.st_ino):
            with (self._absolute_path / LOG_FILE).open("ab") as log:
                if not _try_lock(log):  # another run has replaced the log, not an editor
                    raise OSError(f"{self.path} is another run's now")

    def _recreate(self) -> None:
        text = os.pread(self._log.fileno(), self._file_bytes(), 0)  # a removed file that is open can still be read
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
    """Rename a run's folder so that the run can start over; returns the new path, None if there is no folder."""
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


def _create(parent: Path, name: str | None, *, run_prefix: str, identity: Identity) -> Path:
    """The run's folder; a new one has its settings.json from the first moment, because it is renamed into place."""
    if name is not None and (parent / name).exists():
        return parent / name
    with _wrap_write_errors(parent), temporary_folder(_made(parent)) as folder:
        staging = _made(folder / "run")
        _write_file(staging / SETTINGS_FILE, _encode_settings({"identity": identity}))
        for number in range(1, MAX_UNNAMED_RUNS):
            path = parent / (name if name is not None else f"{run_prefix}-{number}")
            with contextlib.suppress(OSError):
                staging.rename(path)  # fails if the folder exists and is not empty
                return path
            if name is not None:
                break
    raise SettingError(Problem(f"{parent / (name or run_prefix)}-… cannot be made", "a folder", "name=another"))


def _made(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    return path


def _check_is_dir(path: Path) -> None:
    """Raise SettingError if something other than a folder has this path: nothing could be saved there."""
    if os.path.lexists(path) and not path.is_dir():
        got = f"{path} is {'a link to nothing' if path.is_symlink() else 'not a folder'}"
        raise SettingError(Problem(got, "a folder for the checkpoints", "another name for what is there"))


def _encode_settings(record: Mapping[str, Any]) -> bytes:
    return msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n"


def _write_file(path: Path, content: bytes) -> None:
    with _wrap_write_errors(path):
        write_atomically(path, content)


@contextlib.contextmanager
def _wrap_write_errors(path: Path) -> Iterator[None]:
    """Within: an OSError becomes a TrainingError that names the file, which an error of `write` does not."""
    try:
        yield
    except OSError as error:
        full = error.errno in DISK_FULL
        need = "room on its disk" if full else "a folder that can be written"
        attempt = "the same command when there is room" if full else "the same command elsewhere"
        raise TrainingError(Problem(f"{path} could not be written: {os_error_text(error)}", need, attempt)) from None


def _lock_run(file: Any, path: Path) -> None:
    """Lock the run until this process ends. Raises SettingError if another process has locked it."""
    if not _try_lock(file):
        raise SettingError(Problem(f"{path} is being trained by another process", "one at a time", "name=another"))


def _try_lock(file: Any) -> bool:
    """Lock a file for this process. Returns False if another process has locked it."""
    with contextlib.suppress(OSError):  # a file system without locks
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True
