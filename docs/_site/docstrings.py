"""Docstrings: how mkdocstrings shows ours, which are plain text with aligned columns.

entry  a line `name  meaning`, separated by two or more spaces, and the indented lines that continue it
Law: every word of a docstring is shown; only its form changes. Entries become a list, other lines stay as they are.
"""

import re
from collections.abc import Iterator
from typing import Any

from griffe import Extension, Object

ENTRY = re.compile(r"^(?P<names>[\w*]+(?:, \w+)*) {2,}(?P<text>\S.*)$")


class AlignedDocstrings(Extension):
    """Turns the entries of every docstring into a Markdown list."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = "\n".join(_as_markdown(obj.docstring.value.splitlines()))


def _as_markdown(lines: list[str]) -> Iterator[str]:
    is_entry = False
    for line in lines:
        match = ENTRY.match(line)
        if match:
            if not is_entry:
                yield ""
            names = ", ".join(f"`{name}`" for name in match["names"].split(", "))
            yield f"- {names}: {match['text']}"
            is_entry = True
        elif is_entry and line.startswith(" "):
            yield f"  {line.strip()}"
        else:
            if is_entry and line:
                yield ""
            is_entry = False
            yield line
