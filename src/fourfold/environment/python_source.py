"""Python source: the names to which a file of the user's gives a value, read without running it.

Law: a name is called missing only if nothing in the file can bind it; where an import alone can tell, it is not.
"""

import ast
import re
from pathlib import Path
from typing import NamedTuple

from fourfold.words.errors import closest_match

BINDS_BY_TEXT = re.compile(rb"\b(globals|locals|vars|exec|setattr|modules|__dict__|__getattr__)\b")


class PythonSource(NamedTuple):
    """A file's text and its statements."""

    text: bytes
    body: list[ast.stmt]

    def bindings(self, name: str) -> list[ast.stmt]:
        """The statements that may give this name a value."""
        return [node for node in self.body if _may_bind(node, name)]

    def lacks(self, name: str) -> bool:
        """Whether nothing gives this name a value."""
        return not self.bindings(name) and not BINDS_BY_TEXT.search(self.text)

    @property
    def names(self) -> list[str]:
        """What the file defines: functions and classes, then what it assigns."""
        defined = [each.name for each in self.body if isinstance(each, ast.FunctionDef | ast.ClassDef)]
        targets = [target for each in self.body if isinstance(each, ast.Assign) for target in each.targets]
        return defined + [each.id for each in targets if isinstance(each, ast.Name)]


def read_source(path: Path) -> PythonSource | None:
    """None: it cannot be read or parsed, which the import reports."""
    try:
        text = path.read_bytes()
        return PythonSource(text, ast.parse(text).body)
    except (OSError, SyntaxError, ValueError, RecursionError):
        return None


def closest_if_missing(path: Path, name: str) -> str | None:
    """None if the file may have this name; else the name that was most likely meant, or ""."""
    source = read_source(path)
    if source is None or not source.lacks(name):
        return None
    return closest_match(name, source.names) or ""


def _may_bind(node: ast.stmt, name: str) -> bool:
    """Whether a statement of a module may give this name a value."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return node.name == name
    return any(
        (isinstance(each, ast.Name) and each.id == name and not isinstance(each.ctx, ast.Load))
        or (isinstance(each, ast.FunctionDef | ast.ClassDef) and each.name == name)
        or (isinstance(each, ast.alias) and (each.asname or each.name) in (name, "*"))
        for each in ast.walk(node)
    )
