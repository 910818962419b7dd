"""Callback loader: the callbacks of a command line, shipped ones by name and those in a file of the user's.

    callback=csv callback=early_stopping early_stopping.patience=5 callback=mine.py:Notify

Law: a wrong name, file or option is an error before any process starts; an option without its callback is one too.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fourfold.cli import task_loader
from fourfold.cli.arguments import CALLBACK_WORD, ParsedValues
from fourfold.environment.python_source import closest_if_missing
from fourfold.trainer.callbacks import registry
from fourfold.words.callback import Callback
from fourfold.words.errors import Problem, SettingError, closest_match


def load_callbacks(spec: str | None, options: Mapping[str, str], *, runs_files: bool = True) -> list[Callback]:
    """The callbacks that `spec` names, with commas between them.

    options     the texts of NAME.OPTION
    runs_files  False: callbacks in files are left out, if the files are there
    Raises SettingError with all problems.
    """
    names = [name.strip() for name in spec.split(",")] if spec is not None else []
    problems = [Problem(f"{CALLBACK_WORD} = {name}, twice", "each once") for name in {*names} if names.count(name) > 1]
    for key in options:
        name = key.partition(".")[0]
        if name not in names:
            problems.append(Problem(f"{key} = {options[key]}", f"the callback {name}", f"{CALLBACK_WORD}={name}"))
    loaded = []
    for name in dict.fromkeys(names):
        try:
            loaded += _load(name, options, runs_files=runs_files)
        except SettingError as error:
            problems += error.problems
    if problems:
        raise SettingError(problems, where="the callbacks")
    return loaded


def options_of_file(file: ParsedValues, words: ParsedValues, *, path: str) -> dict[str, str]:
    """The options of a settings file that hold with these words of the command; `callback=none` takes away all.

    Raises SettingError for options whose callbacks a word of the command has replaced.
    """
    if CALLBACK_WORD not in words.run:
        return file.callback_options
    spec = words.run[CALLBACK_WORD]
    if spec is None:
        return {}
    names = [name.strip() for name in spec.split(",")]
    left = {key: key.partition(".")[0] for key in file.callback_options if key.partition(".")[0] not in names}
    if not left or not file.run.get(CALLBACK_WORD):
        return file.callback_options
    got = f"in {path}, whose callbacks {CALLBACK_WORD}={spec} in the command replaces"
    attempt = f"{CALLBACK_WORD}={','.join(dict.fromkeys([*names, *left.values()]))} to keep both"
    problems = [
        Problem(f"{key} = {file.callback_options[key]} {got}", f"the callback {name}", attempt)
        for key, name in left.items()
    ]
    raise SettingError(problems, where="the callbacks")


def _load(name: str, options: Mapping[str, str], *, runs_files: bool) -> list[Callback]:
    file = name.partition(":")[0]
    if file.endswith(".py"):
        task_loader.check_python_file(file, SettingError, "a Python file")
        member = name.partition(":")[2]
        if member and (close := closest_if_missing(Path(file), member)) is not None:
            raise SettingError(_no_callback(file, member, close))
        return [_load_from_file(name)] if runs_files else []
    own = {key.partition(".")[2]: text for key, text in options.items() if key.startswith(f"{name}.")}
    return [registry.make_shipped(name, own)]


def _load_from_file(spec: str) -> Callback:
    """The callback in FILE.py:name: an object, or a class or function that makes one without arguments."""
    file, _, name = spec.partition(":")
    module = task_loader.import_file(Path(file), reuse=True)
    member = getattr(module, name, None) if name else None
    if not isinstance(member, Callback):
        if not callable(member):
            own = [key for key, value in vars(module).items() if _is_callback(value, module)]
            raise SettingError(_no_callback(file, name, closest_match(name, own) or next(iter(own), "")))
        with task_loader.wrap_user_errors(f"{spec} failed", SettingError):
            member = member()
    if not isinstance(member, Callback):
        got = f"{spec} returned an object of class {type(member).__name__}"
        raise SettingError(Problem(got, "an object of a class derived from ff.Callback"))
    return member


def _no_callback(file: str, name: str, close: str) -> Problem:
    got = f"{file} has no {name}" if name else f"{file} without a name"
    return Problem(got, "FILE.py:name of a callback", f"{CALLBACK_WORD}={file}:{close}" if close else "")


def _is_callback(value: Any, module: Any) -> bool:
    """Whether a value of a module is a callback, or a class of them that the module defines."""
    if isinstance(value, type):
        return issubclass(value, Callback) and value.__module__ == module.__name__
    return isinstance(value, Callback)
