"""All pairs: a few rows in which any two values that can go together do go together.

row    one value of each field
part   values of some fields
base   a row that is legal; a part is completed by putting it into a base, and changing one field more where it must be
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
    """Rows with all parts that were wanted, and the parts that are in none because no completion is legal."""

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
    """Legal rows with all of `first` and all pairs, each row with as many that are missing as a greedy choice finds.

    What is in `never` is not looked for.
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
            row = _bettered(row, name, choices, is_legal, missing)
        rows.append(row)
        missing -= pairs_in(row)
    return Cover(rows, impossible)


def grid(**choices: Sequence[Any]) -> list[Row]:
    """Rows with all pairs of values that all go together."""
    plain = {name: values[0] for name, values in choices.items()}
    return cover(choices, lambda row: True, [plain]).rows


def completed(part: Part, choices: Choices, is_legal: Callable[[Row], bool], bases: Sequence[Row]) -> Row | None:
    """A legal row with these values, near to one of the bases."""
    begun = [base | dict(part) for base in bases]
    names = [name for name in choices if name not in dict(part)]
    changed = (row | {name: value} for row in begun for name in names for value in choices[name])
    return next(filter(is_legal, itertools.chain(begun, changed)), None)


def _bettered(row: Row, name: str, choices: Choices, is_legal: Callable[[Row], bool], missing: set[Part]) -> Row:
    """The row with the value of this field that brings most of what is missing."""
    others = [row | {name: value} for value in choices[name] if value != row[name]]
    gains = {id(each): len(missing & pairs_in(each)) for each in (row, *others)}
    better = [each for each in others if gains[id(each)] > gains[id(row)]]
    return next(filter(is_legal, sorted(better, key=lambda each: -gains[id(each)])), row)
