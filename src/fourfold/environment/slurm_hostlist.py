"""Slurm host lists: the lists of nodes and task counts that Slurm writes, read without Slurm.

node list    "gpu[01-03,07],login": host names, with ranges in brackets
task counts  "2(x3),1": how many tasks each node has, in the order of the node list
Law: an invalid list raises ValueError; a long range costs nothing until its names are read.
"""

import itertools
import re
from collections.abc import Iterator

from fourfold.words.comma_lists import split_at_commas

_PART = re.compile(r"[^\[\],\s]+|\[[^\[\]]*\]")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def expand_nodelist(text: str) -> Iterator[str]:
    """The host names of a node list, in order: "n[08-10]" gives n08, n09, n10. Raises ValueError."""
    for entry in split_at_commas(text, "[]"):
        parts = _PART.findall(entry)
        if not parts or "".join(parts) != entry:
            raise ValueError(f"a node list {text!r}")
        yield from _expand_parts(parts, text)


def _expand_parts(parts: list[str], text: str) -> Iterator[str]:
    """Every name of an entry; the last bracket varies fastest."""
    if not parts:
        yield ""
        return
    first, remaining = parts[0], parts[1:]
    for head in _expand_bracket(first[1:-1], text) if first.startswith("[") else (first,):
        for tail in _expand_parts(remaining, text):
            yield head + tail


def _expand_bracket(inner: str, text: str) -> Iterator[str]:
    for part in inner.split(","):
        match = _RANGE.fullmatch(part)
        if not match:
            raise ValueError(f"a node list {text!r}")
        low, high = match[1], match[2] or match[1]
        if int(high) < int(low):
            raise ValueError(f"a node list {text!r}")
        for number in range(int(low), int(high) + 1):
            yield f"{number:0{len(low)}}"


def parse_task_counts(text: str) -> list[int]:
    """The number of tasks of each node: "2(x3),1" gives 2, 2, 2, 1. Raises ValueError."""
    matches = [_COUNT.fullmatch(part) for part in text.split(",")]
    if not all(matches):
        raise ValueError(f"counts {text!r}")
    repeated = (itertools.repeat(int(match[1]), int(match[2] or 1)) for match in matches if match)
    return list(itertools.chain.from_iterable(repeated))
