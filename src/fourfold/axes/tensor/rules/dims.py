"""Named dims: which dims of the weights the tensor axis splits, by their names, and the rules that follow.

dims     the plan's field, such as "heads:tp mlp:tp vocab:tp"; `batch:dp` and `length:cp` may stand there too: they say
         what these axes do anyway
split    the names on the tensor axis: those of the plan's field, or without it those that the rules mark with `:tp`
count    a dim with the name of an attribute around the layer, such as `heads`, is split by whole units of it
Law: a weight has at most one dim on the axis, and that dim decides its rule: what a layer makes is a column, what it
takes a row, the rows of an embedding a vocabulary, and so is a linear layer that makes the dim of such rows.

Source: Shazeer et al., Mesh-TensorFlow, arXiv 1811.02084, section 3.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from fourfold.axes.tensor.rules.styles import Count, DimNames, ModuleSpec, Rule, Style, parse_rules
from fourfold.words.errors import Problem, closest_match
from fourfold.words.mesh import AXES

TENSOR_AXIS = "tp"
OWN_DIMS = {"batch": "dp", "length": "cp"}
"""The dims of activations that have an axis of their own."""
EXAMPLE = 'dims = "heads:tp mlp:tp vocab:tp"'
DIM_STYLES = {
    "linear": (Style.COLUMN, Style.ROW),
    "conv1d": (Style.ROW, Style.COLUMN),
    "embedding": (Style.VOCABULARY, None),
}
"""kind of module -> the style that splits each dim of its weight."""

_WORD = re.compile(r"(?P<name>[^\W\d]\w*):(?P<axis>\w+)")


class TensorSpec(NamedTuple):
    """The tensor axis of a plan: size, `dims`, `sequence_parallel`, and `ulysses`, which divides local heads."""

    size: int
    dims: str = ""
    ulysses: int = 1
    sequence_parallel: bool = False


# ---- the plan's field ------------------------------------------------------------------------------


def dims_problems(text: str) -> list[Problem]:
    """What is wrong with the plan's field, whatever the model is."""
    problems, seen = [], set[str]()
    for word in text.split():
        found = _WORD.fullmatch(word)
        if found is None:
            problems.append(Problem(f'dims has "{word}"', "DIM:AXIS, with spaces between them", EXAMPLE))
        elif found["axis"] not in AXES:
            close = closest_match(found["axis"], AXES) or TENSOR_AXIS
            problems.append(Problem(f'dims has "{word}"', f"an axis: {', '.join(AXES)}", f"{found['name']}:{close}"))
        elif problem := _axis_problem(found["name"], found["axis"]):
            problems.append(problem)
        elif found["name"] in seen:
            problems.append(Problem(f"dims has {found['name']} twice", "each dim once"))
        seen.add(found["name"] if found else "")
    return problems


def _axis_problem(name: str, axis: str) -> Problem | None:
    """What is wrong with a dim on an axis of the mesh."""
    wanted = OWN_DIMS.get(name, TENSOR_AXIS)
    if axis == wanted:
        return None
    if name in OWN_DIMS:
        return Problem(f'dims has "{name}:{axis}"', f"the axis that splits the {name}, {wanted}", f"{name}:{wanted}")
    own = next((dim for dim, each in OWN_DIMS.items() if each == axis), None)
    need = f"dims of weights to be on {TENSOR_AXIS}" + (f": {axis} splits the {own}" if own else "")
    return Problem(f'dims has "{name}:{axis}"', need, f"{name}:{TENSOR_AXIS}")


def dims_on_axis(text: str) -> list[str]:
    """The dims that the field puts on the tensor axis."""
    found = (_WORD.fullmatch(word) for word in text.split())
    return [each["name"] for each in found if each and each["axis"] == TENSOR_AXIS]


# ---- the rules that follow -------------------------------------------------------------------------


class Split(NamedTuple):
    """The dims on the tensor axis. `rows`: those that are the rows of embeddings."""

    names: Collection[str]
    rows: Collection[str]


def find_split(
    text: str, parsed: Mapping[str, Rule | DimNames], matched: Iterable[tuple[ModuleSpec, str]]
) -> tuple[Split, list[Problem]]:
    """The dims on the tensor axis, and the problems of the plan's field `text` with rules that name these dims.

    matched  modules with their patterns
    """
    named = {pattern: rule for pattern, rule in parsed.items() if not isinstance(rule, Rule)}
    known = dict.fromkeys(dim.name for dims in named.values() for dim in dims)
    marked = [dim.name for dims in named.values() for dim in dims if dim.is_marked]
    rows = {named[pattern][0].name for module, pattern in matched if pattern in named and module.kind == "embedding"}
    on_axis = dims_on_axis(text)
    problems = [_unknown(name, known) for name in on_axis if name not in known]
    return Split(on_axis if text else marked, rows), problems


def _unknown(name: str, known: Collection[str]) -> Problem:
    got = f'dims has "{name}:{TENSOR_AXIS}"'
    if not known:
        need = "tensor rules that name the dims of weights"
        return Problem(got, need, 'tensor={"*.up": "mlp, model", "*.down": "model, mlp"}, or no dims')
    close = closest_match(name, known)
    return Problem(got, f"a dim that the rules name: {', '.join(known)}", f"{close}:{TENSOR_AXIS}" if close else "")


def lower_dims(
    module: ModuleSpec, pattern: str, dims: DimNames, split: Split, attributes: Collection[str]
) -> Rule | Problem | None:
    """The rule that follows for a module; None: it stays whole.

    attributes  the whole numbers that the modules around it have
    """
    shape = module.parameters.get("weight", ())
    names = ", ".join(dim.name for dim in dims)
    if len(shape) != len(dims):
        has = f"has a weight of {' × '.join(map(str, shape))}" if shape else "has no weight"
        got = f'"{pattern}" names the dims {names}, and {module.class_name or module.name} {has}'
        return Problem(got, "a name for each dim of the weight, in the order of its shape")
    here = [index for index, dim in enumerate(dims) if dim.name in split.names]
    if not here:
        return None
    if len(here) > 1:
        both = " and ".join(dims[index].name for index in here)
        got = f'"{pattern}" has the dims {names}, and {both} are on {TENSOR_AXIS}'
        return Problem(got, "one dim of a weight on an axis", "the other dim in dims, or another name for one of them")
    dim = dims[here[0]]
    style = _style(module, here[0], dim.name, split)
    if style is None:
        got = f'"{pattern}": {dim.name} on {TENSOR_AXIS} splits dim {here[0]} of modules of class '
        need = "the outputs or inputs of Linear or Conv1D, or the rows of Embedding"
        return Problem(got + (module.class_name or module.kind), need, f"{dim.name} not on {TENSOR_AXIS}")
    if dim.brackets is not None:
        if style is Style.VOCABULARY:
            got = f'"{pattern}": {dim.name} has brackets, and is the rows of an embedding'
            return Problem(got, "rows that are split evenly", f'"{dim.name}" without brackets')
        return dim.brackets._replace(style=style)
    is_count = style is not Style.VOCABULARY and dim.name in attributes
    return Rule(style, (Count(dim.name),) if is_count else ())


def _style(module: ModuleSpec, index: int, name: str, split: Split) -> Style | None:
    """The style that splits a dim of a module's weight; None: there is none."""
    style = DIM_STYLES[module.kind][index] if module.kind in DIM_STYLES else None
    return Style.VOCABULARY if style is Style.COLUMN and name in split.rows else style


def dims_of_rules(rules: Mapping[str, str]) -> list[str]:
    """The dims that rules name, in their order."""
    return list(marked_dims(rules))


def marked_dims(rules: Mapping[str, str]) -> dict[str, bool]:
    """The dims that rules name, in their order, and whether they are on the tensor axis where the plan does not say."""
    parsed, _ = parse_rules(rules)
    named = [dim for each in parsed.values() if not isinstance(each, Rule) for dim in each]
    marked = {dim.name for dim in named if dim.is_marked}
    return {dim.name: dim.name in marked for dim in named}
