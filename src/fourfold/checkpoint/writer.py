"""Checkpoint writer: a thread that writes a rank's snapshot into its file, then the rank's marker.

marker   a file in an unfinished checkpoint by which a rank reports on its own file
  rank-000.json    it is on the disk: its size, its checksum, and what the manifest will say of it
  rank-000.failed  it could not be written: the reason, or nothing if the disk did not take even that
manifest what rank 0 makes of the markers of all ranks
commit   rank 0 gives the folder a checkpoint's name
Law: a rank writes its marker last; after it, the rank writes nothing in the folder. A checkpoint gets its name when
every rank's done marker is there, and what they report fits together; until then the one before is the newest.
"""

import contextlib
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from fourfold.checkpoint.manifest_file import encode_manifest
from fourfold.checkpoint.store import CheckpointStore, Retention
from fourfold.checkpoint.write import Snapshot, estimated_bytes, write_file, write_snapshot
from fourfold.environment.atomic_file import write_atomically
from fourfold.environment.known_waits import waiting_for
from fourfold.plan.checkpoint_boxes import shard_file_name
from fourfold.plan.checkpoint_manifest import (
    MANIFEST_FILE,
    MAX_MANIFEST_BYTES,
    FileEntry,
    Manifest,
    RngState,
    Scalars,
    StoredPart,
    TensorEntry,
    TensorKey,
    manifest_problems,
)
from fourfold.plan.decode import DecodeError, from_json, read_bounded
from fourfold.step.train_step import TrainStep
from fourfold.words.errors import CheckpointError, Problem, os_error_text
from fourfold.words.units import format_bytes

# ---- markers ---------------------------------------------------------------------------------------------------------


DONE_SUFFIX, FAILED_SUFFIX = ".json", ".failed"
POLL_SECONDS = 0.01


class RankReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a rank adds to the manifest.

    tensors   what its file holds
    aliases, scalars   see `Manifest`; those that this rank knows, and is to report
    random    the state of its generators, if it is the first rank of its place
    """

    tensors: tuple[TensorEntry, ...]
    aliases: dict[str, str]
    scalars: Scalars
    random: RngState | None


class DoneMarker(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a rank writes when its file is on the disk."""

    file: FileEntry
    report: RankReport


def _marker_path(folder: Path, rank: int) -> Path:
    """A rank's marker, without its suffix."""
    return folder / f"rank-{rank:03d}"


def write_marker(path: Path, suffix: str, text: bytes) -> None:
    """Write a marker; it is on the disk when this returns. Raises OSError."""
    write_atomically(path.with_suffix(suffix), text, durable=True)


def _read_marker(path: Path) -> DoneMarker:
    """A rank's done marker. Raises OSError, and CheckpointError if it is damaged."""
    try:
        content = read_bounded(path.with_suffix(DONE_SUFFIX), max_bytes=MAX_MANIFEST_BYTES)
        return from_json(content, DoneMarker)
    except DecodeError as error:
        raise CheckpointError(Problem(f"{path.name}{DONE_SUFFIX}: {error}", "a rank's marker")) from None


def _has_marker(path: Path) -> bool:
    return any(path.with_suffix(suffix).exists() for suffix in (DONE_SUFFIX, FAILED_SUFFIX))


def wait_for_marker(path: Path, rank: int, missing_reason: Callable[[int], str], deadline: float) -> str:
    """Wait until a rank's marker exists. Returns why its file is missing; "" if it is not.

    missing_reason: waits POLL_SECONDS, and returns why the rank's marker will never come, "" while it may
    """
    reason = ""
    while not path.with_suffix(DONE_SUFFIX).exists():
        failed = path.with_suffix(FAILED_SUFFIX)
        if failed.exists():
            return f"rank {rank}: {failed.read_text() or 'its file could not be written, nor the reason'}"
        if time.monotonic() > deadline:
            return f"the file of rank {rank} did not arrive in time"
        # Look at the marker once more before giving up: a checkpoint whose files are all written must not be deleted.
        if reason:
            return reason
        reason = missing_reason(rank)
    return ""


def _error_text(error: Exception) -> str:
    """An error in a few words, for a marker or a warning."""
    if isinstance(error, CheckpointError):
        return error.problems[0].got
    return os_error_text(error) if isinstance(error, OSError) and error.errno is not None else str(error)


# ---- the thread ------------------------------------------------------------------------------------------------------


SPARE_BYTES = 2**20
# How long rank 0 waits for the other ranks' markers: this, and the time that a very slow disk takes for all bytes.
MARKER_TIMEOUT_SECONDS = 60.0
SLOWEST_BYTES_PER_SECOND = 10e6
ABORT_SECONDS = 5.0


class SyncedLog(Protocol):
    """The log of the run, as a checkpoint needs it: on the disk up to the step that is saved."""

    def sync(self) -> None: ...


class SaveRequest(NamedTuple):
    """What one rank writes of one checkpoint.

    manifest   on rank 0: without what the ranks report; None on other ranks
    """

    staging_dir: Path
    snapshot: Snapshot
    report: RankReport
    manifest: Manifest | None


class WrittenCheckpoint(NamedTuple):
    """A checkpoint that is on the disk. `valid`: the validation measured at this step."""

    step: int
    path: Path
    valid: Mapping[str, float]


class CheckpointWriter:
    """Writes one rank's checkpoints, one at a time."""

    def __init__(self, step: TrainStep, store: CheckpointStore, log: SyncedLog, retention: Retention) -> None:
        self._step, self._store, self._log, self._retention = step, store, log, retention
        self._rank, self._size = step.rank, step.plan.mesh.size
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._aborted = threading.Event()
        self.failures: list[str] = []
        """Why checkpoints could not be written; on rank 0."""
        self.last_reason = ""
        """Why, of the last one that could not be; on rank 0."""
        self.written: list[WrittenCheckpoint] = []
        """Those that are on the disk; on rank 0."""

    def start(self, request: SaveRequest) -> None:
        """Begin to write, when the one before has been written."""
        self._thread = threading.Thread(target=self._run, args=(request,), name="fourfold checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until it is written. Raises what its thread has not expected."""
        if self._thread is not None:
            with waiting_for("the checkpoint to be written"):
                self._thread.join()
            self._thread = None
        if self._error is not None:
            raise self._error

    def abort(self) -> None:
        """See `CheckpointManager.abort`."""
        self._aborted.set()
        if self._thread is not None:
            self._thread.join(ABORT_SECONDS)

    # ---- in the thread

    def _run(self, request: SaveRequest) -> None:
        try:
            self._write_checkpoint(request)
        except Exception as error:  # no fault of the disk, which might go away
            self._error = error

    def _write_checkpoint(self, request: SaveRequest) -> None:
        failure = self._write_rank_file(request)
        if request.manifest is None:
            return
        try:
            if failure:
                raise CheckpointError(Problem(f"rank {self._rank}: {failure}"))
            self._commit(request, request.manifest)
        except (OSError, CheckpointError) as error:
            self.last_reason = _error_text(error)
            name = f"the checkpoint of step {request.manifest.step}"
            self.failures.append(f"{name} could not be written: {self.last_reason}")
            shutil.rmtree(request.staging_dir, ignore_errors=True)

    def _write_rank_file(self, request: SaveRequest) -> str:
        """Write this rank's file, then its marker. Returns why there is no file, if not even a marker can say so."""
        folder = request.staging_dir
        path, marker = folder / shard_file_name(self._rank), _marker_path(folder, self._rank)
        try:
            if request.manifest is not None:
                self._log.sync()  # makes a run's folder again that was removed, before anything is written there
            folder.mkdir(parents=True, exist_ok=True)
            self._check_disk_space(request)
            file = write_snapshot(path, request.snapshot)
            write_marker(marker, DONE_SUFFIX, msgspec.json.encode(DoneMarker(file, request.report)))
        except OSError as error:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            try:
                write_marker(marker, FAILED_SUFFIX, _error_text(error).encode())
            except OSError:  # a disk without room even for the reason
                try:
                    marker.with_suffix(FAILED_SUFFIX).touch()
                except OSError:
                    return _error_text(error)
        return ""

    def _check_disk_space(self, request: SaveRequest) -> None:
        """Raise OSError if the disk has no room for this rank's file; rank 0 checks for all files that are missing."""
        free, need = shutil.disk_usage(self._store.path).free, request.snapshot.num_bytes
        if request.manifest is not None:
            files = [request.staging_dir / shard_file_name(rank) for rank in range(self._size)]
            written = sum(each.stat().st_size for each in files if each.exists())  # by ranks that were quicker
            need = max(need, estimated_bytes(request.snapshot.held) - written)
        if free < need + SPARE_BYTES:
            raise OSError(f"{format_bytes(free)} free on the disk, {format_bytes(need + SPARE_BYTES)} needed")

    def _commit(self, request: SaveRequest, manifest: Manifest) -> None:
        """Rank 0: wait for all markers, write the manifest, give the folder its name."""
        folder = request.staging_dir
        markers = [_marker_path(folder, rank) for rank in range(self._size)]
        self._wait_for_markers(folder, markers, estimated_bytes(request.snapshot.held))
        complete = complete_manifest(manifest, [_read_marker(marker) for marker in markers])
        for marker in markers:
            marker.with_suffix(DONE_SUFFIX).unlink()
        content = encode_manifest(complete)
        write_file(folder / MANIFEST_FILE, [content], num_bytes=len(content))
        self._log.sync()
        self._store.commit(folder, manifest.step)
        self.written.append(WrittenCheckpoint(manifest.step, self._store.step_dir(manifest.step), manifest.measures))
        with contextlib.suppress(OSError):  # the next save prunes again
            self._store.prune(self._retention)

    def _wait_for_markers(self, folder: Path, markers: Sequence[Path], num_bytes: int) -> None:
        """Raises CheckpointError if a rank's file is missing."""
        deadline = time.monotonic() + MARKER_TIMEOUT_SECONDS + num_bytes / SLOWEST_BYTES_PER_SECOND

        def missing_reason(rank: int) -> str:
            return self._missing_reason(folder, rank)

        # Wait for every rank before reporting a failure: the folder must not be deleted while a rank writes to it.
        problems = [wait_for_marker(marker, rank, missing_reason, deadline) for rank, marker in enumerate(markers)]
        if any(problems):
            raise CheckpointError([Problem(text) for text in problems if text])

    def _missing_reason(self, folder: Path, rank: int) -> str:
        """Why a rank's marker will never come; "" while it may. Waits POLL_SECONDS."""
        if not _has_marker(_marker_path(folder, self._rank)):
            return "its folder was removed while it was written"  # this rank's own marker has gone with it
        if self._step.peer_is_dead(rank):
            return f"rank {rank} died before it had written its file"
        if self._aborted.wait(POLL_SECONDS):
            return f"the run ended before rank {rank} had written its file"
        return ""


def complete_manifest(manifest: Manifest, markers: Sequence[DoneMarker]) -> Manifest:
    """The manifest with what the ranks report, in rank order. Raises CheckpointError if that does not fit together."""
    tensors: dict[TensorKey, TensorEntry] = {}
    parts: dict[TensorKey, list[StoredPart]] = {}
    for entry in (entry for marker in markers for entry in marker.report.tensors):
        first = tensors.setdefault(entry.tensor, entry)
        if (first.dtype, first.shape) != (entry.dtype, entry.shape):
            got = f"{entry.tensor.label} of {first.dtype} {list(first.shape)} and of {entry.dtype} {list(entry.shape)}"
            raise CheckpointError(Problem(got, "one dtype and shape on all ranks"))
        parts.setdefault(entry.tensor, []).extend(entry.parts)
    reports = [marker.report for marker in markers]
    scalars: Scalars = {}
    for name, values in (item for report in reports for item in report.scalars.items()):
        scalars.setdefault(name, {}).update(values)
    complete = msgspec.structs.replace(
        manifest,
        tensors=tuple(msgspec.structs.replace(tensors[key], parts=tuple(parts[key])) for key in tensors),
        aliases={name: target for report in reports for name, target in report.aliases.items()},
        scalars=scalars,
        random=tuple(report.random for report in reports if report.random is not None),
        files={shard_file_name(rank): marker.file for rank, marker in enumerate(markers)},
    )
    if problems := list(manifest_problems(complete)):
        raise CheckpointError([Problem(text) for text in problems])
    return complete
