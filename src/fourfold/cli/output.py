"""Output: what a command prints.

Law: controls are escaped, and lines are wrapped to the terminal.
"""

from fourfold.words.terminal_text import escape_controls, wrap_lines


def print_text(text: str) -> None:
    """Print a text of a command. Raises OSError as `print` does."""
    print(wrap_lines(escape_controls(text)), flush=True)
