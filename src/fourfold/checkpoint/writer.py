"""Checkpoint writer: a thread that writes a rank's snapshot into its file, then the rank's marker.

marker   a file in an unfinished checkpoint by which a rank reports on its own file
  rank-000.json        it is on the disk: its size, its checksum, and what the manifest will say of it
  rank-000.failed-028  it could not be written, for errno 28 (000: none); a full disk has room for a name
manifest what rank 0 makes of the markers of all ranks
commit   rank 0 gives the folder a checkpoint's name
Law: a rank writes its marker last; after it, the rank writes nothing in the folder. A checkpoint gets its name when
every rank's done marker is there, and what they report fits together; until then the one before is the newest.

live tensor  a part of a tensor in the memory that training uses
holders      the ranks that hold the same part: each writes an equal share of it
snapshot     a copy of what this rank writes, end to end in one buffer that is allocated once
file         a safetensors file: a header, then the buffer
Law: a file is written only from a snapshot, so training may go on while it is written.
"""

import contextlib
import errno
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec
import torch
import xxhash
from torch import Tensor

from fourfold.axes.tensor.work.whole_tensors import row_views
from fourfold.checkpoint.store import CheckpointStore, Retention, encode_manifest
from fourfold.environment.atomic_file import write_atomically
from fourfold.environment.known_waits import waiting_for
from fourfold.plan.checkpoint_boxes import (
    ELEMENT_BYTES,
    Part,
    Shape,
    blocks,
    divide_writing,
    relative_slices,
    shard_file_name,
    whole,
)
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
from fourfold.plan.param_spec import TensorShard
from fourfold.plan.shard_ranges import stored_ranges
from fourfold.step.train_step import TrainStep
from fourfold.torch_kit import memory
from fourfold.words.errors import DISK_FULL, CheckpointError, Problem, os_error_text
from fourfold.words.units import format_bytes

# ---- Write: one rank's file of a checkpoint, from a copy in memory to the disk --------------------------------------

CHUNK_BYTES = 4 * 2**20
SAFETENSORS_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
TORCH_DTYPES = {name: dtype for dtype, name in SAFETENSORS_DTYPES.items()}


@dataclass(frozen=True)
class Holders:
    """The ranks that hold the same part of a tensor: this one is number `index` of `count`."""

    index: int = 0
    count: int = 1
    num_parts: int = 1
    """How many parts, or tensors like this one, other such groups of ranks hold: an estimate of all bytes."""


class HeldPart(NamedTuple):
    """A part of a tensor that this rank holds, as the whole run sees it."""

    tensor: TensorKey
    dtype: str
    shape: Shape
    part: Part
    holders: Holders


class LiveTensor(NamedTuple):
    """A part of a tensor, and the segments of memory that hold it, in order: each flat, or rows of elements."""

    held: HeldPart
    segments: Sequence[Tensor]


def make_live_tensor(
    tensor: TensorKey,
    segments: Sequence[Tensor],
    shape: Sequence[int],
    *,
    holders: Holders,
) -> LiveTensor:
    """All of a tensor. Raises CheckpointError for a dtype that safetensors lacks."""
    dtype = _safetensors_dtype(tensor, segments[0])
    return LiveTensor(HeldPart(tensor, dtype, tuple(shape), whole(tuple(shape)), holders), segments)


def make_live_parts(
    tensor: TensorKey, segments: Sequence[Tensor], shard: TensorShard, start: int, *, holders: Holders
) -> list[LiveTensor]:
    """What a rank is to store of a tensor of which it holds the elements of a shard from `start` on.

    `segments` are flat and consecutive. Raises CheckpointError for a dtype that safetensors lacks.
    """
    dtype = _safetensors_dtype(tensor, segments[0])
    parts: dict[int, Part] = {}
    views: dict[int, list[Tensor]] = {}
    for segment in segments:
        for piece, part, rows in stored_ranges(shard, start, start + segment.numel()):
            parts[piece] = parts.get(piece, part)._replace(stop=part.stop)
            views.setdefault(piece, []).extend(row_views(segment, rows))
        start += segment.numel()
    return [
        LiveTensor(HeldPart(tensor, dtype, shard.shape, part, holders), views[piece]) for piece, part in parts.items()
    ]


def _safetensors_dtype(tensor: TensorKey, values: Tensor) -> str:
    dtype = SAFETENSORS_DTYPES.get(values.dtype)
    if dtype is None:
        raise CheckpointError(Problem(f"{tensor.label} is of {values.dtype}", "a dtype of the safetensors format"))
    return dtype


def estimated_bytes(held: Sequence[HeldPart]) -> int:
    """The bytes that all ranks hold, where each holds as much as this one."""
    return sum(each.part.num_elements * ELEMENT_BYTES[each.dtype] * each.holders.num_parts for each in held)


class Snapshot:
    """What this rank writes of the parts it holds, in one buffer."""

    def __init__(self, held: Sequence[HeldPart], file: str) -> None:
        self.held = held
        self._ranges = _own_ranges(held)
        """By part that this rank writes: its index in `held`, and the elements [start, stop) of it."""
        unique_names = _unique_names([held[index].tensor.label for index in self._ranges])
        # Wide elements first: then each tensor begins at a multiple of its element size.
        order = sorted(self._ranges, key=lambda index: -ELEMENT_BYTES[held[index].dtype])
        stored = {
            index: _stored_part(held[index], self._ranges[index], file, name)
            for index, name in zip(self._ranges, unique_names, strict=True)
        }
        header, offset, bounds = {}, 0, {}
        for index in order:
            start, stop = self._ranges[index]
            end = offset + (stop - start) * ELEMENT_BYTES[held[index].dtype]
            shape = stored[index].shape_in_file(held[index].shape)
            header[stored[index].name] = {"dtype": held[index].dtype, "shape": shape, "data_offsets": (offset, end)}
            bounds[index] = offset, end
            offset = end
        self.entries = tuple(_entry(held[index], stored[index]) for index in self._ranges)
        """What the file holds, as the manifest lists it."""
        self.buffer = memory.allocate_private(offset, torch.uint8, torch.device("cpu"))
        self._views = {i: self.buffer[a:b].view(TORCH_DTYPES[held[i].dtype]) for i, (a, b) in bounds.items()}
        self.header = safetensors_header(header)

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        return len(self.header) + self.buffer.numel()

    @torch.no_grad()
    def capture(self, live_tensors: Sequence[LiveTensor]) -> None:
        """Copy what this rank writes into the buffer. `live_tensors` are the parts that the snapshot was made for."""
        for index, (start, stop) in self._ranges.items():
            _copy_range(live_tensors[index].segments, start, stop, out=self._views[index])


def _own_ranges(held: Sequence[HeldPart]) -> dict[int, tuple[int, int]]:
    """The parts that this rank writes, and which elements of each."""
    groups: dict[Holders, list[int]] = {}
    for index, each in enumerate(held):
        groups.setdefault(each.holders, []).append(index)
    ranges = {}
    for holders, indices in groups.items():
        sizes = [(held[index].part.num_elements, ELEMENT_BYTES[held[index].dtype]) for index in indices]
        shares = divide_writing(sizes, holders.index, holders.count)
        for index, (count, _), (start, stop) in zip(indices, sizes, shares, strict=True):
            if start < stop or (count == 0 and holders.index == 0):
                ranges[index] = start, stop
    return dict(sorted(ranges.items()))


def _unique_names(names: Sequence[str]) -> list[str]:
    """The names, with a number where one would come twice: a checkpoint may have several parts of a tensor."""
    result: dict[str, None] = {}
    for name in names:
        unique, number = name, 1
        while unique in result:
            number += 1
            unique = f"{name}#{number}"
        result[unique] = None
    return list(result)


def _stored_part(held: HeldPart, own: tuple[int, int], file: str, name: str) -> StoredPart:
    start, stop = (held.part.start + each for each in own)
    box = held.part.box
    is_box = Part(box, start, stop).is_box
    return StoredPart(file, name, None if box == whole(held.shape).box else box, None if is_box else (start, stop))


def _entry(held: HeldPart, stored: StoredPart) -> TensorEntry:
    kind, name, key, place = held.tensor
    return TensorEntry(kind, name, held.dtype, held.shape, (stored,), key, place)


def _copy_range(segments: Sequence[Tensor], start: int, stop: int, *, out: Tensor) -> None:
    """Copy elements [start, stop) of consecutive segments."""
    offset = 0
    for segment in segments:
        low, high = max(start, offset), min(stop, offset + segment.numel())
        everything = whole(tuple(segment.shape))
        for first, box in blocks(everything._replace(start=low - offset, stop=high - offset)):
            view = segment[relative_slices(box, everything.box)]
            out[low - start + first :][: view.numel()].view(view.shape).copy_(view)
        offset += segment.numel()


def safetensors_header(tensors: Mapping[str, object]) -> bytes:
    """The beginning of a safetensors file: its length, and dtype, shape and place of each tensor."""
    text = json.dumps(tensors, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_file(path: Path, chunks: Iterable[bytes | memoryview], *, num_bytes: int) -> FileEntry:
    """Write a new file; it is on the disk when this returns. Its space is reserved first. Raises OSError.

    `num_bytes`: the length of all chunks.
    """
    digest = xxhash.xxh3_128()
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(handle, 0, num_bytes)
        for chunk in chunks:
            view = memoryview(chunk)
            for start in range(0, len(view), CHUNK_BYTES):
                remaining = view[start : start + CHUNK_BYTES]
                digest.update(remaining)
                while remaining:
                    remaining = remaining[os.write(handle, remaining) :]
        os.fsync(handle)
    finally:
        os.close(handle)
    return FileEntry(num_bytes, digest.hexdigest())


def write_snapshot(path: Path, snapshot: Snapshot) -> FileEntry:
    """Write a snapshot into a new safetensors file. Raises OSError."""
    chunks = [snapshot.header, memoryview(snapshot.buffer.numpy().data)]
    return write_file(path, chunks, num_bytes=snapshot.num_bytes)


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


def _failed_marker(path: Path) -> Path | None:
    return next(path.parent.glob(f"{path.name}{FAILED_SUFFIX}-[0-9][0-9][0-9]"), None)


def _has_marker(path: Path) -> bool:
    return path.with_suffix(DONE_SUFFIX).exists() or _failed_marker(path) is not None


def wait_for_marker(path: Path, rank: int, missing_reason: Callable[[int], str], deadline: float) -> Problem | None:
    """Wait until a rank's marker exists. Returns why its file is missing; None if it is not.

    missing_reason: waits POLL_SECONDS, and returns why the rank's marker will never come, "" while it may
    """
    reason = ""
    while not path.with_suffix(DONE_SUFFIX).exists():
        if (failed := _failed_marker(path)) is not None:
            number = int(failed.suffix.rpartition("-")[2])
            text = os.strerror(number).lower() if number else "its file could not be written"
            return _write_problem(f"rank {rank}: {text}", number)
        if time.monotonic() > deadline:
            return _write_problem(f"the file of rank {rank} did not arrive in time")
        # Look at the marker once more before giving up: a checkpoint whose files are all written must not be deleted.
        if reason:
            return _write_problem(reason)
        reason = missing_reason(rank)
    return None


def _error_text(error: OSError) -> str:
    """An error in a few words, for a marker or a warning."""
    return os_error_text(error) if error.strerror is not None else str(error)


def _write_problem(text: str, number: int | None = None) -> Problem:
    """Why a checkpoint could not be written. `number`: the errno, where it is known."""
    if number in DISK_FULL:
        return Problem(text, "room on its disk", "the same when there is room; the checkpoints before are kept")
    return Problem(text, "a folder that all ranks can write to", "another folder; the checkpoints before are kept")


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
        self.failures: list[Problem] = []
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
            self._commit(request, request.manifest, failure)
        except (OSError, CheckpointError) as error:
            if isinstance(error, CheckpointError):
                problem = error.problems[0]
            else:
                problem = _write_problem(_error_text(error), error.errno)
            self.last_reason = problem.got
            got = f"the checkpoint of step {request.manifest.step} could not be written: {problem.got}"
            self.failures.append(problem._replace(got=got))
            shutil.rmtree(request.staging_dir, ignore_errors=True)

    def _write_rank_file(self, request: SaveRequest) -> Problem | None:
        """Write this rank's file, then its marker. Returns why there is no file; None if there is."""
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
                marker.with_suffix(f"{FAILED_SUFFIX}-{error.errno or 0:03d}").touch()
            return _write_problem(f"rank {self._rank}: {_error_text(error)}", error.errno)
        return None

    def _check_disk_space(self, request: SaveRequest) -> None:
        """Raise OSError if the disk has no room for this rank's file; rank 0 checks for all files that are missing."""
        free, need = shutil.disk_usage(self._store.path).free, request.snapshot.num_bytes
        if request.manifest is not None:
            files = [request.staging_dir / shard_file_name(rank) for rank in range(self._size)]
            written = sum(each.stat().st_size for each in files if each.exists())  # by ranks that were quicker
            need = max(need, estimated_bytes(request.snapshot.held) - written)
        if free < need + SPARE_BYTES:
            error = OSError(f"{format_bytes(free)} free on the disk, {format_bytes(need + SPARE_BYTES)} needed")
            error.errno = errno.ENOSPC
            raise error

    def _commit(self, request: SaveRequest, manifest: Manifest, failure: Problem | None) -> None:
        """Rank 0: wait for all markers, write the manifest, give the folder its name. `failure`: of its own file."""
        folder = request.staging_dir
        markers = [_marker_path(folder, rank) for rank in range(self._size)]
        self._wait_for_markers(folder, markers, estimated_bytes(request.snapshot.held), failure)
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

    def _wait_for_markers(self, folder: Path, markers: Sequence[Path], num_bytes: int, failure: Problem | None) -> None:
        """Raises CheckpointError if a rank's file is missing."""
        deadline = time.monotonic() + MARKER_TIMEOUT_SECONDS + num_bytes / SLOWEST_BYTES_PER_SECOND

        def missing_reason(rank: int) -> str:
            return self._missing_reason(folder, rank)

        # Wait for every rank before reporting a failure: the folder must not be deleted while a rank writes to it.
        waited = [rank for rank in range(self._size) if rank > 0 or failure is None]
        waits = [wait_for_marker(markers[rank], rank, missing_reason, deadline) for rank in waited]
        if problems := [problem for problem in (failure, *waits) if problem is not None]:
            raise CheckpointError(problems)

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
