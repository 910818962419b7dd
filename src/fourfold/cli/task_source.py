"""Task source: what the file of a task says about it, read without running it.

Law: None where the file leaves room for doubt; what is returned is what `task_loader` will find.
"""

import ast
import importlib.util
from pathlib import Path

from fourfold.cli.task_loader import BUILT_IN, DEFAULT_NAME, HF_MODULE
from fourfold.trainer.run_identity import HF_PREFIX


def bound_names(file: Path) -> list[str] | None:
    """The names that a file binds anywhere, functions first; None if it may bind others too, or cannot be read."""
    try:
        nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
    except (OSError, ValueError, SyntaxError):
        return None
    names = [node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef)]
    names += [node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    imported = [each for node in nodes if isinstance(node, ast.Import | ast.ImportFrom) for each in node.names]
    names += [each.asname or each.name.partition(".")[0] for each in imported]
    used = {node.id for node in nodes if isinstance(node, ast.Name)}
    return None if {"*", "__getattr__"} & {*names} or {"globals", "exec", "setattr", "vars"} & used else names


def argument_names(spec: str) -> list[str] | None:
    """The keyword arguments of a task's function; None if it is not there yet, half written, decorated or made."""
    file, _, name = spec.partition(":")
    if spec.startswith(HF_PREFIX):
        file, name = HF_MODULE, ""
    module = BUILT_IN.get(file, file)
    if module in (HF_MODULE, *BUILT_IN.values()):
        found = importlib.util.find_spec(module)
        file = (found and found.origin) or ""
    name = name or DEFAULT_NAME
    if (bound_names(Path(file)) or []).count(name) != 1:
        return None
    match [node for node in _statements(Path(file)) if _bound_name(node) == name]:
        case [ast.FunctionDef(args=arguments, decorator_list=[])]:
            return [each.arg for each in (*arguments.args, *arguments.kwonlyargs)]
        case [ast.Assign(value=value)] if _is_task(value):
            return []
    return None


def task_names(file: Path) -> list[str]:
    """The names of what may be a task in a file: those that a Task is assigned to, and functions that make one."""
    nodes = [node for node in _statements(file) if any(map(_is_task, ast.walk(node))) and not _needs_argument(node)]
    return [name for node in nodes if (name := _bound_name(node))]


def is_script(word: str) -> bool:
    """Whether a word names a Python file that is a program, not a task."""
    file = Path(word)
    if file.suffix != ".py" or not file.is_file():
        return False
    try:
        return (
            DEFAULT_NAME not in top_names(file)
            and not task_names(file)
            and DEFAULT_NAME not in (bound_names(file) or ())
        )
    except (OSError, ValueError, SyntaxError):
        return False


def top_names(file: Path) -> list[str]:
    """The names of a file's functions, and those that it assigns to, outside of functions and classes."""
    return [name for node in _statements(file) if (name := _bound_name(node))]


def _needs_argument(node: ast.stmt) -> bool:
    match node:
        case ast.FunctionDef(args=ast.arguments() as given):
            return len(given.posonlyargs) + len(given.args) > len(given.defaults) or None in given.kw_defaults
    return False


def _statements(file: Path) -> list[ast.stmt]:
    return ast.parse(file.read_text(encoding="utf-8")).body


def _bound_name(node: ast.stmt) -> str | None:
    """The name that a function, or an assignment to one name, binds."""
    match node:
        case ast.FunctionDef(name=name) | ast.Assign(targets=[ast.Name(id=name)]):
            return name
    return None


def _is_task(node: ast.AST) -> bool:
    """Whether this is a call of Task, such as `ff.Task(…)`."""
    match node:
        case ast.Call(func=ast.Name(id="Task") | ast.Attribute(attr="Task")):
            return True
    return False
