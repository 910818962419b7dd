"""Optional libraries: what a logger writes with, and what is said where it is not installed."""

import importlib.util

from fourfold.words.errors import Problem, SettingError


def check_installed(module: str, package: str, *, callback: str) -> None:
    """Raise SettingError, with the line that installs it, if a library is missing. Imports nothing."""
    if importlib.util.find_spec(module) is None:
        need = f"the package {package}"
        raise SettingError(
            Problem(f"{callback}, and {package} is not installed", need, f"pip install {package}"), where="callbacks"
        )
