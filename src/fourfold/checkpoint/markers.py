"""Markers: what a rank says of its file in a checkpoint that is being written."""

import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from fourfold.environment.atomic_file import write_atomically
from fourfold.plan.checkpoint_manifest import (
    FileEntry,
    RngState,
)
from fourfold.plan.decode import DecodeError, from_json, read_bounded
from fourfold.words.errors import CheckpointError, Problem


class DoneMarker(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a rank says of its piece."""

    file: FileEntry
    random: RngState


def write_marker(path: Path, suffix: str, text: bytes) -> None:
    """Raises OSError."""
    write_atomically(path.with_suffix(suffix), text, durable=True)


def read_marker(path: Path) -> DoneMarker:
    """Raises OSError, and CheckpointError where a mark is damaged."""
    try:
        return from_json(read_bounded(path), DoneMarker)
    except DecodeError as error:
        raise CheckpointError(Problem(f"{path.name}: {error}", "a rank's mark")) from None


def wait_for_marker(path: Path, rank: int, missing_reason: Callable[[int], str], deadline: float) -> str:
    """Until a rank's mark is there: what went wrong with its piece, "" where nothing did."""
    reason = ""
    while not path.with_suffix(".json").exists():
        failed = path.with_suffix(".failed")
        if failed.exists():
            return f"rank {rank}: {failed.read_text() or 'its piece could not be written, nor the reason'}"
        if time.monotonic() > deadline:
            return f"the piece of rank {rank} has not come in time"
        # Told one look at the mark later: a checkpoint of which all pieces are there is not thrown away.
        if reason:
            return reason
        reason = missing_reason(rank)
    return ""


def error_text(error: Exception) -> str:
    if isinstance(error, CheckpointError):
        return error.problems[0].got
    if isinstance(error, OSError) and error.errno is not None:
        return (error.strerror or str(error)).lower()
    return str(error)
