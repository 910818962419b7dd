"""Resolved settings: a run's config.toml, with every value that the run has.

given    a value that the command or its settings file gave
default  any other, below the given ones
Law: the file is a settings file; given back, it is the same run.
"""

import inspect
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fourfold.cli import task_loader
from fourfold.cli.arguments import (
    CALLBACK_WORD,
    LAUNCH_SETTINGS,
    RULES_WORD,
    SETTINGS,
    LaunchSettings,
    ParsedValues,
)
from fourfold.cli.settings_file import TASK_NAME
from fourfold.plan.decode import format_pair, format_table, format_value
from fourfold.plan.plan import VERSION, Plan
from fourfold.trainer.callbacks.registry import SHIPPED
from fourfold.trainer.run_identity import task_file
from fourfold.trainer.settings import LR_PREFIX, TASK_FIELDS, Settings, json_problems
from fourfold.words.field import Field
from fourfold.words.run_files import CONFIG_FILE
from fourfold.words.task import Task

NEVER_RESOLVED = ("fresh",)  # given back, the file must not start the run over
DEFAULTS = "# defaults"
WRITTEN_ANEW = "# Rewritten each time the run starts. To change a value, give it in the command: lr=1e-3"


def format_resolved(
    run_dir: Path,
    spec: str,
    defaults: Mapping[str, Any],
    values: ParsedValues,
    plan: Plan,
    settings: Settings,
) -> str:
    """The text of config.toml.

    spec      the task as named in the current folder
    defaults  of the keyword arguments of the task's function
    values    those given
    """
    command = f"# The same run again: fourfold train {run_dir / CONFIG_FILE}\n{WRITTEN_ANEW}"
    in_task = _arguments_of_task(defaults, values, settings)
    given = {TASK_NAME: _task_from(run_dir, spec), **{k: v for k, v in values.task.items() if k in in_task}}
    left = {name: value for name, value in defaults.items() if name in in_task and name not in values.task}
    sections = [
        [command, "", f"version = {VERSION}"],
        # As comments: the arguments that are given are part of the run's identity, and the others are not.
        ["[task]", *map(_line, given.items()), *_with_heading([_comment(*pair) for pair in left.items()])],
        ["[plan]", *_format_plan(plan, values)],
        ["[run]", *_format_run(values, settings, run_dir.name, in_task)],
    ]
    if RULES_WORD in values.run:  # the rules and not their file: the folder of the run is all that is needed
        sections.append([f"[run.{RULES_WORD}]", *format_table(values.run[RULES_WORD])])
    return "\n\n".join("\n".join(lines) for lines in sections) + "\n"


def argument_defaults(factory: task_loader.TaskFactory, types: Mapping[str, Field]) -> dict[str, Any]:
    """The default of each keyword argument of the task's function."""
    if isinstance(factory, Task):
        return {}
    return {name: each.default for name, each in inspect.signature(factory).parameters.items() if name in types}


def json_arguments(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values for settings.json, as text where JSON cannot hold one.

    Not those that are settings of every run: these have their final values there.
    """
    return {
        name: str(value) if json_problems({name: value}, "") else value
        for name, value in values.items()
        if name not in TASK_FIELDS
    }


def _arguments_of_task(defaults: Mapping[str, Any], values: ParsedValues, settings: Settings) -> set[str]:
    """The arguments that stand under [task]: not `steps` and the like where [run] means the same."""
    in_run = {name for name in TASK_FIELDS if name in defaults}
    given = {**defaults, **values.task}
    return set(defaults) - {name for name in in_run if given[name] == getattr(settings, name)} - {TASK_NAME}


def _format_plan(plan: Plan, values: ParsedValues) -> list[str]:
    default = Plan()
    names = list(vars(default))
    first = [n for n in names if n in values.plan or getattr(plan, n) != getattr(default, n)]
    lines = [_line((name, getattr(plan, name))) for name in first]
    return lines + _with_heading([_line((name, getattr(plan, name))) for name in names if name not in first])


def _format_run(values: ParsedValues, settings: Settings, run_name: str, in_task: set[str]) -> list[str]:
    """`in_task`: names that stand under [task], where the task's function takes them."""
    names = [name for name in SETTINGS if name not in (*in_task, *NEVER_RESOLVED, CALLBACK_WORD, RULES_WORD)]
    given = {**values.task, **values.run}
    first = [_line((name, given[name])) for name in names if name in given]
    rest = [_default_line(name, settings, run_name) for name in names if name not in given]
    return _format_callbacks(values) + first + _with_heading(rest)


def _format_callbacks(values: ParsedValues) -> list[str]:
    """The callbacks that are given. A settings file may name shipped ones only: the others stand in a comment."""
    spec = values.run.get(CALLBACK_WORD)
    if spec is None:
        return []
    names = [name.strip() for name in spec.split(",")]
    shipped, others = [n for n in names if n in SHIPPED], [n for n in names if n not in SHIPPED]
    lines = [_line((CALLBACK_WORD, ",".join(shipped)))] if shipped else []
    lines += [f"# in the command: {CALLBACK_WORD}={','.join(others)}"] if others else []
    return lines + [f"{key} = {format_value(text)}" for key, text in values.callback_options.items()]


def _default_line(name: str, settings: Settings, run_name: str) -> str:
    if name == "name":
        return f"# name: {run_name}, made from what is given"
    if name.startswith(LR_PREFIX):  # given, they would be part of the run's identity
        return f"# {name}: {SETTINGS[name].default_text}"
    value = getattr(LaunchSettings if name in LAUNCH_SETTINGS else settings, name)
    if SETTINGS[name].type is float and type(value) is int:
        return f"# {name}: {value}"  # the task's own; read from here it would be another number in the identity, 1.0
    return _line((name, value))


def _with_heading(lines: list[str]) -> list[str]:
    return ["", DEFAULTS, *lines] if lines else []


def _line(pair: tuple[str, Any]) -> str:
    """`key = value`. Where TOML has no such value, a comment that says so."""
    key, value = pair
    try:
        return format_pair(key, "none" if value is None else value)
    except ValueError as error:
        return f"# {key}: TOML cannot hold {error}"


def _comment(key: str, value: Any) -> str:
    """The value as it could be given; of a text too long for a line, nothing that a reader would take for data."""
    return "\n".join(f"# {line}" for line in _line((key, value)).removeprefix("# ").split("\n"))


def _task_from(run_dir: Path, spec: str) -> str:
    """The task's name as the file in this folder has it."""
    before, file, after = task_file(spec)
    return spec if not file or os.path.isabs(file) else before + os.path.relpath(file, run_dir) + after
