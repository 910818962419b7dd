"""Markers: files in an unfinished checkpoint by which each rank reports on its own file.

rank-000.json    this rank's file is on the disk: its size, its checksum, and what the manifest will say of it
rank-000.failed  it could not be written: the reason, or nothing if the disk did not take even that
Law: a rank writes its marker last; after it, the rank writes nothing in the folder.
"""

import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from fourfold.environment.atomic_file import write_atomically
from fourfold.plan.checkpoint_manifest import MAX_MANIFEST_BYTES, FileEntry, RngState, Scalars, TensorEntry
from fourfold.plan.decode import DecodeError, from_json, read_bounded
from fourfold.words.errors import CheckpointError, Problem, os_error_text

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


def marker_path(folder: Path, rank: int) -> Path:
    """A rank's marker, without its suffix."""
    return folder / f"rank-{rank:03d}"


def write_marker(path: Path, suffix: str, text: bytes) -> None:
    """Write a marker; it is on the disk when this returns. Raises OSError."""
    write_atomically(path.with_suffix(suffix), text, durable=True)


def read_marker(path: Path) -> DoneMarker:
    """A rank's done marker. Raises OSError, and CheckpointError if it is damaged."""
    try:
        content = read_bounded(path.with_suffix(DONE_SUFFIX), max_bytes=MAX_MANIFEST_BYTES)
        return from_json(content, DoneMarker)
    except DecodeError as error:
        raise CheckpointError(Problem(f"{path.name}{DONE_SUFFIX}: {error}", "a rank's marker")) from None


def has_marker(path: Path) -> bool:
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


def error_text(error: Exception) -> str:
    """An error in a few words, for a marker or a warning."""
    if isinstance(error, CheckpointError):
        return error.problems[0].got
    return os_error_text(error) if isinstance(error, OSError) and error.errno is not None else str(error)
