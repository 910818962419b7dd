"""Text: what comes from data, files or users, made safe to print.

Law: escaped text cannot steer a terminal, and text that is escaped twice is the same as once.
"""

import unicodedata

ALLOWED_CONTROLS = "\n\t"


def escape_controls(text: str) -> str:
    r"""The text with its control characters written out: "\x1b[31m", "\u202e". Newlines and tabs stay.

    Escapes C0 and C1 controls, DEL, bidi and other format controls, line separators, surrogates, and code points
    without a character. They could colour, clear or reorder what a terminal shows.
    """
    if text.isprintable():
        return text
    return "".join(char if _is_safe(char) else char.encode("unicode_escape").decode() for char in text)


def _is_safe(char: str) -> bool:
    return (
        char.isprintable() or char in ALLOWED_CONTROLS or unicodedata.category(char) == "Zs"
    )  # a space, such as U+00A0
