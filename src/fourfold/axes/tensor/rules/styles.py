"""Tensor rules: texts that say how the tensor axis splits a layer, such as `column(heads, kv_heads, kv_heads)`.

pattern    of the names of modules; `*` stands for one name between dots: `blocks.*.mlp.up`
style      what happens to the layer: one of Style
count      what is split as a unit, such as heads: the name of an integer attribute of the module that contains the
           layer or of its nearest ancestor that has it, or `heads=8` where no module has it. Several: the layer is
           fused, each part as large as its count
share      after a semicolon: another attribute that is divided by tp, such as `split_size`
quotient   after a semicolon: an attribute that is one count by another, such as `groups=heads/kv_heads`
named dims in place of a style, a name for each dim of the weight: `mlp, model`. A dim may have the brackets of a style,
           and the mark `:tp`: it is split unless the plan says which dims are. See `axes/tensor/rules/dims.py`
Law: a rule is read without a model; what it refers to is looked up by `axes/tensor/rules/layout.py`.

    column     the weight's output dim and the bias are split
    row        the weight's input dim is split; the bias stays whole
    vocabulary rows of an embedding or of a linear head; any number of them
    channels   a layer that computes each group of channels by itself, such as GroupNorm: each place has some groups
    replicated whole; its gradient is summed over the tensor axis
"""

import enum
import re
from collections.abc import Mapping
from typing import NamedTuple

from fourfold.plan.decode import DecodeError, from_toml
from fourfold.words.comma_lists import split_at_commas
from fourfold.words.errors import PlanError, Problem, closest_match


class Style(enum.StrEnum):
    """What the tensor axis does to a layer."""

    COLUMN = "column"
    ROW = "row"
    VOCABULARY = "vocabulary"
    CHANNELS = "channels"
    REPLICATED = "replicated"


# Words of other libraries for the same, too unlike ours to be found by their letters.
SYNONYMS = {"colwise": Style.COLUMN, "rowwise": Style.ROW, "embedding": Style.VOCABULARY, "replicate": Style.REPLICATED}
FUSED_STYLES = (Style.COLUMN, Style.ROW)
EXAMPLE_LINE = '"blocks.*.mlp.up" = "column"'

_RULE = re.compile(r"\s*+(?P<style>\w++)\s*+(?:\((?P<inside>[^()]*+)\))?+\s*+")
_COUNT = re.compile(r"(?P<name>[^\W\d]\w*)\s*(?:=\s*(?P<value>[0-9]{1,18}))?")
_NUMBER = re.compile(r"[0-9]{1,18}")
_DIM = re.compile(r"\s*+(?P<name>[^\W\d]\w*+)\s*+(?:\((?P<inside>[^()]*+)\))?+\s*+(?P<mark>:\s*tp)?\s*+")
_QUOTIENT = re.compile(r"(?P<name>[^\W\d]\w*)\s*(?:=\s*(?P<dividend>[^\W\d]\w*)\s*/\s*(?P<divisor>[^\W\d]\w*))?")


class ModuleSpec(NamedTuple):
    """A module of a model, as far as rules see it.

    name        as `named_modules` has it; "" is the model itself
    kind        linear (weight [out, in]), conv1d (transformers' Conv1D, weight [in, out]), embedding, norm,
                convolution (weight [out, in, …]), transposed_convolution (weight [in, out, …]), group_norm,
                attention (nn.MultiheadAttention) or other
    parameters  the shapes of its own parameters, without those of its children, by their names in it
    counts      its attributes that are whole numbers
    class_name  for messages
    is_called   whether it has a forward: an nn.ModuleDict or nn.ModuleList has none
    """

    name: str
    kind: str
    parameters: Mapping[str, tuple[int, ...]]
    counts: Mapping[str, int]
    class_name: str = ""
    is_called: bool = True


class Count(NamedTuple):
    """A number of units, such as heads. `value` None: that of the attribute `name`."""

    name: str
    value: int | None = None


class Quotient(NamedTuple):
    """The attribute `name`, which is the count `dividend` by the count `divisor`."""

    name: str
    dividend: str
    divisor: str


class Rule(NamedTuple):
    """How a layer is split.

    counts     one for each fused part; empty: `num_parts` equal parts, without units
    shares     other attributes that are divided by tp
    quotients  other attributes that are one count by another
    """

    style: Style
    counts: tuple[Count, ...] = ()
    num_parts: int = 1
    shares: tuple[str, ...] = ()
    quotients: tuple[Quotient, ...] = ()


class NamedDim(NamedTuple):
    """A dim of a weight. `brackets`: how it is split, as a column layer; `is_marked`: unless the plan has others."""

    name: str
    brackets: Rule | None = None
    is_marked: bool = False


DimNames = tuple[NamedDim, ...]
"""A name for each dim of a weight, in the order of its shape."""


def parse_rule(text: str) -> Rule:
    """The rule that `text` means. Raises PlanError."""
    example = '"column", "column(heads)", "column(2)", "row" or "vocabulary"'
    found = _RULE.fullmatch(text) if isinstance(text, str) else None
    if found is None:
        raise PlanError(Problem(f"the rule {text!r}", f"a rule such as {example}"))
    style, inside = _style(found["style"]), found["inside"]
    if inside is None:
        return Rule(style)
    if style not in FUSED_STYLES:
        raise PlanError(Problem(f'the rule "{text.strip()}"', f"{style} without brackets", f'"{style}"'))
    rule = _with_brackets(style, inside)
    if rule is None:
        need = "in brackets the counts of its parts, or how many equal parts it has"
        attempt = f'"{style}(heads)", "{style}(heads=8)", "{style}(2)"; other attributes after a semicolon'
        raise PlanError(Problem(f'the rule "{text.strip()}"', need, attempt))
    return rule


def _style(word: str) -> Style:
    if word in tuple(Style):
        return Style(word)
    close = SYNONYMS.get(word) or closest_match(word, Style)
    raise PlanError(Problem(f'the style "{word}"', f"a style: {_listing(Style)}", f'"{close}"' if close else ""))


def _listing(words: type[Style]) -> str:
    *first, last = words
    return f"{', '.join(first)} or {last}"


def _with_brackets(style: Style, inside: str) -> Rule | None:
    """The rule with this text in its brackets; None: it means nothing."""
    counted, semicolon, others = (part.strip() for part in inside.partition(";"))
    if semicolon and not others:
        return None
    if _NUMBER.fullmatch(counted) and not semicolon:
        return Rule(style, num_parts=int(counted)) if int(counted) > 0 else None
    counts = [_COUNT.fullmatch(item.strip()) for item in counted.split(",")]
    quotients = [_QUOTIENT.fullmatch(item.strip()) for item in others.split(",")] if others else []
    read_counts = tuple(Count(c["name"], int(c["value"]) if c["value"] else None) for c in counts if c)
    if None in counts or None in quotients or any(count.value == 0 for count in read_counts):
        return None
    return Rule(
        style,
        read_counts,
        shares=tuple(q["name"] for q in quotients if q and not q["dividend"]),
        quotients=tuple(Quotient(**q.groupdict()) for q in quotients if q and q["dividend"]),
    )


def has_named_dims(text: str) -> bool:
    """Whether the text names the dims of a weight, and no style."""
    return isinstance(text, str) and text.count("(") == text.count(")") and len(split_at_commas(text, "()")) > 1


def parse_dims(text: str) -> DimNames:
    """The dims that `text` names. Raises PlanError."""
    found = [_DIM.fullmatch(part) for part in split_at_commas(text, "()")]
    dims = tuple(
        NamedDim(each["name"], _with_brackets(Style.COLUMN, each["inside"] or ""), bool(each["mark"]))
        for each in found
        if each
    )
    is_read = all(each and (each["inside"] is None or _with_brackets(Style.COLUMN, each["inside"])) for each in found)
    if not is_read or any(dim.name in (*Style, *SYNONYMS) for dim in dims):
        need = "a name for each dim of the weight, with the parts of a fused dim in brackets"
        attempt = '"mlp, model" or "heads(heads, kv_heads, kv_heads), model"'
        raise PlanError(Problem(f'the dims "{text.strip()}"', need, attempt))
    return dims


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern matches the name of a module."""
    wanted, given = pattern.split("."), name.split(".")
    return len(wanted) == len(given) and all(w in ("*", g) for w, g in zip(wanted, given, strict=True))


def parse_rules(rules: Mapping[str, str]) -> tuple[dict[str, Rule | DimNames], list[Problem]]:
    """The rules by pattern, and what is wrong with the others."""
    parsed, problems = {}, []
    for pattern, text in rules.items():
        try:
            parsed[pattern] = parse_dims(text) if has_named_dims(text) else parse_rule(text)
        except PlanError as error:
            problems += (problem._replace(got=f'"{pattern}": {problem.got}') for problem in error.problems)
    return parsed, problems


def read_rules(text: str, *, where: str = "") -> dict[str, str]:
    """The rules in the text of a TOML file: `"blocks.*.mlp.up" = "column"`, one a line.

    where  the name of the file, for messages
    Raises PlanError, all problems at once.
    """
    try:
        table = from_toml(text)
    except DecodeError as error:
        need, attempt = "TOML, one rule a line, its pattern in quotes", EXAMPLE_LINE
        raise PlanError(Problem(str(error), need, attempt), where=where) from None
    if problems := table_problems(table):
        raise PlanError(problems, where=where)
    return table


def table_problems(table: Mapping[str, object]) -> list[Problem]:
    """What is wrong with rules that a TOML file has, whatever the model is."""
    problems = [_value_problem(pattern, value) for pattern, value in table.items() if not isinstance(value, str)]
    problems += parse_rules({pattern: value for pattern, value in table.items() if isinstance(value, str)})[1]
    if not table:
        problems.append(Problem("no rules", "patterns of module names, each with a rule", EXAMPLE_LINE))
    return problems


def _value_problem(pattern: str, value: object) -> Problem:
    """What is wrong with a value of a rules file that is no text."""
    if not isinstance(value, dict):
        return Problem(f'"{pattern}" = {value!r}', "a rule as text", f'"{pattern}" = "column"')
    # Without quotes, TOML reads the dots of `blocks.0.mlp.up` as tables within tables.
    names = [pattern]
    while isinstance(value, dict) and value:
        name, value = next(iter(value.items()))
        names.append(name)
    return Problem(f"a table, {pattern}", "no tables; a pattern with dots in quotes", f'"{".".join(names)}" = "column"')
