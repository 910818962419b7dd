"""Run identity: which run a folder holds, and whether it has finished."""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from fourfold.plan.decode import DecodeError, check_not_pipe, from_json, read_bounded
from fourfold.plan.plan import FIELDS, Plan
from fourfold.trainer.settings import Identity, canonical_json
from fourfold.words.errors import PlanError, Problem, SettingError

MAX_NAME_BYTES = 200  # file systems allow 255, and a run that starts over gets a longer name
LOG_FILE, SETTINGS_FILE, PLAN_FILE = "metrics.jsonl", "settings.json", "plan.toml"


def check_run_name(parent: Path, name: str | None, identity: Identity | None = None) -> None:
    """Raise SettingError for a name that another run has, or that is no name of a folder."""
    if name is None:
        return
    if not name or Path(name).name != name or name in (".", "..") or not name.isprintable():
        need = "the name of a folder, without a path or control characters"
        raise SettingError(Problem(f"name = {name!r}", need, "name=first-try"))
    if len(os.fsencode(name)) > MAX_NAME_BYTES:
        raise SettingError(Problem(f"name = {name[:20]}… of {len(name)} letters", f"at most {MAX_NAME_BYTES} bytes"))
    path = parent / name
    if not path.exists():
        return
    theirs = read_identity(path)
    if identity is None or theirs is None or canonical_json(theirs) != canonical_json(identity):
        got = f"{path} is there already{_format_identity_difference(theirs, identity)}"
        raise SettingError(Problem(got, "a name of its own for every run", f"name={name}-2"))


def read_identity(path: Path) -> dict[str, Any] | None:
    """What makes the run in this folder the same run; None where it does not say."""
    try:
        found = from_json(read_bounded(path / SETTINGS_FILE), dict[str, Any]).get("identity")
    except (OSError, DecodeError):
        return None
    return found if isinstance(found, dict) else None


def _format_identity_difference(theirs: Identity | None, ours: Identity | None) -> str:
    if theirs is None or ours is None:
        return ""
    now = msgspec.json.decode(canonical_json(ours), type=dict[str, Any])
    return f", with another {', '.join(_differing_fields(theirs, now))}"


def _differing_fields(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> Iterator[str]:
    """The names under which two identities differ, with what is there and what is wanted."""
    for name in {**theirs, **ours}:
        there, here = theirs.get(name), ours.get(name)
        if isinstance(there, dict) and isinstance(here, dict):
            yield from _differing_fields(there, here)
        elif there != here:
            yield f"{name} ({_format_value(there)} there, {_format_value(here)} here)"


def _format_value(value: Any) -> str:
    return "none" if value is None else json.dumps(value)


def read_finished_record(path: Path) -> dict[str, Any] | None:
    """The last line of the log of a run that has ended well; None for any other."""
    with contextlib.suppress(OSError, DecodeError):
        check_not_pipe(path / LOG_FILE)
        with (path / LOG_FILE).open("rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - 2**16))
            last = log.read().splitlines()[-1:]
        line = from_json(last[0], dict[str, Any]) if last else {}
        return line if isinstance(line.get("finished"), int) else None
    return None


def format_finished(path: Path, record: Mapping[str, Any], plan: Plan) -> str:
    """What is said of a run that has ended already, with the last line of its log, to who asks for `plan`."""
    theirs = _differing_plan_fields(path, plan)
    had = f"; it had {', '.join(theirs)}, the same training" if theirs else ""
    ended = f"{path} is finished ({record['finished']} steps{had})"
    return f"{ended}: fourfold train … name=another for a new run, or fresh=true to start over"


def _differing_plan_fields(path: Path, plan: Plan) -> list[str]:
    """The fields that the run in this folder has otherwise, as it has them; none where it does not say."""
    try:
        theirs = Plan.from_toml(read_bounded(path / PLAN_FILE).decode())
    except (OSError, UnicodeDecodeError, DecodeError, PlanError):
        return []
    return [
        f"{name} = {_format_value(getattr(theirs, name))}"
        for name in FIELDS
        if getattr(theirs, name) != getattr(plan, name)
    ]
