"""Lists in a text: entries between commas, some of which have brackets with commas of their own."""

from collections.abc import Iterable

MAX_LIST = 300  # characters of a list in a message


def comma_list(entries: Iterable[object]) -> str:
    """The entries between commas, such as the columns of a table; of many the first ones."""
    text = ", ".join(map(str, entries))
    return text if len(text) <= MAX_LIST else f"{text[:MAX_LIST]} …"


def split_at_commas(text: str, brackets: str) -> list[str]:
    """The entries of a text, split at the commas outside `brackets`, such as "()"."""
    opening, closing = brackets
    entries, depth, start = [], 0, 0
    for index, char in enumerate(text):
        depth += (char == opening) - (char == closing)
        if char == "," and not depth:
            entries.append(text[start:index])
            start = index + 1
    return [*entries, text[start:]]
