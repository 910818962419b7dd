"""Sweep: a command in which settings have several values trains once with each combination, one run after the other.

swept   a number, a truth value or a choice with commas: lr=1e-3,3e-4; a text or a tuple may have commas itself
member  one combination; its run is named after its values
Law: all members are checked before the first begins. The same command again trains only what has not finished.
"""

import itertools
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fourfold.cli import job
from fourfold.cli.errors import ErrorCollector, report_error
from fourfold.cli.output import print_text
from fourfold.cli.run import Run
from fourfold.trainer.run_identity import read_finished_record
from fourfold.words.errors import INTERRUPT_EXIT_CODE, REQUEUE_EXIT_CODE, FourfoldError, Problem, SettingError
from fourfold.words.terminal_text import table_lines

MAX_VALUE_IN_NAME = 40
STOP_CODES = (REQUEUE_EXIT_CODE, INTERRUPT_EXIT_CODE, 128 + signal.SIGHUP, 128 + signal.SIGQUIT)


class Member(NamedTuple):
    """One run of a sweep, and its values of the swept keys."""

    values: Mapping[str, str]
    job: job.Job

    @property
    def run_dir(self) -> Path:
        return self.job.run_dir


def prepare_sweep(run: Run, swept: Mapping[str, list[str]], with_plan: Callable[[Run], Run]) -> list[Member]:
    """Check every member. `with_plan` gives a run its plan. Raises FourfoldError, or a group, with all problems."""
    errors, members = ErrorCollector(), []
    for values in itertools.product(*swept.values()):
        own = dict(zip(swept, values, strict=True))
        with errors.collect():
            members.append(Member(own, job.prepare_job(with_plan(_with_name(run, own)))))
    errors.raise_collected()  # one problem of all members once
    if len({member.run_dir for member in members}) < len(members):
        raise SettingError(Problem("two runs of the sweep with one name", "values that differ in the run's name"))
    return members


def _with_name(run: Run, own: Mapping[str, str]) -> Run:
    """The run with these values, and a name that says which they are."""
    run = run.with_texts(**own)
    parsed = job.parse_job(run.asked if run.asks_plan else run)
    prefix, name = parsed.settings["run_prefix"], parsed.settings["name"]
    # A plan's fields change the plan and not the identity, so the hash alone may be that of another member.
    digest = name.removeprefix(f"{prefix}-") if name == parsed.default_name else ""
    parts = [prefix if digest else name, *(_in_name(f"{key}={value}") for key, value in own.items()), digest]
    return run.with_texts(name="-".join(filter(None, parts)))


def _in_name(word: str) -> str:
    return word.replace(os.sep, "_").strip(".")[:MAX_VALUE_IN_NAME]


def run_sweep(members: Sequence[Member], train: Callable[[job.Job], int]) -> int:
    """Train the members with `train`, which returns an exit code; print what they came to. Returns the exit code.

    It is 1 if a member has failed, and that of the stop if one was stopped: then the rest is left for the next time.
    """
    codes: dict[int, int] = {}
    print_text(f"sweep of {len(members)} runs: {', '.join(members[0].values)}")
    for number, member in enumerate(members, 1):
        values = " ".join(f"{key}={value}" for key, value in member.values.items())
        print_text(f"\nrun {number} of {len(members)}: {values}")
        try:
            codes[number] = train(member.job)
        except FourfoldError as error:  # another process trains this run, say: the others must not wait for it
            codes[number] = report_error(error)
        if codes[number] in STOP_CODES:
            break
    print_text("\n" + "\n".join(format_sweep(members, codes)))
    stopped = next((code for code in codes.values() if code in STOP_CODES), None)
    return stopped if stopped is not None else int(any(codes.values()))


def format_sweep(members: Sequence[Member], codes: Mapping[int, int]) -> list[str]:
    """The table that compares the runs, and the command for a page that does. `codes`: by number, from 1."""
    records = [read_finished_record(member.run_dir) or {} for member in members]
    unit = next((record["unit"] for record in records if record.get("unit")), "samples")
    rows: list[tuple[str, ...]] = [(*members[0].values, "loss", "validation loss", f"{unit}/s", "folder")]
    for number, (member, record) in enumerate(zip(members, records, strict=True), 1):
        ended = _ended(record, codes.get(number))
        loss, valid = _format_loss(record.get("loss")), _format_loss(record.get("valid", {}).get("loss"))
        rate = f"{record['rate']:,.0f}" if "rate" in record else ""
        rows.append((*member.values.values(), loss or ended, valid, rate, str(member.run_dir)))
    finished = [str(each.run_dir) for each, record in zip(members, records, strict=True) if record]
    lines = table_lines(rows, "<" * len(members[0].values) + ">>><")
    return lines + (["", f"fourfold report {' '.join(finished)}"] if len(finished) > 1 else [])


def _ended(record: dict[str, Any], code: int | None) -> str:
    if record:
        return "nan"  # JSON has null where the loss was not finite
    if code is None:
        return "not begun"
    return "stopped" if code in STOP_CODES else f"failed ({code})"


def _format_loss(loss: float | None) -> str:
    return "" if loss is None else f"{loss:.4f}"
