"""Tables of settings and of a plan's fields, as `--help` and the pages of docs have them."""

import re
from collections.abc import Mapping

from fourfold.cli.arguments import SETTINGS
from fourfold.plan.plan_fields import FIELD_RULES
from fourfold.words.field import Field, Setting, value_text

HELP_INDENT = " " * 13
LINK = re.compile(r"\[([^\[\]]++)\]\([^()]++\)")
SEE = re.compile(r" \(\[[^\[\]]++\]\([^()]++\)\)")  # a link between brackets


def help_table(settings: Mapping[str, Setting] = SETTINGS) -> str:
    """A line for each setting: its name, its meaning, its default."""
    width = max(map(len, settings))
    lines = [f"{name:<{width}}  {each.help} ({each.default_text})" for name, each in settings.items()]
    return "\n".join(HELP_INDENT + line for line in lines)


def plan_help_table() -> str:
    """The same of the fields of a plan."""
    width = max(map(len, FIELD_RULES))
    lines = [f"{name:<{width}}  {_plain(each.help)} ({_default(each)})" for name, each in FIELD_RULES.items()]
    return "\n".join(HELP_INDENT + line for line in lines)


def markdown_table(settings: Mapping[str, Setting] = SETTINGS) -> str:
    """The settings as a table in Markdown."""
    rows = [f"| `{name}` | {each.help} | {each.default_text} |" for name, each in settings.items()]
    return "\n".join(["| setting | meaning | default |", "|---|---|---|", *rows])


def plan_markdown_table() -> str:
    """The fields of a plan as a table in Markdown."""
    rows = [f"| `{name}` | {_default(each)} | {_values(each)} | {each.help} |" for name, each in FIELD_RULES.items()]
    return "\n".join(["| field | default | values | meaning |", "|---|---|---|---|", *rows])


def _plain(help_text: str) -> str:
    return LINK.sub(r"\1", SEE.sub("", help_text)).replace("`", "")


def _default(field: Field) -> str:
    return value_text(field.default) or "none"


def _values(field: Field) -> str:
    if field.type is int and not field.choices:
        return f"≥ {field.minimum:g}" + (", or none" if field.is_optional else "")
    return ", ".join(f"`{each}`" for each in field.offered) or field.requirement()
