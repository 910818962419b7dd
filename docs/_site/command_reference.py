"""Command reference: the commands of `fourfold` with their options, written from the command-line parser.

Law: the page has the words of `fourfold COMMAND --help`; only their form changes.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MARK = "<!-- commands -->"
SOURCE = Path(__file__).parent.parent.parent / "src"
TABLE = "\b\n"  # in front of lines that the parser must not join
# The settings and the fields of a plan have tables of their own.
TABLES = ("; in brackets its default:\n{settings}", "; in brackets its default:\n\n\b\n{fields}")


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Put the commands where a page has the mark."""
    return markdown.replace(MARK, "\n".join(_all_commands())) if MARK in markdown else markdown


def _all_commands() -> Iterator[str]:
    sys.path.insert(0, str(SOURCE))
    import typer

    from fourfold.cli.commands import COMMANDS, app

    group: Any = typer.main.get_command(app)
    for name in COMMANDS:
        command = group.commands[name]
        yield from _describe(command, f"fourfold {name}")
        for subname, subcommand in getattr(command, "commands", {}).items():
            yield from _describe(subcommand, f"fourfold {name} {subname}")


def _describe(command: Any, name: str) -> Iterator[str]:
    import typer

    yield f"\n## {name}\n"
    if not hasattr(command, "commands"):
        usage = command.get_usage(typer.Context(command, info_name=name))
        yield f"```text\n{_plain_usage(usage)}\n```\n"
    text = command.help or ""
    for each in TABLES:
        text = text.replace(each, "")
    for paragraph in text.split("\n\n"):
        is_table = paragraph.startswith(TABLE)
        yield f"```text\n{paragraph.removeprefix(TABLE)}\n```\n" if is_table else f"{paragraph}\n"
    if rows := [row for row in map(_row, command.params) if row]:
        yield "\n".join(["| argument or option | |", "|---|---|", *rows, ""])


def _plain_usage(usage: str) -> str:
    """One line, without the brackets and dots that the parser puts around what the metavars say already."""
    line = " ".join(usage.removeprefix("Usage: ").removesuffix("...").split()).replace("[OPTIONS] ", "")
    return re.sub(r"\[\[(\w+)\]\]", r"[\1]", re.sub(r"\{(.+?)\}", r"\1", line))


def _row(parameter: Any) -> str:
    """A row of the table; empty for an argument that the help leaves out."""
    if not parameter.help:
        return ""
    is_argument = parameter.param_type_name == "argument"
    words = parameter.metavar if is_argument else " ".join([parameter.opts[-1], parameter.metavar or ""]).strip()
    default = f" Default: {parameter.default}." if parameter.default and parameter.show_default else ""
    return f"| `{words}` | {parameter.help}{default} |"
