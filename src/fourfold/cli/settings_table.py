"""Tables of settings and of a plan's fields, as `--help` and the pages of docs have them."""

import re
from collections.abc import Mapping

from fourfold.cli.arguments import SETTINGS
from fourfold.plan.plan_fields import PLAN_FIELDS
from fourfold.words.field import Field, Setting, value_text

TRAIN_INDENT, SHOW_INDENT = " " * 13, "  "
LINK = re.compile(r"\[([^\[\]]++)\]\([^()]++\)")
SEE = re.compile(r" \(\[[^\[\]]++\]\([^()]++\)\)")  # a link between brackets


def help_table(settings: Mapping[str, Setting] = SETTINGS) -> str:
    """A line for each setting: its name, its meaning, its default."""
    return _lines({name: (each.help, each.default_text) for name, each in settings.items()}, TRAIN_INDENT)


def plan_help_table() -> str:
    """The same of the fields of a plan."""
    return _lines({name: (_plain(each.help), _default(each)) for name, each in PLAN_FIELDS.items()}, SHOW_INDENT)


def _lines(rows: Mapping[str, tuple[str, str]], indent: str) -> str:
    """`rows`: meaning and default, by name."""
    width = max(map(len, rows))
    return "\n".join(f"{indent}{name:<{width}}  {meaning} ({default})" for name, (meaning, default) in rows.items())


def markdown_table(settings: Mapping[str, Setting] = SETTINGS) -> str:
    """The settings as a table in Markdown."""
    rows = [f"| `{name}` | {each.help} | {each.default_text} |" for name, each in settings.items()]
    return "\n".join(["| setting | meaning | default |", "|---|---|---|", *rows])


def plan_markdown_table() -> str:
    """The fields of a plan as a table in Markdown."""
    rows = [f"| `{name}` | {_default(each)} | {_values(each)} | {each.help} |" for name, each in PLAN_FIELDS.items()]
    return "\n".join(["| field | default | values | meaning |", "|---|---|---|---|", *rows])


def _plain(help_text: str) -> str:
    return LINK.sub(r"\1", SEE.sub("", help_text)).replace("`", "")


def _default(field: Field) -> str:
    return value_text(field.default) or "none"


def _values(field: Field) -> str:
    if field.type is int and not field.choices:
        return f"≥ {field.minimum:g}" + (", or none" if field.is_optional else "")
    return ", ".join(f"`{each}`" for each in field.offered) or field.requirement()
