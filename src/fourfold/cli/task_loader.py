"""Task loader: finds a task by its name: a built-in one, one in a file of the user's, or a model of transformers.

factory  a Task, or a function that returns one from keyword arguments
Law: an error in the user's file is reported with its own traceback, cut to the user's lines.
"""

import ast
import functools
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from fourfold.cli.arguments import argument_type, argument_types
from fourfold.cli.errors import is_file, nearest_file
from fourfold.environment.python_source import read_source
from fourfold.launcher.traceback_text import format_error
from fourfold.trainer.run_identity import HF_PREFIX
from fourfold.words.error_notes import describe_function, noting
from fourfold.words.errors import DataError, FourfoldError, Problem, TaskError, closest_match
from fourfold.words.field import Field
from fourfold.words.task import Task

if TYPE_CHECKING:
    from fourfold.feed.data_input import TaskInputs

BUILT_IN = {"lm": "fourfold.tasks.lm", "digits": "fourfold.tasks.digits"}
HF_MODULE = "fourfold.tasks.hf"
DEFAULT_NAME = "task"
VARIADIC = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD

TaskFactory = Task | Callable[..., Task]
_imported: dict[tuple[Path, int, int], Any] = {}
"""The modules imported from files, by path, time of the last change and size."""


def find_task(spec: str) -> TaskFactory:
    """The task named by `lm`, `digits`, `hf:CONFIG.json`, `path/to/file.py` or `path/to/file.py:name`.

    Raises TaskError.
    """
    check_task_file(spec)
    if spec in BUILT_IN:
        return importlib.import_module(BUILT_IN[spec]).task
    if spec.startswith(HF_PREFIX):
        return functools.partial(importlib.import_module(HF_MODULE).task, spec.removeprefix(HF_PREFIX))
    file, _, name = spec.partition(":")
    return _find_member(import_file(Path(file)), name or DEFAULT_NAME, file=file)


def check_task_file(spec: str) -> None:
    """Raise TaskError for a task that is neither built in nor in a file that is there. Imports nothing."""
    if spec in BUILT_IN:
        return
    if spec.startswith(HF_PREFIX):
        _check_config(spec.removeprefix(HF_PREFIX))
        return
    file = spec.partition(":")[0]
    if not file.endswith(".py"):
        raise TaskError(_unknown_task(spec))
    check_python_file(file, TaskError, "a Python file with a task")


def is_script(word: str) -> bool:
    """Whether a word names a Python file that is a program, not a task: it has no `task`, and makes no Task."""
    file = Path(word)
    return (
        file.suffix == ".py" and is_file(file) and not re.search(r"\b(task|Task)\b", file.read_text("utf-8", "replace"))
    )


def check_python_file(file: str, kind: type[FourfoldError], need: str) -> None:
    """Raise an error for a file that is not there."""
    if not is_file(Path(file)):
        raise kind(Problem(f"{file} (no such file)", need, nearest_file(Path(file), "*.py")))


def _check_config(config: str) -> None:
    path = Path(config)
    if not is_file(path):
        close = str(path / "config.json") if is_file(path / "config.json") else nearest_file(path, "*.json")
        got = f"{config or '(nothing)'} (no such file)"
        raise TaskError(Problem(got, "a config file of transformers", f"{HF_PREFIX}{close}" if close else ""))


def task_arguments(factory: TaskFactory) -> dict[str, Field]:
    """The keyword arguments that a user may give."""
    return {} if isinstance(factory, Task) else argument_types(factory)


# ---- the arguments of a task that is not imported --------------------------------------------------------------------


ANY_TEXT = Field(type=str, is_optional=True)
ANNOTATIONS = {"int": int, "float": float, "str": str, "bool": bool, "tuple": tuple}


def arguments_in_source(spec: str) -> dict[str, Field] | None:
    """What `task_arguments` will say, read from the source of the task, which is not run.

    None where only an import can tell: the name is bound more than once, decorated, or no plain function or Task. An
    argument whose default or annotation cannot be read may be any text. Raises TaskError for a file that is not there,
    and for a name that nothing in the file gives a value.
    """
    check_task_file(spec)
    file, _, name = spec.partition(":")
    module = HF_MODULE if spec.startswith(HF_PREFIX) else BUILT_IN.get(spec)
    if module is not None:
        source, name = importlib.util.find_spec(module), DEFAULT_NAME
        file = source.origin if source is not None and source.origin is not None else ""
    name, read = name or DEFAULT_NAME, read_source(Path(file))
    if read is None:
        return None
    if read.lacks(name):
        raise _no_task(f"no {name}", name, _tasks_in_source(read.body), file=file)
    bound = read.bindings(name)
    if len(bound) != 1:
        return None
    match bound[0]:
        case ast.FunctionDef(args=given, decorator_list=[]):
            return _arguments_of(given)
        case ast.Assign() as assigned if _makes_task(assigned):
            return {}
    return None


def _makes_task(node: ast.Assign) -> bool:
    match node.value:
        case ast.Call(func=ast.Name(id="Task") | ast.Attribute(attr="Task")):
            return True
    return False


def _tasks_in_source(body: Sequence[ast.stmt]) -> list[str]:
    """The names of tasks, then of functions that need no argument."""
    assigned = [node.targets[0] for node in body if isinstance(node, ast.Assign) and _makes_task(node)]
    functions = [node for node in body if isinstance(node, ast.FunctionDef)]
    return [each.id for each in assigned if isinstance(each, ast.Name)] + [
        each.name for each in functions if len(_arguments_of(each.args)) == len(_named(each.args))
    ]


def _named(given: ast.arguments) -> list[ast.arg]:
    return [*given.posonlyargs, *given.args, *given.kwonlyargs]


def _arguments_of(given: ast.arguments) -> dict[str, Field]:
    """By name, those that have a default: an argument without one is an error of the task, which the import reports."""
    positional = [*given.posonlyargs, *given.args]
    missing = [None] * (len(positional) - len(given.defaults))
    pairs = zip([*positional, *given.kwonlyargs], [*missing, *given.defaults, *given.kw_defaults], strict=True)
    return {each.arg: _argument_in_source(each.annotation, default) for each, default in pairs if default is not None}


def _argument_in_source(annotation: ast.expr | None, default: ast.expr) -> Field:
    try:
        members = [] if annotation is None else _annotated_types(annotation)
        return argument_type(ast.literal_eval(default), members)
    except (ValueError, TypeError, SyntaxError):
        return ANY_TEXT


def _annotated_types(node: ast.expr) -> list[Any]:
    """The types that an annotation allows. Raises ValueError where it is more than builtin types."""
    match node:
        case ast.Name(id=name) if name in ANNOTATIONS:
            return [ANNOTATIONS[name]]
        case ast.Constant(value=None):
            return [type(None)]
        case ast.Subscript(value=value):
            return _annotated_types(value)
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return [*_annotated_types(left), *_annotated_types(right)]
        case ast.Constant(value=str(text)):
            return _annotated_types(ast.parse(text, mode="eval").body)
    raise ValueError(ast.dump(node))


def make_task(factory: TaskFactory, values: Mapping[str, Any], *, spec: str) -> Task:
    """The task with these arguments. Raises TaskError if its function fails or does not return a Task."""
    if isinstance(factory, Task):
        return factory
    with wrap_user_errors(f"{spec}: the task's function failed"), noting(f"  in {describe_function(factory)}"):
        task = factory(**values)
    if not isinstance(task, Task):
        raise TaskError(Problem(f"a {type(task).__name__}", "the task's function to return a Task"), where=spec)
    return task


def open_task_data(task: Task, *, spec: str) -> "TaskInputs":
    """The task's data. Raises DataError if it cannot be opened or is empty."""
    from fourfold.feed.data_input import open_data  # not on top: it imports torch, as this file does not

    cannot_open = wrap_user_errors(f"{spec}: the data cannot be opened", DataError)
    with cannot_open, noting(f"  in the task's data, {describe_function(task.data)}"):
        data = task.data()
    return open_data(data, where=spec)


def import_file(path: Path, *, reuse: bool = False) -> Any:
    """The module in a file. `reuse`: not imported again if it was imported here and has not changed since."""
    version = path.resolve(), path.stat().st_mtime_ns, path.stat().st_size
    if not reuse or version not in _imported:
        _imported[version] = _import(path)
    return _imported[version]


def _import(path: Path) -> Any:
    # As for a script, the file can import others in its folder. It gets its own name, unless another module has it.
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    name = path.stem if path.stem.isidentifier() and path.stem not in sys.modules else f"task_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    with wrap_user_errors(f"{path} does not import"):
        spec.loader.exec_module(module)
    return module


def _find_member(module: Any, name: str, *, file: str) -> TaskFactory:
    member: Any = getattr(module, name, None)
    if isinstance(member, Task) or (callable(member) and not isinstance(member, type)):
        return cast(TaskFactory, member)
    tasks = [key for key, value in vars(module).items() if isinstance(value, Task)]
    functions = [key for key, value in vars(module).items() if _may_make_task(value, module)]
    got = f"no {name}" if member is None else f"{name} is a {type(member).__name__}"
    raise _no_task(got, name, [*tasks, *functions], file=file)


def _may_make_task(value: Any, module: Any) -> bool:
    """Whether a value of a module is a function that the module defines, and that needs no argument."""
    if not callable(value) or isinstance(value, type) or getattr(value, "__module__", None) != module.__name__:
        return False
    parameters = inspect.signature(value).parameters.values()
    return not any(each.default is each.empty and each.kind not in VARIADIC for each in parameters)


def _no_task(got: str, name: str, choices: Sequence[str], *, file: str) -> TaskError:
    """The error of a file without a task of this name. `choices`: of which the most alike, else the first is tried."""
    close = closest_match(name, choices) or next(iter(choices), None)
    attempt = f"{file}:{close}" if close else f"{name} = fourfold.Task(…)"
    return TaskError(Problem(got, "a Task, or a function that returns one", attempt), where=file)


def _unknown_task(spec: str) -> Problem:
    if "=" in spec:
        close = "".join(spec.split())
        return Problem(repr(spec), "a setting as KEY=VALUE, without spaces", "" if close.startswith("=") else close)
    close = closest_match(spec, BUILT_IN)
    if close is None and Path(f"{spec}.py").is_file():
        close = f"{spec}.py"
    need = f"{', '.join(BUILT_IN)}, {HF_PREFIX}CONFIG.json, or path/to/file.py:name"
    if close is None and spec.endswith(".json"):
        close = f"{HF_PREFIX}{spec}"
    return Problem(f"a task called {spec!r}", need, close or "")


class wrap_user_errors:
    """Within: an exception of the user's code becomes an error with the user's lines of the traceback."""

    def __init__(self, what: str, kind: type[FourfoldError] = TaskError) -> None:
        self._text, self._error_type = what, kind

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type | None, error: BaseException | None, frames: Any) -> None:
        if isinstance(error, SystemExit):
            raise self._error_type(f"{self._text}: it calls sys.exit({error.code!r})") from None
        # Not only an Exception: pytest.importorskip raises a BaseException.
        if error is not None and not isinstance(error, FourfoldError | KeyboardInterrupt):
            raise self._error_type(f"{self._text}\n{format_error(error).rstrip()}") from None
