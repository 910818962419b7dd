"""Failure report: why a job ended, reported once.

record      what a rank writes about the error that ended it: a JSON file, replaced atomically
end record  the record of a program that returned, or called `sys.exit(0)`, written before its process ends
echo        an error that only says that another rank is gone (a connection reset), or has failed; the cause only if
            there is no other
final       an error with which another attempt would end too: every FourfoldError except PeerError and
            WorkerDiedError
early exit  a rank that ended with code 0 while others still needed it
Law: the cause is the earliest record that is no echo; without one, a death by signal, then an exit code, then an early
exit, then an echo.
"""

import dataclasses
import json
import re
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from fourfold.environment.atomic_file import write_atomically
from fourfold.launcher.traceback_text import format_error, user_line
from fourfold.words.errors import (
    INTERRUPT_EXIT_CODE,
    PEER_FAILED,
    PEER_GONE_MESSAGES,
    READING,
    FourfoldError,
    PeerError,
    StoppedError,
    WorkerDiedError,
)

# If a rank dies during the rendezvous, the others end with a LaunchError.
ECHO_KINDS = ("PeerError", "LaunchError", "DistNetworkError")
# What torch and gloo raise when a peer has gone. An OSError with the same words is the user's own: of a file or server.
TORCH_KINDS = ("RuntimeError", "DistError", "DistBackendError", "DistStoreError")
WORD = re.compile(r"\w+")
ENDED = "ended"  # the kind of an end record
INTERRUPTED = KeyboardInterrupt.__name__
SUMMARY_CHARS = 300
FIRST_FAILURE_SECONDS = 5.0  # for the exit status of a rank whose peers have noticed already that it is gone
POLL_SECONDS = 0.02


@dataclass(frozen=True)
class FailureRecord:
    """One rank's error. torch's agent reads `message` and `timestamp`; people read `text`.

    `signal`: the number of the signal that killed a worker of the rank.
    """

    rank: int
    kind: str
    message: str
    text: str
    timestamp: float  # seconds since the epoch
    exit_code: int
    final: bool = False
    signal: int | None = None

    @property
    def is_echo(self) -> bool:
        message = self.message.lower()
        if self.kind == SystemExit.__name__:
            return False
        if self.kind in ECHO_KINDS or PEER_FAILED in message:
            return True
        return self.kind in TORCH_KINDS and any(echo in message for echo in PEER_GONE_MESSAGES)


@dataclass(frozen=True)
class Cause:
    """Why a job ended: the text for the user, and the exit code.

    rank        the rank that failed; None if unknown
    signal      the number of the signal that killed it, or a worker of its DataLoader
    is_final    another attempt would end in the same way
    is_stopped  the job was asked to stop, and did
    message     of the error that ended the rank, with its type, in one line; "" for another cause
    errors      by rank, what an error of the program is recognized by when it comes again; none for another cause.
                Those of all ranks: which of them failed first may be a race
    """

    text: str
    exit_code: int
    rank: int | None = None
    signal: int | None = None
    is_final: bool = False
    is_stopped: bool = False
    message: str = ""
    errors: Mapping[int, str] = field(default_factory=dict)

    @property
    def summary(self) -> str:
        """The cause in one line: the rank, and its error."""
        return ": ".join(filter(None, (self.text.partition("\n")[0], self.message)))


def make_record(error: BaseException, *, rank: int) -> FailureRecord:
    """The record of an error that no code of the rank's program has caught."""
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
        final=isinstance(error, FourfoldError) and not isinstance(error, PeerError | WorkerDiedError),
        signal=error.signal if isinstance(error, WorkerDiedError) else None,
    )


def _error_message(error: BaseException) -> str:
    """The error's message; "" if its `__str__` itself fails, for the error must be reported all the same."""
    try:
        return str(error)
    except Exception:  # whatever a `__str__` of the user's raises
        return ""


def _exit_record(error: SystemExit, rank: int) -> FailureRecord:
    """The record of a call of `sys.exit`. It is final: the program would call it again."""
    code, kind = exit_code(error), SystemExit.__name__
    message = f": {error.code}" if error.code is not None and not isinstance(error.code, int) else ""
    text = f"called sys.exit and ended with exit code {code}{message}{user_line(error)}"
    return FailureRecord(rank, kind, text, text, timestamp=time.time(), exit_code=code, final=True)


def exit_code(error: SystemExit) -> int:
    """The exit code of a process that ends with this exception."""
    if error.code is None:
        return 0
    return error.code & 0xFF if isinstance(error.code, int) else 1


def end_record(rank: int) -> FailureRecord:
    """The record of a program that has ended normally."""
    return FailureRecord(rank, ENDED, ENDED, ENDED, timestamp=time.time(), exit_code=0)


def save_record(path: Path, entry: FailureRecord) -> None:
    # Renamed into place: the agent may read it at any moment, and a killed rank must not leave half a file.
    write_atomically(path, json.dumps(dataclasses.asdict(entry)).encode())


def load_record(path: Path) -> FailureRecord | None:
    """The record in a file; None if there is no file, or another program wrote it in its own form."""
    try:
        # Not msgspec's own decoder: an error may name a file whose name is not valid UTF-8.
        return msgspec.convert(json.loads(path.read_bytes()), FailureRecord)
    except (OSError, ValueError, RecursionError, msgspec.ValidationError):
        return None


def wait_for_first_failure(
    exit_codes: Callable[[], Mapping[int, int | None]], records: Callable[[], Mapping[int, FailureRecord]]
) -> None:
    """While all that is known are echoes: wait until a rank has ended otherwise. `exit_codes`: None while a rank runs.

    The kernel takes up to seconds to free the memory of a process that it kills. Its peers notice, and end, before
    its parent learns its exit status.
    """
    deadline = time.monotonic() + FIRST_FAILURE_SECONDS
    while None in (codes := exit_codes()).values() and time.monotonic() < deadline:
        known = records()
        if any(rank not in known or not known[rank].is_echo for rank, code in codes.items() if code is not None):
            return
        time.sleep(POLL_SECONDS)


def first_cause(records: Mapping[int, FailureRecord], exit_codes: Mapping[int, int], names: Sequence[str]) -> Cause:
    """The cause, from the ranks' records and the exit codes of the ranks that ended before any was signalled to.

    exit_codes  a code of 0 means an early exit
    names       how the text calls each rank, such as "rank 1 of 2"
    """
    done = sorted(rank for rank, entry in records.items() if entry.kind == ENDED)
    records = {rank: entry for rank, entry in records.items() if entry.kind != ENDED}
    entries = sorted(records.values(), key=lambda entry: (entry.is_echo, entry.timestamp))
    if entries and not entries[0].is_echo:
        cause, errors = _cause_of_record(entries[0], names), _program_errors(entries)
        return dataclasses.replace(cause, errors=errors if cause.rank in errors else {})
    silent = {rank: code for rank, code in sorted(exit_codes.items()) if code and rank not in records}
    killed = [rank for rank, code in silent.items() if code < 0]
    if silent:
        rank = (killed or list(silent))[0]
        return _cause_of_exit_code(rank, silent[rank], names[rank])
    if entries and done:
        return _cause_of_early_end(done, entries, names)
    early_exits = [rank for rank, code in sorted(exit_codes.items()) if code == 0]
    if early_exits:
        text = f"{_join_names(early_exits, names)} ended with exit code 0 before the run had ended"
        return Cause(text, 1, early_exits[0])
    if entries:
        return _cause_of_record(entries[0], names)
    return Cause(f"a rank of {len(names)} failed and left no trace", 1)


def _join_names(ranks: Sequence[int], names: Sequence[str]) -> str:
    return " and ".join(names[rank] for rank in ranks)


def _cause_of_early_end(done: Sequence[int], echoes: Sequence[FailureRecord], names: Sequence[str]) -> Cause:
    """The cause where some ranks ended normally and others failed because they still needed them."""
    waiting = sorted(entry.rank for entry in echoes)
    who = f"rank{'s' * (len(waiting) > 1)} {' and '.join(map(str, waiting))}"
    text = (
        f"{_join_names(done, names)} ended normally while {who} still waited for {'it' if len(done) == 1 else 'them'}\n"
        "  need   ranks that make the same calls: steps, evaluations, collectives\n"
        "  try    as many batches on every rank (ff.Feed ensures this), or DistributedOptimizer.join()"
    )
    first_echo = echoes[0]
    if first_echo.kind not in ECHO_KINDS:  # Fourfold's own echoes have no line of the user's.
        text += f"\nrank {first_echo.rank} waited here\n{first_echo.text.rstrip()}"
    return Cause(text, 1, done[0], is_final=True)


def _cause_of_record(entry: FailureRecord, names: Sequence[str]) -> Cause:
    if entry.kind == StoppedError.__name__:
        return Cause(entry.message, entry.exit_code, is_final=True, is_stopped=True)
    if entry.kind in (SystemExit.__name__, INTERRUPTED):
        return Cause(f"{names[entry.rank]} {entry.text}", entry.exit_code, entry.rank, is_final=entry.final)
    text = f"{names[entry.rank]} failed\n{entry.text.rstrip()}"
    message = f"{entry.kind}: {' '.join(entry.message.split())}"[:SUMMARY_CHARS]
    return Cause(text, entry.exit_code, entry.rank, entry.signal, entry.final, message=message)


def _program_errors(entries: Iterable[FailureRecord]) -> dict[int, str]:
    """By rank: the identity of its error, if the program is to blame. A worker's death is a fault of the machine."""
    return {
        entry.rank: _identity(entry)
        for entry in entries
        if not (entry.is_echo or entry.final or entry.kind == WorkerDiedError.__name__)
    }


def _identity(entry: FailureRecord) -> str:
    """The error's type, the words of its message and the samples that were being read.

    Words with digits do not count (addresses, times, counters, temporary files), nor does the order (a set's).
    """
    words = sorted(word for word in WORD.findall(entry.message) if not any(map(str.isdigit, word)))
    return " ".join([entry.kind, *words, *(line for line in entry.text.splitlines() if line.startswith(READING))])


def _cause_of_exit_code(rank: int, code: int, name: str) -> Cause:
    if code >= 0:
        return Cause(f"{name} ended with exit code {code}", code, rank)
    return Cause(f"{name} {killed_by(-code)}", 1, rank, signal=-code)


def killed_by(number: int) -> str:
    """What to say of a process that a signal ended."""
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    hint = "; if no person did this, the machine has run out of memory" if number == signal.SIGKILL else ""
    return f"was killed by {name}{hint}"
