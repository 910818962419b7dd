"""The source files of Fourfold, parsed: what contracts on the code read."""

import ast
import functools
from pathlib import Path
from typing import TypeGuard

SOURCE = Path(__file__).parents[1] / "src" / "fourfold"
BENCH = SOURCE.parent / "fourfold_bench"


@functools.cache
def files(pattern: str = "**/*.py") -> list[Path]:
    """Those of `fourfold` that match, and all of `fourfold_bench` where nothing is said."""
    return sorted(SOURCE.glob(pattern)) + (sorted(BENCH.glob(pattern)) if pattern == "**/*.py" else [])


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(parsed(path)))


def forget() -> None:
    """After a file of contracts: parsed, the sources are a million objects, which every garbage collection visits."""
    parsed.cache_clear()
    nodes.cache_clear()


@functools.cache
def imports(path: Path) -> set[str]:
    """Every module that a file imports, anywhere in it."""
    modules: set[str] = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return modules


def file_name(path: Path) -> str:
    """Within `fourfold`: step/verbs.py; else whole: fourfold_bench/run.py."""
    return path.relative_to(SOURCE.parent).as_posix().removeprefix("fourfold/")


def module_name(path: Path) -> str:
    """The same with dots: step.verbs, fourfold_bench.run."""
    return file_name(path).removesuffix(".py").replace("/", ".").removesuffix("__init__").removesuffix(".")


def is_class(node: ast.AST) -> TypeGuard[ast.ClassDef]:
    return isinstance(node, ast.ClassDef)


def is_own(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")
