"""The table of settings, as `fourfold train --help` and docs/runs.md have it."""

from collections.abc import Mapping

from fourfold.cli.arguments import SETTINGS
from fourfold.trainer.settings import Setting

HELP_INDENT = " " * 13


def help_table(settings: Mapping[str, Setting] = SETTINGS) -> str:
    """A line for each setting: its name, its meaning, its default."""
    width = max(map(len, settings))
    lines = [f"{name:<{width}}  {each.help} ({each.default_text})" for name, each in settings.items()]
    return "\n".join(HELP_INDENT + line for line in lines)


def markdown_table(settings: Mapping[str, Setting] = SETTINGS) -> str:
    """The same as a table in Markdown."""
    rows = [f"| `{name}` | {each.help} | {each.default_text} |" for name, each in settings.items()]
    return "\n".join(["| setting | meaning | default |", "|---|---|---|", *rows])
