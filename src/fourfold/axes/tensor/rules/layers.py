"""Tensor layers: the modules that tensor rules match, with the counts that the rules name.

layer      a module that a rule matches
container  the module that contains a layer: it computes with what the layer returns, so the counts are its attributes
owner      the module whose attribute a count is: the container, or its nearest ancestor that has it
Law: no layer has two rules, and a rule that matches nothing, or what it cannot split, is a problem.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from fourfold.axes.tensor.rules.dims import Split, find_split, lower_dims
from fourfold.axes.tensor.rules.styles import DimNames, ModuleSpec, Rule, Style, matches, parse_rules
from fourfold.words.errors import Problem, closest_match

# style -> the kinds of modules that it splits
SPLITTABLE = {
    Style.COLUMN: ("linear", "conv1d", "convolution", "transposed_convolution"),
    Style.ROW: ("linear", "conv1d", "convolution", "transposed_convolution"),
    Style.VOCABULARY: ("embedding", "linear"),
    Style.CHANNELS: ("group_norm", "convolution", "transposed_convolution"),
}
CONVOLUTIONS = ("convolution", "transposed_convolution")
KIND_NAMES = {
    "linear": "Linear",
    "conv1d": "Conv1D",
    "embedding": "Embedding",
    "norm": "norm",
    "convolution": "convolution",
    "transposed_convolution": "transposed convolution",
    "group_norm": "GroupNorm",
    "attention": "nn.MultiheadAttention",
}
LEAVE_WHOLE = "no rule for it: it stays whole"


class LayerCount(NamedTuple):
    """A count or a share of a layer. `owner`: the module whose attribute it is, or the container if none has it."""

    name: str
    value: int
    owner: str


class TensorLayer(NamedTuple):
    """A module and its rule.

    counts  one for each fused part of the rule
    shares  attributes that are divided by tp
    """

    module: ModuleSpec
    pattern: str
    rule: Rule
    counts: tuple[LayerCount, ...] = ()
    shares: tuple[LayerCount, ...] = ()

    @property
    def container(self) -> str:
        return parent_name(self.module.name)

    @property
    def dim(self) -> int:
        """The dim of the weight that is split."""
        if self.rule.style is Style.CHANNELS:
            return 0
        is_output = self.rule.style is not Style.ROW
        return int(is_output) if self.module.kind in ("conv1d", "transposed_convolution") else int(not is_output)

    @property
    def num_groups(self) -> int:
        """How many groups of channels the layer computes by themselves."""
        return self.module.counts.get("num_groups", self.module.counts.get("groups", 1))

    @property
    def length(self) -> int:
        """The size of that dim."""
        return self.module.parameters["weight"][self.dim]

    @property
    def length_name(self) -> str:
        """What that dim counts."""
        if self.rule.style is Style.VOCABULARY:
            return "rows"
        if self.module.kind in CONVOLUTIONS:
            return "input channels" if self.rule.style is Style.ROW else "output channels"
        return "inputs" if self.rule.style is Style.ROW else "outputs"


def parent_name(name: str) -> str:
    """The name of the module that contains this one."""
    return name.rpartition(".")[0]


def resolve_layers(
    modules: Sequence[ModuleSpec], rules: Mapping[str, str], dims: str = ""
) -> tuple[list[TensorLayer], list[Problem]]:
    """The layers that the rules match, in the order of `modules`, and all that is wrong with the rules, for any tp.

    dims  the plan's field: which of the dims that rules name are split
    """
    by_name = {module.name: module for module in modules}
    parsed, problems = parse_rules(rules)
    patterns: dict[str, list[str]] = {}
    for pattern in rules:
        found = [module.name for module in modules if matches(pattern, module.name)]
        if not found:
            problems.append(_no_match_problem(pattern, modules))
        for name in found:
            patterns.setdefault(name, []).append(pattern)
    pairs = [(module, pattern) for module in modules for pattern in patterns.get(module.name, [])]
    split, dim_problems = find_split(dims, parsed, pairs)
    problems += dim_problems
    layers = []
    for module in modules:
        matching = patterns.get(module.name, [])
        if len(matching) > 1:
            got = f"{' and '.join(map(_quoted, matching))} match the same layer {generalized(module.name)}"
            problems.append(Problem(got, "one rule for each layer", "leave one of them out, or make it narrower"))
        elif matching and (rule := _rule(module, matching[0], parsed, split, by_name, problems)):
            layer = TensorLayer(module, matching[0], rule)
            found_problems = list(_kind_problems(layer, modules, by_name))
            problems += found_problems
            if not found_problems and (resolved := _with_counts(layer, by_name, problems)):
                layers.append(resolved)
    return layers, problems


def _rule(
    module: ModuleSpec,
    pattern: str,
    parsed: Mapping[str, Rule | DimNames],
    split: Split,
    by_name: Mapping[str, ModuleSpec],
    problems: list[Problem],
) -> Rule | None:
    """The rule of a module, or the one that follows from its dims; None where it stays whole, or with a problem."""
    rule = parsed.get(pattern)
    if rule is None or isinstance(rule, Rule):
        return rule
    around = [by_name[name] for name in ancestors(parent_name(module.name), itself=True) if name in by_name]
    lowered = lower_dims(module, pattern, rule, split, {name for each in around for name in each.counts})
    if isinstance(lowered, Problem):
        problems.append(lowered)
        return None
    return lowered


# ---- which modules ---------------------------------------------------------------------------------


def _quoted(name: str) -> str:
    return f'"{name}"'


def generalized(name: str) -> str:
    """The pattern for a module and those like it in other blocks: its numbers as `*`."""
    return re.sub(r"(?<![^.])[0-9]+(?![^.])", "*", name)


def _no_match_problem(pattern: str, modules: Sequence[ModuleSpec]) -> Problem:
    names = [module.name for module in modules if module.name and module.parameters]
    choices = [generalized(name) for name in names] if "*" in pattern else names
    close = closest_match(pattern, dict.fromkeys(choices))
    need = "a pattern of module names; * is one name between dots"
    return Problem(f"{_quoted(pattern)} matches no module", need, _quoted(close) if close else "")


def _kind_problems(
    layer: TensorLayer, modules: Sequence[ModuleSpec], by_name: Mapping[str, ModuleSpec]
) -> Iterable[Problem]:
    """What keeps a module from being split by its rule."""
    module, style = layer.module, layer.rule.style
    attentions = {name for name, each in by_name.items() if each.kind == "attention"}
    got = f'{_quoted(layer.pattern)} = "{style}" matches modules of class {module.class_name or module.kind}'
    if attention := next((n for n in ancestors(module.name, itself=True) if n in attentions), None):
        need = "separate linear layers: nn.MultiheadAttention is not split yet"
        yield Problem(f"{_quoted(layer.pattern)} is in the nn.MultiheadAttention {attention}", need, LEAVE_WHOLE)
    elif style is Style.REPLICATED:
        if not module.parameters:
            yield Problem(got, "a module with parameters of its own", _inside(module, modules))
    elif module.kind not in SPLITTABLE[style]:
        yield Problem(got, _kinds_needed(style), _instead(module, modules))
    elif module.kind in CONVOLUTIONS and (problem := _groups_problem(layer, got)):
        yield problem
    elif style is Style.CHANNELS and not module.parameters:
        return
    elif "weight" not in module.parameters or not set(module.parameters) <= {"weight", "bias"}:
        names = ", ".join(module.parameters) or "none"
        yield Problem(f"{got} with the parameters {names}", "its own weight, and a bias or none", LEAVE_WHOLE)


def _groups_problem(layer: TensorLayer, got: str) -> Problem | None:
    """A convolution of groups has channels that are computed by themselves; one without groups mixes them all."""
    style, groups = layer.rule.style, layer.num_groups
    if style is Style.CHANNELS and groups == 1:
        return Problem(f"{got} with groups = 1", "several groups of channels", f'"{Style.COLUMN}" or "{Style.ROW}"')
    if style is not Style.CHANNELS and groups > 1:
        return Problem(f"{got} with groups = {groups}", "groups = 1, which mixes all channels", f'"{Style.CHANNELS}"')
    return None


def _kinds_needed(style: Style) -> str:
    *first, last = (KIND_NAMES[kind] for kind in SPLITTABLE[style])
    return f"{', '.join(first)} or {last}"


def _instead(module: ModuleSpec, modules: Sequence[ModuleSpec]) -> str:
    """What to try for a module that its rule cannot split."""
    if module.kind == "embedding":
        return f'"{Style.VOCABULARY}"'
    if module.kind == "group_norm":
        return f'"{Style.CHANNELS}"'
    if module.kind in ("linear", "conv1d"):
        return f'"{Style.COLUMN}" or "{Style.ROW}"'
    if module.kind == "norm":
        return f'no rule: it stays whole; "{Style.REPLICATED}" for a norm of split heads'
    return _inside(module, modules) if not module.parameters else LEAVE_WHOLE


def _inside(module: ModuleSpec, modules: Sequence[ModuleSpec]) -> str:
    """The layers directly in a module, as patterns."""
    inside = [m.name for m in modules if m.name and parent_name(m.name) == module.name and m.kind in KIND_NAMES]
    return ", ".join(_quoted(generalized(name)) for name in inside[:4]) or LEAVE_WHOLE


# ---- their counts ----------------------------------------------------------------------------------


def ancestors(name: str, *, itself: bool = False) -> Iterable[str]:
    """The modules around a module, the nearest first, the model itself last."""
    if itself:
        yield name
    while name:
        name = parent_name(name)
        yield name


def find_owner(by_name: Mapping[str, ModuleSpec], container: str, attribute: str) -> str | None:
    """The module whose attribute a rule of a layer in `container` names; None: there is none."""
    around = ancestors(container, itself=True)
    return next((name for name in around if name in by_name and attribute in by_name[name].counts), None)


def _with_counts(layer: TensorLayer, by_name: Mapping[str, ModuleSpec], problems: list[Problem]) -> TensorLayer | None:
    """The layer with the counts and shares that its rule names; None with a problem."""
    rule, container = layer.rule, layer.container
    num_problems = len(problems)
    counts = [_declared(layer, count.name, count.value, by_name, problems) for count in rule.counts]
    shares = [_declared(layer, name, None, by_name, problems) for name in rule.shares]
    for quotient in rule.quotients:
        if find_owner(by_name, container, quotient.name) is None:
            problems.append(_attribute_problem(layer, quotient.name, by_name))
    found = tuple(count for count in counts if count), tuple(share for share in shares if share)
    problems += [
        Problem(f"{c.name} = {c.value}", "1 or more to be split") for c in (*found[0], *found[1]) if c.value < 1
    ]
    if len(problems) == num_problems:
        problems += _length_problems(layer._replace(counts=found[0]))
    return layer._replace(counts=found[0], shares=found[1]) if len(problems) == num_problems else None


def _declared(
    layer: TensorLayer, name: str, value: int | None, by_name: Mapping[str, ModuleSpec], problems: list[Problem]
) -> LayerCount | None:
    """A count that a rule names, or gives; None with a problem."""
    container = layer.container
    if value is not None:
        attributes = by_name[container].counts if container in by_name else {}
        if attributes.get(name, value) != value:
            where = f"{generalized(container)}.{name}" if container else name
            got = f"{name}={value} for {_quoted(layer.pattern)}, but {where} is {attributes[name]}"
            problems.append(Problem(got, "the same number, or the name alone", name))
            return None
        return LayerCount(name, value, container)
    owner = find_owner(by_name, container, name)
    if owner is None:
        problems.append(_attribute_problem(layer, name, by_name))
        return None
    return LayerCount(name, by_name[owner].counts[name], owner)


def _attribute_problem(layer: TensorLayer, name: str, by_name: Mapping[str, ModuleSpec]) -> Problem:
    around = [by_name[each] for each in ancestors(layer.container, itself=True) if each in by_name]
    choices = dict.fromkeys(attribute for module in around for attribute in module.counts)
    close = closest_match(name, choices)
    class_name = around[0].class_name if around else ""
    got = f'"{name}" for {_quoted(layer.pattern)} is not an attribute of the {class_name or "module"} around it'
    is_count = any(count.name == name for count in layer.rule.counts)
    attempt = f'"{close}"' if close else f"{name}=8 if there are 8 of them" if is_count else ""
    return Problem(got, "a whole number, of it or of a module around it", attempt)


def _length_problems(layer: TensorLayer) -> Iterable[Problem]:
    """What is wrong with the sizes of the fused parts, for any tp."""
    if layer.rule.style in (Style.REPLICATED, Style.CHANNELS):
        return
    has = f"{_quoted(layer.pattern)} has {layer.length} {layer.length_name}"
    if total := sum(count.value for count in layer.counts):
        if layer.length % total:
            names = " + ".join(count.name for count in layer.counts)
            need = f"{layer.length_name} divisible by the sum of the counts"
            yield Problem(f"{has}, {names} = {total}", need, "one count for each fused part, in their order")
    elif layer.length % layer.rule.num_parts:
        need = f"{layer.length_name} divisible by {layer.rule.num_parts}, the number of parts"
        yield Problem(has, need, f'"{layer.rule.style}" if it is one part')
