"""Divisions: what the size of the tensor axis must divide, and the sizes that divide all of it.

replicated  a count smaller than tp: tp / count neighbouring places hold each unit. Allowed where a layer in the same
            module has more units, as queries have more heads than keys and values
Law: the sizes that a problem names work for every rule, if any does.
"""

import enum
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fourfold.plan.tensor_layers import LayerCount, TensorLayer
from fourfold.plan.tensor_rules import Style
from fourfold.words.errors import Problem

MAX_NAMED_SIZES = 6


class Mode(enum.Enum):
    """How a size may fit to tp."""

    DIVIDE = enum.auto()
    DIVIDE_OR_REPLICATE = enum.auto()
    UNEVEN = enum.auto()  # Any size of which each place gets some.


class Division(NamedTuple):
    """A size that is split, with the text and the need of its problem."""

    got: str
    need: str
    size: int
    mode: Mode

    def works(self, tp: int) -> bool:
        if self.mode is Mode.UNEVEN:
            return (tp - 1) * -(-self.size // tp) < self.size
        replicates = self.mode is Mode.DIVIDE_OR_REPLICATE and tp % self.size == 0
        return self.size % tp == 0 or replicates


def divisions_of(layers: Sequence[TensorLayer], *, complete: bool = True) -> list[Division]:
    """All that tp must divide, each once. Not `complete`: a layer with more units may be missing."""
    largest = _largest_counts(layers) if complete else None
    found = [division for layer in layers for division in _divisions(layer, largest)]
    return list(dict.fromkeys(found))


def division_problems(divisions: Sequence[Division], tp: int) -> list[Problem]:
    """What `tp` does not divide, with the sizes that would work."""
    fitting = _fitting_sizes(divisions, tp)
    problems = []
    for division in divisions:
        if division.works(tp):
            continue
        own = _fitting_sizes([division], tp)
        attempt = f"tp = {_alternatives(fitting)}" if fitting else "another size of the model"
        if not fitting and own:
            attempt = f"tp = {_alternatives(own)} (not for all rules), or another size of the model"
        problems.append(Problem(f"{division.got}, tp = {tp}", division.need, attempt))
    return problems


def _divisions(layer: TensorLayer, largest: Mapping[str, int] | None) -> list[Division]:
    style = layer.rule.style
    if style is Style.CHANNELS:
        got = f'"{layer.pattern}" has {layer.num_groups} groups of channels'
        return [Division(got, "groups divisible by tp", layer.num_groups, Mode.DIVIDE)]
    length = layer.length if style is not Style.REPLICATED else 0
    shares = [_division(share, replicates=False) for share in layer.shares]
    has = f'"{layer.pattern}" has {length} {layer.length_name}'
    if style is Style.REPLICATED:
        return shares
    if style is Style.VOCABULARY:
        return [Division(has, "rows for each place", length, Mode.UNEVEN)]
    if layer.counts:
        counts = [
            _division(c, replicates=style is Style.COLUMN and _is_exceeded(c, layer, largest)) for c in layer.counts
        ]
        return counts + shares
    if layer.rule.num_parts == 1:
        return [Division(has, f"{layer.length_name} divisible by tp", length, Mode.DIVIDE)]
    part = length // layer.rule.num_parts
    got = f'"{layer.pattern}" has {layer.rule.num_parts} parts of {part} {layer.length_name}'
    return [Division(got, "parts divisible by tp", part, Mode.DIVIDE)]


def _division(count: LayerCount, *, replicates: bool) -> Division:
    if not replicates:
        return Division(f"{count.name} = {count.value}", f"{count.name} divisible by tp", count.value, Mode.DIVIDE)
    need = f"{count.name} divisible by tp, or tp divisible by {count.name}"
    return Division(f"{count.name} = {count.value}", need, count.value, Mode.DIVIDE_OR_REPLICATE)


def _largest_counts(layers: Sequence[TensorLayer]) -> dict[str, int]:
    """By module: the largest count of the layers in it, or of its attributes."""
    largest: dict[str, int] = {}
    for layer in layers:
        for count in layer.counts:
            for module in (layer.container, count.owner):
                largest[module] = max(largest.get(module, 0), count.value)
    return largest


def _is_exceeded(count: LayerCount, layer: TensorLayer, largest: Mapping[str, int] | None) -> bool:
    """Whether a layer in the same module, or a count of the same module, has more units. `largest` None: not known."""
    return largest is None or any(largest[module] > count.value for module in (layer.container, count.owner))


def _fitting_sizes(divisions: Sequence[Division], tp: int) -> list[int]:
    """The sizes above 1 that work for all, those nearest to `tp`."""
    sizes = [size for size in range(2, max(2 * tp, 16) + 1) if all(each.works(size) for each in divisions)]
    return sorted(sorted(sizes, key=lambda size: abs(size - tp))[:MAX_NAMED_SIZES])


def _alternatives(sizes: Sequence[int]) -> str:
    *others, last = map(str, sizes)
    return f"{', '.join(others)} or {last}" if others else last
