"""Named files: whether the files that a command names are there, and the names in them, before torch is imported.

Law: what is said here, the loaders would say too, later. A file is read and not run; where it leaves room for doubt,
nothing is said.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fourfold.cli import settings_file, task_loader
from fourfold.cli.arguments import CALLBACK_WORD, PROGRAM_WORD, RULES_WORD, parse_values
from fourfold.cli.errors import ErrorCollector
from fourfold.cli.job_checks import check_init_path
from fourfold.cli.plan_file import read_plan_text
from fourfold.cli.rules_file import check_rules_path
from fourfold.cli.task_source import argument_names, bound_names
from fourfold.feed.text_path import resolve_text_path
from fourfold.trainer.run_identity import HF_PREFIX
from fourfold.words.errors import Problem, SettingError, TaskError, closest_match

INIT_WORD, TEXT_WORD = "init", "data"


def check_named_files(words: Sequence[str]) -> None:
    """Raise the errors of all files and names that are not there, as a group if they are several."""
    command, errors = settings_file.parse_command(words), ErrorCollector()
    with errors.collect():
        check_task(command.task)
    with errors.collect():
        if command.plan_file is not None:
            read_plan_text(command.plan_file)
    with errors.collect():
        parse_values({key: text for key, text in command.values.items() if key == PROGRAM_WORD}, None)
    own = argument_names(command.task)
    if own is not None:
        in_file = {} if command.settings_file is None else command.settings_file.sections[settings_file.RUN]
        _check_settings({k: v for k, v in {**in_file, **command.values}.items() if k not in own}, errors)
        with errors.collect():
            if TEXT_WORD in command.values and (command.task == "lm" or command.task.startswith(HF_PREFIX)):
                resolve_text_path(command.values[TEXT_WORD])
    errors.raise_collected()


def check_task(spec: str) -> None:
    """Raise TaskError for a task that is not there, or a name that its file does not bind."""
    task_loader.check_task_file(spec)
    file, _, name = spec.partition(":")
    if file.endswith(".py") and name:  # without a name, a file may have another fault, which its import says
        _check_name(file, name, "a Task, or a function that returns one", TaskError)


def _check_settings(given: Mapping[str, Any], errors: ErrorCollector) -> None:
    init, rules, callbacks = (given.get(word) for word in (INIT_WORD, RULES_WORD, CALLBACK_WORD))
    with errors.collect():
        if isinstance(init, str) and init.lower() != "none":
            check_init_path(init)
    with errors.collect():
        if isinstance(rules, str):
            check_rules_path(rules)
    for spec in callbacks.split(",") if isinstance(callbacks, str) else ():
        file, _, name = spec.strip().partition(":")
        if file.endswith(".py"):
            with errors.collect():
                task_loader.check_python_file(file, SettingError, "a Python file")
                if name:
                    _check_name(file, name, f"FILE.py:name of a callback, as in {CALLBACK_WORD}={file}:…", SettingError)


def _check_name(file: str, name: str, need: str, kind: type[TaskError] | type[SettingError]) -> None:
    """Raise an error for a name that nothing in a file binds."""
    bound = bound_names(Path(file))
    if bound is not None and name not in bound:
        close = closest_match(name, bound) or next(iter(bound), "")
        raise kind(Problem(f"no {name}", need, f"{file}:{close}" if close else ""), where=file)
