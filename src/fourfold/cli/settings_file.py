"""Settings file: one TOML that says what a run is: its task, its plan, its settings.

section  [task], [plan] or [run]; a TOML without sections is a plan
Law: the file is only data. All its problems are reported at once, with the section in which a key belongs.
"""

import inspect
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fourfold.axes.tensor.rules.styles import table_problems
from fourfold.cli import task_loader
from fourfold.cli.arguments import (
    CALLBACK_WORD,
    LAUNCH_SETTINGS,
    RULES_WORD,
    SETTINGS,
    Arguments,
    CommandSettings,
    ParsedValues,
)
from fourfold.plan.decode import DecodeError, format_pair, format_table, format_value, from_toml, read_toml
from fourfold.plan.plan import VERSION, Plan
from fourfold.plan.plan_fields import FIELDS, PLAN_FIELDS
from fourfold.plan.recipes import RECIPE_PREFIX, SHIPPED_PLANS
from fourfold.trainer.callbacks.registry import SHIPPED
from fourfold.trainer.run_identity import normal_task_name, task_file
from fourfold.trainer.settings import LR_PREFIX, TASK_FIELDS, Settings, json_problems
from fourfold.words.errors import PlanError, Problem, SettingError, closest_match, place_of_setting
from fourfold.words.field import Field, value_text
from fourfold.words.run_files import CONFIG_FILE
from fourfold.words.task import Task

TASK, PLAN, RUN = SECTIONS = ("task", "plan", "run")
SECTION_NEEDS = {TASK: "an argument of the task", PLAN: "a field of the plan", RUN: "a setting of the run"}
TASK_NAME = "name"
MAX_SHOWN_VALUE = 60


@dataclass(frozen=True)
class SettingsFile:
    """A settings file as it was read. `problems`: those of the form, whatever the task is."""

    path: str
    sections: Mapping[str, dict[str, Any]]
    problems: Sequence[Problem] = ()

    @property
    def task(self) -> str | None:
        """The task as the command line would name it in the current folder; None if the file names none."""
        name = self.sections[TASK].get(TASK_NAME)
        return _task_from_here(self.path, name) if isinstance(name, str) else None

    @property
    def plan(self) -> dict[str, Any]:
        """The section [plan], as it was read."""
        return self.sections[PLAN]

    @property
    def run(self) -> dict[str, Any]:
        """The section [run]."""
        return self.sections[RUN]

    def parse(self, types: Arguments) -> ParsedValues:
        """The values, by what they belong to. Raises SettingError with all problems of the file.

        types  the arguments of the task; None: not known, only the plan is read
        """
        parsed, problems = ParsedValues(), list(self.problems)
        problems += self._plan_problems(parsed, types)
        for section in (RUN, TASK):
            for key, value in self.sections[section].items():
                if types is not None and (section, key) != (TASK, TASK_NAME):
                    problems += self._convert(section, key, value, types, parsed)
        if problems:
            raise SettingError(problems, where=self.path)
        return parsed

    def _convert(
        self, section: str, key: str, value: Any, types: Mapping[str, Field], parsed: ParsedValues
    ) -> Sequence[Problem]:
        """Put a value where it belongs; returns its problem if it has one."""
        if section == RUN and key in SHIPPED and isinstance(value, dict):
            options = {f"{key}.{name}": value_text(each) for name, each in value.items()}
            parsed.callback_options.update(options)
            return []
        if section == RUN and key == RULES_WORD and isinstance(value, dict) and key not in types:
            parsed.run[key] = value
            return [each._replace(got=f"{each.got} in [{RUN}.{key}]") for each in table_problems(value)]
        if section == RUN and key == CALLBACK_WORD:
            is_list = isinstance(value, list) and bool(value) and all(isinstance(each, str) for each in value)
            value = ",".join(value) if is_list else value
            if (problem := _callback_problem(value)) is not None:
                return [problem]
        if key not in (types if section == TASK else SETTINGS):
            return [_misplaced(section, key, value, types)]
        # As on the command line: if the task's function takes `steps` itself, it gets them.
        key_type, target = types.get(key) or SETTINGS[key], parsed.task if key in types else parsed.run
        if key in target:
            return [Problem(f"{key} in [{RUN}] and in [{TASK}]", "each key once")]
        try:
            target[key] = key_type.convert(value)
        except (ValueError, OverflowError):
            attempt = ""
            if isinstance(value, list) and key_type.type is not tuple:
                attempt = f"{key}={','.join(map(str, value))} on the command line, which trains once with each"
            return [Problem(f"{_format(key, value)} in [{section}]", key_type.requirement(), attempt)]
        return [each._replace(got=f"{each.got} in [{section}]") for each in key_type.problems(key, target[key])]

    def _plan_problems(self, parsed: ParsedValues, types: Arguments) -> list[Problem]:
        """The problems of [plan]; its values go into `parsed`."""
        values = dict(self.sections[PLAN])
        problems = _version_problems(values, "[plan]")
        known = {key: value for key, value in values.items() if key in FIELDS}
        problems += [_misplaced(PLAN, key, value, types) for key, value in values.items() if key not in known]
        # As on the command line.
        known = {k: None if v == "none" and PLAN_FIELDS[k].is_optional else v for k, v in known.items()}
        try:
            plan = Plan.from_dict(known, where=self.path)
        except PlanError as error:
            return problems + [problem._replace(got=f"{problem.got} in [plan]") for problem in error.problems]
        parsed.plan.update({name: getattr(plan, name) for name in known})
        return problems


def _callback_problem(value: Any) -> Problem | None:
    """The problem of callbacks that this file may not name: it is data, and what is in a Python file would be run."""
    need = f"shipped callbacks: {', '.join(SHIPPED)}"
    if not isinstance(value, str):
        return Problem(f"{_format(CALLBACK_WORD, value)} in [{RUN}]", need, f'{CALLBACK_WORD} = ["csv", "tensorboard"]')
    foreign = [name.strip() for name in value.split(",") if name.strip() not in SHIPPED]
    if not foreign or value.lower() == "none":
        return None
    close = closest_match(foreign[0], SHIPPED)
    attempt = f"{CALLBACK_WORD}={foreign[0]} in the command" if ".py" in foreign[0] else close or ""
    return Problem(f"{_format(CALLBACK_WORD, value)} in [{RUN}]", need, attempt)


def read_settings_file(path: str) -> SettingsFile | None:
    """The settings in a TOML with sections; None for any other file: it is a plan, or refused as one."""
    try:
        is_recipe = path.startswith(RECIPE_PREFIX)
        table = from_toml(SHIPPED_PLANS.text(path.removeprefix(RECIPE_PREFIX))) if is_recipe else read_toml(Path(path))
    except (OSError, DecodeError, PlanError):
        return None
    if not any(isinstance(value, dict) or _is_list_of_tables(value) for value in table.values()):
        return None
    problems = _version_problems(table, "")
    sections: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for key, value in table.items():
        if key in sections and isinstance(value, dict):
            sections[key] = value
        elif isinstance(value, dict) or _is_list_of_tables(value):
            close = f"{RUN}.{RULES_WORD}" if key == RULES_WORD else closest_match(key, SECTIONS)
            got = f"[{key}]" if isinstance(value, dict) else f"[[{key}]]"
            problems.append(Problem(got, "one section [task], [plan] or [run]", f"[{close}]" if close else ""))
        else:
            place = _place_of(key, None)
            need = "every key in a section: [task], [plan] or [run]"
            problems.append(Problem(_format(key, value), need, f"move it to [{place}]" if place else ""))
    name = sections[TASK].get(TASK_NAME)
    if name is not None and not isinstance(name, str):
        problems.append(Problem(f"{_format(TASK_NAME, name)} in [task]", "the task's name", 'name = "lm"'))
    return SettingsFile(path, sections, problems)


def _is_list_of_tables(value: object) -> bool:
    return isinstance(value, list) and any(isinstance(each, dict) for each in value)


def _version_problems(table: dict[str, Any], place: str) -> list[Problem]:
    """Takes `version` out of the table; it may be missing."""
    version = table.pop("version", VERSION)
    if type(version) is int and version == VERSION:
        return []
    return [Problem(f"version = {version!r}{place and f' in {place}'}", f"version = {VERSION}")]


def _task_from_here(path: str, name: str) -> str:
    """A task's name in a file, which counts from the file's folder, as the command line names it in this folder."""
    before, file, after = task_file(name)
    if not file or os.path.isabs(file):
        return normal_task_name(name)
    found = os.path.normpath(os.path.join(os.path.dirname(path), file))
    here = os.getcwd()
    # Named as in a command, whether the settings file was given by a relative or an absolute path.
    return before + (os.path.relpath(found, here) if Path(found).is_relative_to(here) else found) + after


def _misplaced(section: str, key: str, value: Any, types: Arguments) -> Problem:
    """The problem of a key that its section does not know."""
    got, need = f"{_format(key, value)} in [{section}]", SECTION_NEEDS[section]
    place = _place_of(key, types)
    if place is not None:
        return Problem(got, need, f"move it to [{place}]")
    own = {TASK: [*(types or {})], PLAN: [*FIELDS], RUN: [*SETTINGS]}
    every = [name for names in own.values() for name in names]
    if (elsewhere := place_of_setting(key, every)) is not None:
        return Problem(got, need, elsewhere)
    close = closest_match(key, own[section]) or closest_match(key, every)
    if close is None:
        return Problem(got, need, ", ".join(own[section]) if section == TASK else "fourfold train --help")
    place = section if close in own[section] else _place_of(close, types)
    return Problem(got, need, close if place == section else f"{close} in [{place}]")


def _place_of(key: str, types: Arguments) -> str | None:
    """The section in which a key belongs."""
    if key in FIELDS:
        return PLAN
    return RUN if key in SETTINGS else TASK if key in (types or {}) else None


def _format(key: str, value: Any) -> str:
    try:
        text = format_pair(key, value)
    except ValueError:  # a table, or a date
        text = f"{key} = a {'table' if isinstance(value, dict) else type(value).__name__}"
    return text if len(text) <= MAX_SHOWN_VALUE else text[:MAX_SHOWN_VALUE] + "…"


# ---- as it is written for a run --------------------------------------------------------------------------------------


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
    value = getattr(CommandSettings if name in LAUNCH_SETTINGS else settings, name)
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
