"""Told errors: an error that reading has raised on one rank, as the ranks that share the batch raise it too.

Law: an error for people says the same on all of them. Of any other error they say on which rank it was raised.
"""

from typing import Any

import msgspec

from fourfold.words.error_notes import error_line
from fourfold.words.errors import (
    CheckpointError,
    DamagedSample,
    DataError,
    FourfoldError,
    LaunchError,
    PeerError,
    Problem,
    SettingError,
    TaskError,
)

KINDS: dict[str, type[FourfoldError]] = {
    kind.__name__: kind for kind in (DataError, TaskError, SettingError, LaunchError, CheckpointError, PeerError)
}


class ToldError(msgspec.Struct, frozen=True, array_like=True):
    """`problems`: got, need, attempt. Of a damaged sample: its key and the reason."""

    kind: str
    problems: list[list[str]]
    where: str = ""


def tell(error: Exception, rank: int) -> ToldError:
    """An error that reading has raised on `rank`."""
    if type(error) is DamagedSample:
        return ToldError("DamagedSample", [[error.key, error.reason]], error.where)
    if type(error).__name__ in KINDS and isinstance(error, FourfoldError):
        return ToldError(type(error).__name__, [list(map(str, each)) for each in error.problems], error.where)
    place = f"on rank {rank}, which reads for this one too"
    got = ", ".join([error_line(error), place, *getattr(error, "__notes__", ())])
    return ToldError("DataError", [[got, "a source that can be read", f"rank {rank} has the traceback"]], "the source")


def as_raised(told: ToldError) -> Exception:
    """The error to raise."""
    if told.kind == "DamagedSample":
        key, reason = told.problems[0]
        return DamagedSample(key, reason, where=told.where)
    problems: Any = [Problem(*each) for each in told.problems]
    return KINDS[told.kind](problems, where=told.where)
