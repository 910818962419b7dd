"""Named files: whether the files that a command names are there, and the names in them, before torch is imported.

Law: what is said here, the loaders would say too, later. A file is read and not run; where it leaves room for doubt,
nothing is said.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fourfold.cli import settings_file, task_loader
from fourfold.cli.arguments import (
    CALLBACK_WORD,
    PROGRAM_WORD,
    RULES_WORD,
    has_several_values,
    parse_values,
)
from fourfold.cli.errors import ErrorCollector
from fourfold.cli.job_checks import check_init_path
from fourfold.cli.plan_file import read_plan_text
from fourfold.cli.rules_file import check_rules_path
from fourfold.cli.task_source import argument_names, bound_names, task_names, top_names
from fourfold.feed.text_path import resolve_text_path
from fourfold.plan.plan import Plan
from fourfold.trainer.callbacks.registry import check_shipped
from fourfold.trainer.run_identity import HF_PREFIX
from fourfold.words.errors import Problem, SettingError, closest_match
from fourfold.words.field import KEY_VALUE, Field

INIT_WORD, TEXT_WORD = "init", "data"


def check_named_files(words: Sequence[str]) -> None:
    """Raise the errors of all files and names that are not there, as a group if they are several.

    Of a key with several values nothing is said: a sweep, or the planner, reads each of them.
    """
    pairs = {word: match for word in words if (match := KEY_VALUE.fullmatch(word))}
    lists = [word for word, match in pairs.items() if has_several_values(match["key"], match["value"], {})]
    command, errors = settings_file.parse_command([word for word in words if word not in lists]), ErrorCollector()
    with errors.collect():
        _check_task(command.task)
    with errors.collect():
        if command.plan_file is not None:
            Plan.from_toml(read_plan_text(command.plan_file), where=command.plan_file)
    own, file = argument_names(command.task), command.settings_file
    in_file = {} if file is None else file.sections[settings_file.RUN] | file.sections[settings_file.TASK]
    # With values of the task's own arguments, whose types are not known here, all problems come at once, later.
    is_complete = own is not None and not {*own} & {*in_file, *command.values}
    types = dict.fromkeys(own or (), Field())
    with errors.collect():
        known = {key: text for key, text in command.values.items() if is_complete or key == PROGRAM_WORD}
        Plan.from_dict(parse_values(known, types).plan, where="the command line")
    with errors.collect():
        if file is not None and is_complete:
            file.parse(types)
    if own is not None:
        _check_settings({k: v for k, v in {**in_file, **command.values}.items() if k not in own}, errors)
        with errors.collect():
            if TEXT_WORD in command.values and (command.task == "lm" or command.task.startswith(HF_PREFIX)):
                resolve_text_path(command.values[TEXT_WORD])
    errors.raise_collected()


def _check_task(spec: str) -> None:
    """Raise TaskError for a task that is not there, or a name that its file does not bind."""
    task_loader.check_task_file(spec)
    file, _, name = spec.partition(":")
    bound = bound_names(Path(file)) if file.endswith(".py") else None
    if bound is None:
        return
    is_given, name, tasks = bool(name), name or task_loader.DEFAULT_NAME, task_names(Path(file))
    if name not in bound and (is_given or tasks):  # a file without any may have another fault, which its import says
        raise task_loader.no_task(f"no {name}", name, tasks, alike=top_names(Path(file)), file=file)


def _check_settings(given: Mapping[str, Any], errors: ErrorCollector) -> None:
    init, rules, callbacks = (given.get(word) for word in (INIT_WORD, RULES_WORD, CALLBACK_WORD))
    with errors.collect():
        if isinstance(init, str) and init.lower() != "none":
            check_init_path(init)
    with errors.collect():
        if isinstance(rules, str):
            check_rules_path(rules)
    for spec in callbacks.split(",") if isinstance(callbacks, str) and callbacks.lower() != "none" else ():
        file, _, name = spec.strip().partition(":")
        with errors.collect():
            if not file.endswith(".py"):
                check_shipped(spec.strip())
                continue
            task_loader.check_python_file(file, SettingError, "a Python file")
            if name:
                _check_callback(file, name)


def _check_callback(file: str, name: str) -> None:
    """Raise SettingError for a name that nothing in a file binds."""
    bound = bound_names(Path(file))
    if bound is not None and name not in bound:
        close, need = closest_match(name, bound), f"FILE.py:name of a callback, as in {CALLBACK_WORD}={file}:…"
        raise SettingError(Problem(f"no {name}", need, f"{file}:{close}" if close else ""), where=file)
