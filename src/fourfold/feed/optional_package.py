"""Optional package: one that an extra of Fourfold installs, imported when it is needed."""

import importlib
from typing import Any

from fourfold.words.errors import DataError, Problem, first_line


def import_optional(module: str, need: str, extra: str, *, got: str = "", where: str = "") -> Any:
    """The module. Raises DataError, with `got` or what Python says, if its package is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        problem = Problem(got or first_line(error), need, f"pip install 'fourfold[{extra}]'")
        raise DataError(problem, where=where) from None
