"""Errors for people: what was got, what is needed, what to try; all problems at once.

problem  one thing that is wrong: (got, need, attempt); printed in columns
requeue  the exit code of a job that the same command goes on with
Law: an error raised for a user's input is a `FourfoldError`, and no process has been started yet.
"""

import difflib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from fourfold.words.terminal_text import escape_controls
from fourfold.words.text_table import align_columns

# EX_TEMPFAIL of BSD's sysexits.h, "try again later": schedulers are told to start such a job once more.
REQUEUE_EXIT_CODE = 75
INTERRUPT_EXIT_CODE = 130  # 128 + SIGINT, as a shell has it: a person has pressed Ctrl-C

# What torch and gloo say when another process has gone.
PEER_GONE_MESSAGES = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "recvvalue failed",
    "socket closed",
    "remote process exited",
    "application timeout caused pair closure",
)


class Problem(NamedTuple):
    """One thing that is wrong. `attempt` is what the reader might try (`try` is a word of Python)."""

    got: str
    need: str = ""
    attempt: str = ""


class FourfoldError(Exception):
    """The parent of all errors meant for people; `exit_code` is what the command line ends with."""

    exit_code = 2

    def __init__(self, problems: str | Problem | Sequence[Problem], *, where: str = "") -> None:
        if isinstance(problems, str):
            problems = Problem(problems)
        self.problems = (problems,) if isinstance(problems, Problem) else tuple(problems)
        self.where = where
        super().__init__(self.problems, where)

    def __str__(self) -> str:
        return format_problems(self.problems, where=self.where)

    def full_message(self) -> str:
        """The whole message for a person, beginning with the kind of error, as a traceback would have it."""
        return f"{type(self).__name__}: {self}"


class PlanError(FourfoldError):
    """A plan that cannot be carried out."""


class TaskError(FourfoldError):
    """A task that cannot be read, or that does not keep its contract."""


class DataError(FourfoldError):
    """A data source that is missing, empty or too small."""


class SettingError(FourfoldError):
    """A setting that is unknown or has an impossible value."""


class OptimizerError(FourfoldError):
    """An optimizer whose update cannot run on flat buffers."""


class CheckpointError(FourfoldError):
    """A checkpoint that is damaged, missing, or of something else."""


class UnreadableCheckpointError(CheckpointError):
    """A checkpoint that may be good, and cannot be read here: a newer version wrote it, or it may not be opened."""


class TrainingError(FourfoldError):
    """Training met something it must not go on with, such as a parameter without gradient."""

    exit_code = 1


class LaunchError(FourfoldError):
    """The processes of a job cannot find each other, or a launcher's variables contradict each other."""


class PeerError(FourfoldError):
    """Another rank has died or does not answer: nothing is wrong with this one, and another attempt may go well."""

    exit_code = REQUEUE_EXIT_CODE


class StoppedError(FourfoldError):
    """Training was asked to stop (SIGTERM, Ctrl-C) and did, at a step that all ranks agreed on.

    `exit_code` is INTERRUPT_CODE after a Ctrl-C.
    """

    exit_code = REQUEUE_EXIT_CODE


class DivergenceError(FourfoldError):
    """Ranks are in different calls, with other options of the optimizer, or replicas of their weights differ."""

    exit_code = 1


def format_problems(problems: Sequence[Problem], *, where: str = "") -> str:
    """The text of an error: a head line, then a row per problem with aligned columns. Safe to print."""
    problems = [Problem(*map(escape_controls, problem)) for problem in problems]
    if len(problems) == 1 and not where and not problems[0].need and not problems[0].attempt:
        return problems[0].got
    head = f"{len(problems)} problems" if len(problems) > 1 else "1 problem"
    place = f" in {escape_controls(where)}" if where else ""
    rows = [(p.got, f"need {p.need}" if p.need else "", f"try {p.attempt}" if p.attempt else "") for p in problems]
    lines = align_columns(rows, "<<<", gap="   ")
    return "\n".join([f"{head}{place}", *("  " + line for line in lines)])


def os_error_text(error: OSError) -> str:
    """What the system says, in our manner of writing: "no space left on device"."""
    return (error.strerror or str(error)).lower()


def closest_match(word: str, choices: Iterable[str]) -> str | None:
    """The choice a mistyped word was most likely meant to be, or None."""
    close = difflib.get_close_matches(word, list(choices), n=1, cutoff=0.6)
    return close[0] if close else None
