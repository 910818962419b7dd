"""Lists in a text: entries between commas, some of which have brackets with commas of their own."""


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
