"""Text path: the file or folder of text that a setting names. Does not import torch."""

import os
from pathlib import Path

from fourfold.words.errors import DataError, Problem, closest_match, os_error_text


def resolve_text_path(path: str | os.PathLike[str]) -> Path:
    """The path. Raises DataError if no file or folder is there that this user may read."""
    if not str(path):
        got, attempt = "data= with nothing after it", "no data=, for Python's own source code"
        raise DataError(Problem(got, "a file or folder of text", attempt))
    try:
        root = Path(path).expanduser()
        is_there = root.exists()
    except (OSError, RuntimeError) as error:  # a name that is too long, or ~NAME of an unknown user
        got = f"{str(path)[:60]}: {os_error_text(error) if isinstance(error, OSError) else str(error)}"
        raise DataError(Problem(got, "a file or folder of text"), where="data") from None
    if not is_there:
        close = closest_match(root.name, _names(root.parent))
        attempt = str(root.parent / close) if close else "no data=, for Python's own source code"
        raise DataError(Problem(f"nothing at {root}", "a file or folder of text", attempt), where=f"data={path}")
    if not (root.is_file() or root.is_dir()):
        raise DataError(Problem(f"{root} is neither file nor folder", "text that can be mapped"), where=f"data={path}")
    if not os.access(root, os.R_OK):
        raise DataError(Problem(f"{root}: permission denied", "read permission", f"chmod u+r {root}"), where=str(path))
    return root


def _names(folder: Path) -> list[str]:
    try:
        return [path.name for path in folder.iterdir()]
    except OSError:
        return []
