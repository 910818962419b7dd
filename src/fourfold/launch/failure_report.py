"""Cause: why a job ended, told once.

record  what a rank writes down about the error that ended it: a JSON file, replaced atomically
echo    an error that only says that another rank has gone (a connection reset); never the cause if there is another
final   an error that another attempt would end with too: all that are told to people, except that a peer has gone
cut     a traceback without the frames of torch, fourfold and the import machinery
left    a rank that has ended with code 0 although others still needed it
end     a program that returned, or called `sys.exit(0)`, says so in a record of its own before its process is gone
Law: of all that ranks report, the earliest record that is no echo is the cause; next come deaths by signal, then exit
codes, then ranks that left, then echoes.
"""

import dataclasses
import json
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from fourfold.launch.traceback_text import format_error, user_line
from fourfold.words.errors import INTERRUPT_EXIT_CODE, PEER_GONE_MESSAGES, FourfoldError, PeerError, StoppedError

# A rank that dies before all have met leaves a LaunchError to the others.
ECHO_KINDS = ("PeerError", "LaunchError", "DistNetworkError")
ENDED = "ended"  # the kind of an end's record
INTERRUPTED = KeyboardInterrupt.__name__


@dataclass(frozen=True)
class FailureRecord:
    """One rank's error. `message` and `timestamp` are names torch's agent reads; `text` is what people read."""

    rank: int
    kind: str
    message: str
    text: str
    timestamp: float  # seconds since the epoch
    exit_code: int
    final: bool = False

    @property
    def is_echo(self) -> bool:
        said = self.message.lower()
        if self.kind == SystemExit.__name__:
            return False
        return self.kind in ECHO_KINDS or any(echo in said for echo in PEER_GONE_MESSAGES)


@dataclass(frozen=True)
class Cause:
    """What to tell the user, and what to exit with.

    rank       whose it is; None where nobody knows
    signal     the one that killed the rank
    stopped    the job was asked to stop, and did
    """

    text: str
    exit_code: int
    rank: int | None = None
    signal: int | None = None
    is_final: bool = False
    is_stopped: bool = False


def make_record(error: BaseException, *, rank: int) -> FailureRecord:
    """What to write down about an error that has reached the top of a rank."""
    if isinstance(error, SystemExit):
        return _exit_record(error, rank)
    if isinstance(error, KeyboardInterrupt):
        text = f"ended with exit code {INTERRUPT_EXIT_CODE}"
        return FailureRecord(rank, INTERRUPTED, INTERRUPTED, text, time.time(), INTERRUPT_EXIT_CODE, final=True)
    return FailureRecord(
        rank=rank,
        kind=type(error).__name__,
        message=_error_message(error) or type(error).__name__,
        text=format_error(error),
        timestamp=time.time(),
        exit_code=error.exit_code if isinstance(error, FourfoldError) else 1,
        final=isinstance(error, FourfoldError) and not isinstance(error, PeerError),
    )


def _error_message(error: BaseException) -> str:
    """Its message; "" for an error that fails to say it, which is told all the same."""
    try:
        return str(error)
    except Exception:  # whatever a `__str__` of the user's raises
        return ""


def _exit_record(error: SystemExit, rank: int) -> FailureRecord:
    """A program that ends itself by `sys.exit` would do so again: the record is final."""
    code, kind = exit_code(error), SystemExit.__name__
    said = f": {error.code}" if error.code is not None and not isinstance(error.code, int) else ""
    text = f"called sys.exit and ended with exit code {code}{said}{user_line(error)}"
    return FailureRecord(rank, kind, text, text, timestamp=time.time(), exit_code=code, final=True)


def exit_code(error: SystemExit) -> int:
    """The exit code of a process that this exception ends."""
    if error.code is None:
        return 0
    return error.code & 0xFF if isinstance(error.code, int) else 1


def end_record(rank: int) -> FailureRecord:
    """What to write down about a program that has ended normally."""
    return FailureRecord(rank, ENDED, ENDED, ENDED, timestamp=time.time(), exit_code=0)


def save_record(path: Path, entry: FailureRecord) -> None:
    # Renamed into place: the agent may read it at any moment, and a killed rank must not leave half a file.
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(dataclasses.asdict(entry)))
    part.replace(path)


def load_record(path: Path) -> FailureRecord | None:
    """The record in a file; None where there is none, or one that another program wrote in its own form."""
    try:
        # Not msgspec's own decoder: an error may speak of a file whose name is no text in UTF-8.
        return msgspec.convert(json.loads(path.read_bytes()), FailureRecord)
    except (OSError, ValueError, RecursionError, msgspec.ValidationError):
        return None


def first_cause(records: Mapping[int, FailureRecord], exit_codes: Mapping[int, int], names: Sequence[str]) -> Cause:
    """The cause among the ranks' records, and the exit codes of the ranks that ended before anyone was told to.

    A code of 0 is that of a rank that left. names: what each rank is called, as "rank 1 of 2".
    """
    done = sorted(rank for rank, entry in records.items() if entry.kind == ENDED)
    records = {rank: entry for rank, entry in records.items() if entry.kind != ENDED}
    entries = sorted(records.values(), key=lambda entry: (entry.is_echo, entry.timestamp))
    if entries and not entries[0].is_echo:
        return _cause_of_record(entries[0], names)
    silent = {rank: code for rank, code in sorted(exit_codes.items()) if code and rank not in records}
    killed = [rank for rank, code in silent.items() if code < 0]
    if silent:
        rank = (killed or list(silent))[0]
        return _cause_of_exit_code(rank, silent[rank], names[rank])
    if entries and done:
        return _cause_of_early_end(done, entries, names)
    left = [rank for rank, code in sorted(exit_codes.items()) if code == 0]
    if left:
        text = f"{_join_names(left, names)} ended with exit code 0 before the run had ended"
        return Cause(text, 1, left[0])
    if entries:
        return _cause_of_record(entries[0], names)
    return Cause(f"a rank of {len(names)} failed and left no trace", 1)


def _join_names(ranks: Sequence[int], names: Sequence[str]) -> str:
    return " and ".join(names[rank] for rank in ranks)


def _cause_of_early_end(done: Sequence[int], echoes: Sequence[FailureRecord], names: Sequence[str]) -> Cause:
    """Ranks whose program ended normally, and others that failed because they still needed them."""
    waiting = sorted(entry.rank for entry in echoes)
    who = f"rank{'s' * (len(waiting) > 1)} {' and '.join(map(str, waiting))}"
    text = (
        f"{_join_names(done, names)} ended normally while {who} still waited for {'it' if len(done) == 1 else 'them'}\n"
        "  need   ranks that make the same calls: steps, evaluations, collectives\n"
        "  try    as many batches on every rank (ff.Feed sees to it), or DistributedOptimizer.join()"
    )
    first_echo = echoes[0]
    if first_echo.kind not in ECHO_KINDS:  # Ours know no line of the user's.
        text += f"\nrank {first_echo.rank} waited here\n{first_echo.text.rstrip()}"
    return Cause(text, 1, done[0], is_final=True)


def _cause_of_record(entry: FailureRecord, names: Sequence[str]) -> Cause:
    if entry.kind == StoppedError.__name__:
        return Cause(entry.message, entry.exit_code, is_final=True, is_stopped=True)
    if entry.kind in (SystemExit.__name__, INTERRUPTED):
        return Cause(f"{names[entry.rank]} {entry.text}", entry.exit_code, entry.rank, is_final=entry.final)
    text = f"{names[entry.rank]} failed\n{entry.text.rstrip()}"
    return Cause(text, entry.exit_code, entry.rank, is_final=entry.final)


def _cause_of_exit_code(rank: int, code: int, name: str) -> Cause:
    if code >= 0:
        return Cause(f"{name} ended with exit code {code}", code, rank)
    try:
        number = signal.Signals(-code).name
    except ValueError:
        number = f"signal {-code}"
    hint = "; if nobody did this, the machine has run out of memory" if -code == signal.SIGKILL else ""
    return Cause(f"{name} was killed by {number}{hint}", 1, rank, signal=-code)
