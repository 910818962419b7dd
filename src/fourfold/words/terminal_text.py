"""Terminal text: text from data, files or users, made safe to print.

Law: escaped text cannot control a terminal, and escaping twice is the same as escaping once.
"""

import unicodedata

ALLOWED_CONTROLS = "\n\t"


def escape_controls(text: str) -> str:
    r"""The text with its control characters written out: "\x1b[31m", "\u202e". Newlines and tabs stay.

    Escapes C0 and C1 controls, DEL, bidirectional and other format controls, line separators, surrogates, and
    unassigned code points: they could colour, clear or reorder what a terminal shows.
    """
    if text.isprintable():
        return text
    return "".join(char if _is_safe(char) else char.encode("unicode_escape").decode() for char in text)


def _is_safe(char: str) -> bool:
    # Category Zs: spaces such as U+00A0, which isprintable() refuses.
    return char.isprintable() or char in ALLOWED_CONTROLS or unicodedata.category(char) == "Zs"
