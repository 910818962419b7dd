"""Sweep: a command in which settings have several values trains once with each combination, one run after the other.

swept   a number, a truth value or a choice with commas: lr=1e-3,3e-4; a text or a tuple may have commas itself
member  one combination; its run is named after its values
Law: all members are checked before the first begins. The same command again trains only what has not finished.
"""

import itertools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fourfold.cli import job, task_loader
from fourfold.cli.arguments import several_values
from fourfold.cli.errors import ErrorCollector, report_error
from fourfold.cli.output import print_text
from fourfold.cli.plan.arguments import PLAN_AUTO
from fourfold.cli.run import resolve
from fourfold.trainer.run_identity import read_finished_record
from fourfold.words.errors import INTERRUPT_EXIT_CODE, REQUEUE_EXIT_CODE, FourfoldError, Problem, SettingError
from fourfold.words.field import KEY_VALUE
from fourfold.words.terminal_text import table_lines

MAX_VALUE_IN_NAME = 40
STOP_CODES = (REQUEUE_EXIT_CODE, INTERRUPT_EXIT_CODE)


class Member(NamedTuple):
    """One run of a sweep: its values of the swept keys, and the words of its own command."""

    values: tuple[str, ...]
    words: tuple[str, ...]
    run_dir: Path


class Sweep(NamedTuple):
    """All runs of a command."""

    keys: tuple[str, ...]
    members: tuple[Member, ...]


def swept_values(words: Sequence[str]) -> dict[str, list[str]]:
    """The values of each swept key; empty if the command is a single run. Raises FourfoldError."""
    if not any("," in match["value"] for word in words if (match := KEY_VALUE.fullmatch(word))):
        return {}
    run = resolve(words)
    types = task_loader.task_arguments(task_loader.find_task(run.task))
    return several_values(run.texts, types, where="the command line")


def prepare_sweep(words: Sequence[str], swept: dict[str, list[str]], *, num_processes: int | None) -> Sweep:
    """Check every member. Raises FourfoldError, or a group of them, with all problems."""
    others = [word for word in words if not ((match := KEY_VALUE.fullmatch(word)) and match["key"] in swept)]
    errors, members = ErrorCollector(), []
    for values in itertools.product(*swept.values()):
        own = [f"{key}={value}" for key, value in zip(swept, values, strict=True)]
        with errors.collect():
            members.append(_prepare_member(others, own, values, num_processes=num_processes))
    errors.raise_collected()  # one problem of all members once
    if len({member.run_dir for member in members}) < len(members):
        raise SettingError(Problem("two runs of the sweep with one name", "values that differ in the run's name"))
    return Sweep(tuple(swept), tuple(members))


def _prepare_member(
    others: Sequence[str], own: Sequence[str], values: tuple[str, ...], *, num_processes: int | None
) -> Member:
    parsed = job.parse_job([word for word in (*others, *own) if word != PLAN_AUTO], num_processes=num_processes)
    prefix, name = parsed.settings["run_prefix"], parsed.settings["name"]
    # A plan's fields change the plan and not the identity, so the hash alone may be that of another member.
    digest = name.removeprefix(f"{prefix}-") if name == parsed.default_name else ""
    parts = [prefix if digest else name, *(_in_name(word) for word in own), digest]
    name = "-".join(filter(None, parts))
    words = [*(word for word in others if not word.startswith("name=")), *own, f"name={name}"]
    if PLAN_AUTO in words:
        from fourfold.cli.plan import auto as plan_auto

        words = plan_auto.resolve_words(words, num_processes=num_processes, world=None)
    ready = job.prepare_job(words, num_processes=num_processes)
    return Member(values, tuple(words), ready.run_dir)


def _in_name(word: str) -> str:
    return word.replace(os.sep, "_").strip(".")[:MAX_VALUE_IN_NAME]


def run_sweep(sweep: Sweep, train: Callable[[Sequence[str]], int]) -> int:
    """Train the members with `train`, which returns an exit code; print what they came to. Returns the exit code.

    It is 1 if a member has failed, and that of the stop if one was stopped: then the rest is left for the next time.
    """
    codes: dict[Member, int] = {}
    print_text(f"sweep of {len(sweep.members)} runs: {', '.join(sweep.keys)}")
    for number, member in enumerate(sweep.members, 1):
        values = " ".join(f"{key}={value}" for key, value in zip(sweep.keys, member.values, strict=True))
        print_text(f"\nrun {number} of {len(sweep.members)}: {values}")
        try:
            codes[member] = train(member.words)
        except FourfoldError as error:  # another process trains this run, say: the others must not wait for it
            codes[member] = report_error(error)
        if codes[member] in STOP_CODES:
            break
    print_text("\n" + "\n".join(format_sweep(sweep, codes)))
    stopped = next((code for code in codes.values() if code in STOP_CODES), None)
    return stopped if stopped is not None else int(any(codes.values()))


def format_sweep(sweep: Sweep, codes: dict[Member, int]) -> list[str]:
    """The table that compares the runs, and the command for a page that does."""
    records = {member: read_finished_record(member.run_dir) or {} for member in sweep.members}
    unit = next((record["unit"] for record in records.values() if record.get("unit")), "samples")
    rows: list[tuple[str, ...]] = [(*sweep.keys, "loss", "validation loss", f"{unit}/s", "folder")]
    for member, record in records.items():
        ended = _ended(record, codes.get(member))
        loss, valid = _format_loss(record.get("loss")), _format_loss(record.get("valid", {}).get("loss"))
        rate = f"{record['rate']:,.0f}" if "rate" in record else ""
        rows.append((*member.values, loss or ended, valid, rate, str(member.run_dir)))
    finished = [str(member.run_dir) for member, record in records.items() if record]
    lines = table_lines(rows, "<" * len(sweep.keys) + ">>><")
    return lines + (["", f"fourfold report {' '.join(finished)}"] if len(finished) > 1 else [])


def _ended(record: dict[str, Any], code: int | None) -> str:
    if record:
        return "nan"  # JSON has null where the loss was not finite
    if code is None:
        return "not begun"
    return "stopped" if code in STOP_CODES else f"failed ({code})"


def _format_loss(loss: float | None) -> str:
    return "" if loss is None else f"{loss:.4f}"
