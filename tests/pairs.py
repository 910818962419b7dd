"""All pairs: a few rows in which any two values that can go together do go together.

row    one value of each field
part   values of some fields
base   a legal row; a part is completed by putting it into a base and, if needed, changing one more field
Law: each pair of values is in a row, or no completion of it is legal. The rows are the same in every process.
"""

import itertools
import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

Choices = Mapping[str, Sequence[Any]]
Row = dict[str, Any]
Part = tuple[tuple[str, Any], ...]


class Cover(NamedTuple):
    """Rows that contain all wanted parts, and the parts that no legal row can contain."""

    rows: list[Row]
    impossible: list[Part]


def pairs(choices: Choices) -> list[Part]:
    """Any two values of two fields, in the order of the fields."""
    return [part for names in itertools.combinations(choices, 2) for part in parts(choices, names)]


def parts(choices: Choices, names: Sequence[str]) -> list[Part]:
    """Any values of these fields."""
    return [tuple(zip(names, each, strict=True)) for each in itertools.product(*(choices[name] for name in names))]


def pairs_in(row: Row) -> set[Part]:
    return set(itertools.combinations(row.items(), 2))


def cover(
    choices: Choices,
    is_legal: Callable[[Row], bool],
    bases: Sequence[Row],
    *,
    first: Iterable[Part] = (),
    never: Collection[Part] = (),
    seed: int = 0,
) -> Cover:
    """Legal rows with all of `first` and all pairs, each row with as many missing pairs as a greedy choice finds.

    Parts in `never` are not wanted.
    """
    draw = random.Random(seed)
    rows: list[Row] = []
    impossible: list[Part] = []
    missing = set(pairs(choices)).difference(never)
    for part in [*first, *pairs(choices)]:
        if any(row.items() >= set(part) for row in rows) if len(part) > 2 else part not in missing:
            continue
        row = completed(part, choices, is_legal, draw.sample(bases, len(bases)))
        if row is None:
            impossible.append(part)
            missing.discard(part)
            continue
        names = [name for name in choices if name not in dict(part)]
        for name in draw.sample(names, len(names)):
            row = _improved(row, name, choices, is_legal, missing)
        rows.append(row)
        missing -= pairs_in(row)
    return Cover(rows, impossible)


def grid(**choices: Sequence[Any]) -> list[Row]:
    """Rows with all pairs of values; every combination is legal."""
    plain = {name: values[0] for name, values in choices.items()}
    return cover(choices, lambda row: True, [plain]).rows


def completed(part: Part, choices: Choices, is_legal: Callable[[Row], bool], bases: Sequence[Row]) -> Row | None:
    """A legal row with these values, close to one of the bases."""
    completions = [base | dict(part) for base in bases]
    names = [name for name in choices if name not in dict(part)]
    changed = (row | {name: value} for row in completions for name in names for value in choices[name])
    return next(filter(is_legal, itertools.chain(completions, changed)), None)


def _improved(row: Row, name: str, choices: Choices, is_legal: Callable[[Row], bool], missing: set[Part]) -> Row:
    """The row with the value of this field that adds the most missing pairs."""
    others = [row | {name: value} for value in choices[name] if value != row[name]]
    gains = {id(each): len(missing & pairs_in(each)) for each in (row, *others)}
    better = [each for each in others if gains[id(each)] > gains[id(row)]]
    return next(filter(is_legal, sorted(better, key=lambda each: -gains[id(each)])), row)
