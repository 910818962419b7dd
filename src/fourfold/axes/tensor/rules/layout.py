"""The tensor layout of a model: which part of each parameter a place of the tensor axis holds, by its tensor rules.

unit   what is split as a whole, such as the rows of one head; without counts, a row
local  of a count: how many of its units a place has; 1 where a unit is held by several
replicated  a count smaller than tp: tp / count neighbouring places hold each unit. Allowed where a layer in the same
            module has more units, as queries have more heads than keys and values
Law: the pieces of all places tile each parameter, and the local counts are those of the local tensors.
Law: the sizes that a problem names work for every rule, if any does.
"""

import enum
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from fourfold.axes.tensor.rules.dims import dims_of_rules
from fourfold.axes.tensor.rules.layers import (
    CONVOLUTIONS,
    LayerCount,
    TensorLayer,
    find_owner,
    generalized,
    parent_name,
    resolve_layers,
)
from fourfold.axes.tensor.rules.styles import ModuleSpec, Quotient, Style
from fourfold.plan.param_spec import ShardPiece, TensorShard
from fourfold.words.errors import PlanError, Problem

# ---- divisions -----------------------------------------------------------------------------------------------------

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


# ---- the tensor layout of a model ----------------------------------------------------------------------------------


# Transformers' attention repeats each head of keys and values so often: heads / heads of keys and values.
GROUPS_ATTRIBUTE = "num_key_value_groups"

Shards = tuple[TensorShard, ...]


class TensorLayout(NamedTuple):
    """What the places of the tensor axis hold.

    shards  by parameter, under every name that it has: the shard of each place
    styles  by module: the style of its rule; modules without a rule are absent
    counts  by module: the local values of its attributes that count what is split, the same on all places
    """

    shards: Mapping[str, Shards]
    styles: Mapping[str, Style]
    counts: Mapping[str, Mapping[str, int]]


def tensor_layout(
    modules: Sequence[ModuleSpec],
    tied: Mapping[str, str],
    rules: Mapping[str, str],
    tp: int,
    dims: str = "",
    ulysses: int = 1,
) -> TensorLayout:
    """What each of `tp` places holds of each parameter.

    modules  all modules of the model, each once
    tied     the other names of parameters that have several: the name -> the first one
    rules    pattern of module names -> the text of a rule
    dims     the plan's field: which of the dims that rules name are split; empty: those that they mark
    ulysses  among so many ranks of the context axis the local heads are divided again
    Raises PlanError, all problems at once.
    """
    layers, problems = resolve_layers(modules, rules, dims)
    problems += division_problems(divisions_of(layers, complete=not problems), tp)
    problems += _tied_problems(modules, tied, layers)
    counts: dict[str, dict[str, int]] = {}
    if not problems:  # A count that has a problem would be missing to others.
        counts, problems = _local_counts(layers, modules, tp)
    if not problems and tp > 1 and all(layer.rule.style is Style.REPLICATED for layer in layers):
        problems.append(_nothing_split(rules, tp))
    problems += _ulysses_problems(counts, tp, ulysses) if tp > 1 else []
    if problems:
        raise PlanError(list(dict.fromkeys(problems)), where="the tensor rules")
    styles = {layer.module.name: layer.rule.style for layer in layers}
    return TensorLayout(_with_tied(_shards(modules, layers, tp), tied), styles, counts)


def _ulysses_problems(counts: Mapping[str, Mapping[str, int]], tp: int, ulysses: int) -> list[Problem]:
    """Heads that a tensor rank has, and that `ulysses` does not divide."""
    heads = {name: value for local in counts.values() for name, value in local.items() if name.endswith("heads")}
    if all(value % ulysses == 0 for value in heads.values()):
        return []
    common = math.gcd(*heads.values())
    fitting = " or ".join(str(size) for size in range(1, common + 1) if common % size == 0)
    held = ", ".join(f"{value} {name}" for name, value in heads.items())
    got = f"ulysses = {ulysses}, tp = {tp}, and a tensor rank has {held}"
    return [Problem(got, "each divisible by ulysses", f"ulysses = {fitting}")]


def _nothing_split(rules: Mapping[str, str], tp: int) -> Problem:
    """No rule splits a layer."""
    got = f"tp = {tp}, and no rule splits a layer"
    if names := dims_of_rules(rules):
        return Problem(got, f"one of the dims {', '.join(names)} on tp", f'dims = "{names[0]}:tp"')
    example = 'tensor={"*.mlp.up": "column", "*.mlp.down": "row"}, or tensor=FILE.toml on the command line'
    return Problem(got, "rules for the layers to split", example)


# ---- shards ----------------------------------------------------------------------------------------


def _shards(modules: Sequence[ModuleSpec], layers: Sequence[TensorLayer], tp: int) -> dict[str, Shards]:
    """The shards of each module's own parameters, by its own rule."""
    by_module = {layer.module.name: layer for layer in layers}
    shards = {}
    for module in modules:
        layer = by_module.get(module.name)
        for own_name, shape in module.parameters.items():
            split = _split(layer, own_name) if layer else None
            shards[param_name(module, own_name)] = tuple(_shard(split, shape, index, tp) for index in range(tp))
    return shards


def param_name(module: ModuleSpec, own_name: str) -> str:
    """The name of a parameter in the model."""
    return f"{module.name}.{own_name}" if module.name else own_name


class _Split(NamedTuple):
    """How a parameter is split: `parts` of its dim, each of so many units; None: evenly, of any size."""

    dim: int
    parts: tuple[int, ...] | None


def _split(layer: TensorLayer, own_name: str) -> _Split | None:
    """How a parameter of a layer is split; None: it is whole."""
    style, num_parts = layer.rule.style, layer.rule.num_parts
    if style is Style.REPLICATED or (style is Style.ROW and own_name == "bias"):
        return None
    if style is Style.CHANNELS:
        return _Split(0, (layer.num_groups,))
    dim = layer.dim if own_name == "weight" else 0
    if style is Style.VOCABULARY:
        return _Split(dim, None)
    counts = tuple(count.value for count in layer.counts)
    return _Split(dim, counts or (layer.length // num_parts,) * num_parts)


def _shard(split: _Split | None, shape: tuple[int, ...], index: int, tp: int) -> TensorShard:
    if split is None:
        return TensorShard.whole(shape, index, tp)
    if split.parts is None:
        return TensorShard.even(shape, split.dim, index, tp)
    unit = shape[split.dim] // sum(split.parts)
    return TensorShard(shape, split.dim, _pieces(split.parts, unit, index, tp))


def _pieces(parts: Sequence[int], unit: int, index: int, tp: int) -> tuple[ShardPiece, ...]:
    """The pieces of place `index`: from each part its share of the units, which have `unit` elements each."""
    pieces: list[ShardPiece] = []
    begin = 0
    for count in parts:
        sharing = max(tp // count, 1)
        local = _local(count, tp)
        start = begin + index * count // tp * unit
        piece = ShardPiece(start, start + local * unit, index % sharing, sharing)
        if pieces and pieces[-1].stop == piece.start and pieces[-1][2:] == piece[2:]:
            pieces[-1] = pieces[-1]._replace(stop=piece.stop)
        else:
            pieces.append(piece)
        begin += count * unit
    return tuple(pieces)


def _local(count: int, tp: int) -> int:
    """How many of `count` units a place has."""
    return max(count // tp, 1)


# ---- parameters with several names -----------------------------------------------------------------


def _tied_problems(
    modules: Sequence[ModuleSpec], tied: Mapping[str, str], layers: Sequence[TensorLayer]
) -> Iterable[Problem]:
    """Parameters that are split in one way under one name, and in another under another."""
    by_module = {layer.module.name: layer for layer in layers}
    known = {module.name for module in modules}
    for name, first in tied.items():
        owners = parent_name(first), parent_name(name)
        if not known.issuperset(owners):  # A second name of a module, not of a parameter.
            continue
        ruled = [by_module.get(owner) for owner in owners]
        one, other = (
            _split(layer, each.rpartition(".")[2]) if layer else None
            for layer, each in zip(ruled, (first, name), strict=True)
        )
        # A container that lends its layer's parameter a second name, as BERT's head its bias, does not use it itself.
        lends = any(a not in by_module and f"{b}.".startswith(f"{a}." if a else "") for a, b in _both(*owners))
        if one == other or (lends and None in (one, other)):
            continue
        is_ruled = [f'is "{layer.rule.style}"' if layer else "has no rule" for layer in ruled]
        said = f"{owners[0]} {is_ruled[0]}, {owners[1]} {is_ruled[1]}"
        attempt = f'"{Style.VOCABULARY}" for both, or no rule for both'
        yield Problem(f"{first} and {name} are one parameter; {said}", "the same split under both names", attempt)


def _both(one: str, other: str) -> tuple[tuple[str, str], tuple[str, str]]:
    return (one, other), (other, one)


def _with_tied(shards: Mapping[str, Shards], tied: Mapping[str, str]) -> dict[str, Shards]:
    """The shards under all names of the parameters."""
    result = dict(shards)
    for name, first in tied.items():
        either = [result[each] for each in (first, name) if each in result]
        # Where they differ, the whole one is the second name that a container has for the split one.
        result[first] = next((each for each in either if not each[0].is_whole), either[0])
    return result | {name: result[first] for name, first in tied.items()}


# ---- counts ----------------------------------------------------------------------------------------


def _local_counts(
    layers: Sequence[TensorLayer], modules: Sequence[ModuleSpec], tp: int
) -> tuple[dict[str, dict[str, int]], list[Problem]]:
    """The local values of attributes by module, and what is wrong with those that are quotients."""
    by_name = {module.name: module for module in modules}
    problems: list[Problem] = []
    values: dict[str, dict[str, int]] = {}  # by container, the counts that its layers name
    local: dict[str, dict[str, int]] = {}
    for layer in layers:
        if own := {name: layer.module.counts[name] // tp for name in _own_counts(layer)}:
            local[layer.module.name] = own
        for count in (*layer.counts, *layer.shares):
            if count.name in by_name.get(count.owner, ModuleSpec("", "other", {}, {})).counts:
                local.setdefault(count.owner, {})[count.name] = _local(count.value, tp)
        for count in layer.counts:
            where = generalized(layer.container) or "the model"
            if values.setdefault(layer.container, {}).setdefault(count.name, count.value) != count.value:
                got = f"{count.name} = {count.value} and {values[layer.container][count.name]} in {where}"
                problems.append(Problem(got, "one number for each name", "another name for one of them"))
    quotients = {(layer.container, quotient) for layer in layers for quotient in layer.rule.quotients}
    for container, counts in values.items():
        named = [quotient for where, quotient in quotients if where == container]
        if GROUPS_ATTRIBUTE not in (quotient.name for quotient in named) and container in by_name:
            named += _groups(by_name[container], counts, tp, problems)
        for quotient in named:
            owner = find_owner(by_name, container, quotient.name)
            if owner is not None and (
                problem := _quotient_problem(quotient, counts, by_name[owner].counts[quotient.name])
            ):
                problems.append(problem)
            elif owner is not None:
                value = _local(counts[quotient.dividend], tp) // _local(counts[quotient.divisor], tp)
                local.setdefault(owner, {})[quotient.name] = value
    return local, problems


def _own_counts(layer: TensorLayer) -> Sequence[str]:
    """The attributes of a layer itself that count what is split."""
    if layer.module.kind == "group_norm":
        return ("num_groups", "num_channels")
    if layer.module.kind not in CONVOLUTIONS:
        return ()
    by_style = {Style.COLUMN: ("out_channels",), Style.ROW: ("in_channels",)}
    return by_style.get(layer.rule.style, ("groups", "in_channels", "out_channels"))


def _groups(module: ModuleSpec, counts: Mapping[str, int], tp: int, problems: list[Problem]) -> list[Quotient]:
    """Which counts transformers' attribute is the quotient of, if the module has it and one is replicated."""
    groups = module.counts.get(GROUPS_ATTRIBUTE)
    if groups is None or all(count >= tp for count in counts.values()):
        return []
    found = [
        Quotient(GROUPS_ATTRIBUTE, a, b) for a in counts for b in counts if a != b and counts[a] == groups * counts[b]
    ]
    if len(found) != 1:
        got = f"{GROUPS_ATTRIBUTE} = {groups} of {module.class_name or module.name}, and the counts {', '.join(counts)}"
        attempt = f'"column(kv_heads; {GROUPS_ATTRIBUTE}=heads/kv_heads)"'
        problems.append(Problem(got, "to know which counts it is the quotient of", attempt))
        return []
    return found


def _quotient_problem(quotient: Quotient, counts: Mapping[str, int], value: int) -> Problem | None:
    text = f"{quotient.name}={quotient.dividend}/{quotient.divisor}"
    for name in (quotient.dividend, quotient.divisor):
        if name not in counts:
            return Problem(
                f"{text}, and no count {name}", f"a count of a layer in the same module: {', '.join(counts)}"
            )
    if counts[quotient.dividend] != value * counts[quotient.divisor]:
        got = f"{text}, but it is {value}, of {counts[quotient.dividend]} and {counts[quotient.divisor]}"
        return Problem(got, "the quotient of the two counts")
    return None
