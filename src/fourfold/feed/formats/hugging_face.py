"""Data sets that Hugging Face's `datasets` has saved: a folder of Arrow files, named by `state.json`.

Law: the files are those that the state names, in its order, and they are in the folder. `datasets` is not needed.

Source: datasets 5.2.0, Dataset.save_to_disk, which writes rows in their order, without an index of rows.
"""

import json
from pathlib import Path
from typing import Any

from fourfold.feed.formats.positioned import file_size
from fourfold.words.errors import DataError, Problem

STATE_FILE, SPLITS_FILE = "state.json", "dataset_dict.json"
MAX_STATE_BYTES = 2**26


def saved_files(folder: Path) -> list[str]:
    """The Arrow files of a saved data set. Raises DataError for a state that is damaged, or names other files."""
    names: list[Any] = [each.get("filename") for each in _entries(folder / STATE_FILE)]
    for name in names:
        if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\0" in name:
            problem = Problem(f"a file named {str(name)[:100]!r}", "a file of the folder")
            raise DataError(problem, where=str(folder / STATE_FILE))
    return [str(folder / name) for name in names]


def _entries(path: Path) -> list[dict[str, Any]]:
    size = file_size(str(path))
    if size > MAX_STATE_BYTES:
        raise DataError(Problem(f"{path} of {size} bytes", f"at most {MAX_STATE_BYTES}"), where=str(path))
    try:
        entries = json.loads(path.read_bytes())["_data_files"]
        if not isinstance(entries, list) or not entries or not all(isinstance(each, dict) for each in entries):
            raise ValueError("no list of files")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        got = f"{path}: {type(error).__name__}: {str(error)[:200]}"
        raise DataError(Problem(got, "the state of a data set that `datasets` has saved"), where=str(path)) from error
    return entries
