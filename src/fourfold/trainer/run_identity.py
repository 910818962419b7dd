"""Run identity: what makes two commands the same run, and what a run's folder says about its own.

identity  the task, its settings, the settings marked so in `Settings`, and the plan's identity fields; never the mesh
Law: two commands with the same identity are the same run, on any mesh. No file stays open here.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from fourfold.checkpoint.store import CheckpointStore
from fourfold.plan.decode import DecodeError, check_not_pipe, from_json, read_bounded
from fourfold.plan.lr_schedule import LRSchedule
from fourfold.plan.plan import Plan
from fourfold.plan.plan_fields import FIELDS
from fourfold.trainer.settings import Settings
from fourfold.words.errors import PlanError, Problem, SettingError
from fourfold.words.field import declared_settings
from fourfold.words.run_files import LOG_FILE, PLAN_FILE, SETTINGS_FILE

Identity = Mapping[str, Any]
MAX_NAME_BYTES = 200  # file systems allow 255, and a run that starts over gets a longer name
HF_PREFIX = "hf:"  # of a task that is made from a config file of transformers
LOG_TAIL_BYTES = 2**16  # more than the last line of a log


def run_identity(settings: Settings, plan: Plan) -> Identity:
    """What makes a run the same run, as it stands in settings.json."""
    defaults = {each.name: each.default for each in dataclasses.fields(settings)}
    values = {
        name: value
        for name, each in declared_settings(settings).items()
        if (value := getattr(settings, name)) != defaults[name] or each.in_identity == "always"
        if each.in_identity != "never"
    }
    if settings.epochs is not None:  # the steps follow from the data
        del values["steps"]
    values = {n: v.non_default_fields() if isinstance(v, LRSchedule) else v for n, v in values.items()}
    task = {"task": settings.task_name or settings.run_prefix, "settings": dict(settings.extra_settings or {})}
    return {**task, **values, **plan.identity_fields}


def canonical_json(identity: Identity) -> bytes:
    """The same text for the same identity."""
    return msgspec.json.encode(identity, order="sorted")


def default_run_name(run_prefix: str, identity: Identity) -> str:
    """The name of a run that is given none: the same for the same identity."""
    return f"{run_prefix}-{hashlib.blake2b(canonical_json(identity), digest_size=3).hexdigest()}"


def check_folder_name(name: str) -> None:
    """Raise SettingError for a run's name that cannot be a folder's."""
    if not name or Path(name).name != name or name in (".", "..") or not name.isprintable():
        need = "the name of a folder, without a path or control characters"
        raise SettingError(Problem(f"name = {name!r}", need, "name=first-try"))
    if len(os.fsencode(name)) > MAX_NAME_BYTES:
        raise SettingError(Problem(f"name = {name[:20]}… of {len(name)} letters", f"at most {MAX_NAME_BYTES} bytes"))


def check_run_name(parent: Path, name: str | None, identity: Identity | None = None) -> None:
    """Raise SettingError for a name that another run has, or that cannot be a folder's."""
    if name is None:
        return
    check_folder_name(name)
    path = parent / name
    if not path.exists() or _is_empty(path):
        return
    saved = read_identity(path)
    if identity is None or saved is None or canonical_json(saved) != canonical_json(identity):
        got, need = f"{path} exists already", "a different name for each run"
        if saved is not None and identity is not None:
            got = f"{got}, with another {', '.join(_differing_fields(saved, _as_stored(identity)))}"
        elif saved is None and (path / LOG_FILE).exists():
            got = f"{got}, and its {SETTINGS_FILE} is not there, or not one of a run"
            need = f"the {SETTINGS_FILE} that the run had, so that it goes on, or a different name"
        raise SettingError(Problem(got, need, f"name={name}-2"))


def _is_empty(path: Path) -> bool:
    try:
        return not os.listdir(path)
    except OSError:
        return False


def read_identity(path: Path) -> dict[str, Any] | None:
    """The identity of the run in this folder; None where its settings.json has none."""
    try:
        identity = from_json(read_bounded(path / SETTINGS_FILE), dict[str, Any]).get("identity")
    except (OSError, DecodeError):
        return None
    return identity if isinstance(identity, dict) else None


def normal_task_name(spec: str) -> str:
    """The task's name, with the path of its file in its shortest form: ./mine.py and mine.py are one task."""
    before, file, after = task_file(spec)
    return before + os.path.normpath(file) + after if file else spec


def task_file(spec: str) -> tuple[str, str, str]:
    """What stands in a task's name before the path of its file, the path ("" if it has none), and what follows."""
    if spec.startswith(HF_PREFIX):
        return HF_PREFIX, spec.removeprefix(HF_PREFIX), ""
    file, colon, name = spec.partition(":")
    return ("", file, colon + name) if file.endswith(".py") else (spec, "", "")


def _as_stored(identity: Identity) -> dict[str, Any]:
    return msgspec.json.decode(canonical_json(identity), type=dict[str, Any])


def _differing_fields(saved: Mapping[str, Any], asked: Mapping[str, Any]) -> Iterator[str]:
    """The names under which two identities differ, with both values."""
    for name in {**saved, **asked}:
        there, here = saved.get(name), asked.get(name)
        if isinstance(there, dict) and isinstance(here, dict):
            yield from _differing_fields(there, here)
        elif there != here:
            yield f"{name} ({_format_value(there)} there, {_format_value(here)} here)"


def _format_value(value: Any) -> str:
    return "none" if value is None else json.dumps(value)


def read_finished_record(path: Path) -> dict[str, Any] | None:
    """The last line of the log, if the run in this folder has finished; else None."""
    with contextlib.suppress(OSError, DecodeError):
        check_not_pipe(path / LOG_FILE)
        with (path / LOG_FILE).open("rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - LOG_TAIL_BYTES))
            last = log.read().splitlines()[-1:]
        record = from_json(last[0], dict[str, Any]) if last else {}
        return record if isinstance(record.get("finished"), int) else None
    return None


def resume_hint(path: Path) -> str:
    """What the same command will do next with the run in this folder."""
    if (record := read_finished_record(path)) is not None:
        return f"the run is finished ({record['finished']} steps)"
    steps = CheckpointStore(path).steps()
    if not steps:
        return "nothing is saved, and the same command starts over"
    return f"the same command resumes from step {steps[-1]}"


def format_finished(path: Path, record: Mapping[str, Any], plan: Plan) -> str:
    """What is printed for a run that has finished, when it is asked for again with `plan`.

    `record`: the last line of its log.
    """
    changed = _differing_plan_fields(path, plan)
    had = f"; it had {', '.join(changed)}, the same training" if changed else ""
    had = f", then stopped by {record['stopped']}{had}" if record.get("stopped") else had
    ended = f"{path} is finished ({record['finished']} steps{had})"
    return f"{ended}: fourfold train … name=another for a new run, or fresh=true to start over"


def _differing_plan_fields(path: Path, plan: Plan) -> list[str]:
    """The plan fields, with their values, in which the run in this folder differs; none where it has no plan."""
    try:
        saved = Plan.from_toml(read_bounded(path / PLAN_FILE).decode())
    except (OSError, UnicodeDecodeError, DecodeError, PlanError):
        return []
    return [
        f"{name} = {_format_value(getattr(saved, name))}"
        for name in FIELDS
        if getattr(saved, name) != getattr(plan, name)
    ]
