"""Sequence parallelism: where a tensor rank holds some of the tokens of a model, inferred from its modules.

block      a numbered module that holds split layers; blocks of one list follow each other
container  the called module around column layers inside a block: it gets all tokens, and so do the layers in it
entry      the first block of a list: from here on a rank holds some tokens of the hidden tensor
exit       the last module of the list, or the norm behind it: from here on every rank holds all tokens again
summed     modules with parameters that compute with some tokens: their gradients are addends
per token     activations and their gradients, for each token of a batch
per backward  the gradients of whole parameters that compute with some tokens
Law: between entry and exit, a module outside of containers computes with this rank's tokens only.
Law: without it, a container costs an all-reduce and a row layer another. With it, the same tensors cost
a reduce-scatter and an all-gather, which is as much, and a container another all-gather, in backward.

Source: sequence parallelism of Megatron-LM (Korthikanti et al., arXiv 2205.05198).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from fourfold.axes.tensor.rules.layers import CONVOLUTIONS, ancestors, generalized, parent_name
from fourfold.axes.tensor.rules.styles import ModuleSpec, Style
from fourfold.words.errors import PlanError, Problem
from fourfold.words.layout import Change, collective_sent_bytes

# ---- layout --------------------------------------------------------------------------------------------------------

KEEP_WHOLE = "sequence_parallel = false"


class SequenceParallelLayout(NamedTuple):
    """What modules do with sequence parallelism, by name. All empty without it.

    rows    row layers whose sum is split over tokens
    blocks  the blocks that hold split layers, in order
    """

    entries: frozenset[str] = frozenset()
    containers: frozenset[str] = frozenset()
    exits: frozenset[str] = frozenset()
    summed: frozenset[str] = frozenset()
    rows: frozenset[str] = frozenset()
    blocks: tuple[str, ...] = ()


def sequence_parallel_layout(modules: Sequence[ModuleSpec], styles: Mapping[str, Style]) -> SequenceParallelLayout:
    """Where tokens are split, in a model of these modules with these rules. Raises PlanError, all problems at once.

    styles  by module: the style of its rule
    """
    columns = [module.name for module in modules if styles.get(module.name) is Style.COLUMN]
    blocks, problems = _blocks(modules, columns)
    inside = {block: [module for module in modules if is_in(module.name, block)] for block in blocks}
    around = _called_around(modules, columns)
    parents = {around[name] for name in columns if any(is_in(name, block) for block in blocks)}
    containers = {name for name in parents if not any(_is_inside(name, other) for other in parents)}
    lists = [_list_of(name, blocks, modules) for name in dict.fromkeys(map(parent_name, blocks))]
    problems += [problem for each in lists for problem in _list_problems(each, modules)]
    problems += _layer_problems(blocks, inside, styles)
    if problems:
        raise PlanError(list(dict.fromkeys(problems)), where="the tensor rules")
    tokenwise = [module for block in blocks for module in inside[block]]
    tokenwise += [module for each in lists for module in each.norms]
    exits = {each.end.name: each.end for each in lists}
    summed = {module.name for module in (*tokenwise, *exits.values()) if module.parameters}
    return SequenceParallelLayout(
        entries=frozenset(each.members[0].name for each in lists),
        containers=frozenset(containers),
        exits=frozenset(exits),
        summed=frozenset(
            name for name in summed if name not in styles and not any(is_in(name, each) for each in containers)
        ),
        rows=frozenset(module.name for module in tokenwise if styles.get(module.name) is Style.ROW),
        blocks=tuple(blocks),
    )


def _is_inside(name: str, outer: str) -> bool:
    """Whether a module is a proper submodule of another."""
    return name != outer and (not outer or name.startswith(f"{outer}."))


def is_in(name: str, outer: str) -> bool:
    """Whether a module is another one, or inside of it."""
    return name == outer or _is_inside(name, outer)


# ---- blocks ----------------------------------------------------------------------------------------


def _blocks(modules: Sequence[ModuleSpec], columns: Sequence[str]) -> tuple[list[str], list[Problem]]:
    """The outermost of the numbered modules around containers, in the order of `modules`."""
    found: set[str] = set()
    problems = []
    for column, container in _called_around(modules, columns).items():
        block = next((name for name in ancestors(container) if _is_numbered(name)), None)
        if block is not None:
            found.add(block)
        elif _is_numbered(container):
            problems.append(_container_problem(column, container, modules))
    blocks = [m.name for m in modules if m.name in found and not any(_is_inside(m.name, outer) for outer in found)]
    if not blocks and not problems:
        need = "numbered blocks, as those of nn.ModuleList, with column layers in their submodules"
        problems.append(Problem("sequence_parallel = true and a model without blocks", need, KEEP_WHOLE))
    return blocks, problems


def _called_around(modules: Sequence[ModuleSpec], columns: Sequence[str]) -> dict[str, str]:
    """By column layer: the nearest module around it that is called."""
    called = {module.name for module in modules if module.is_called}
    return {column: next((name for name in ancestors(column) if name in called), "") for column in columns}


def _is_numbered(name: str) -> bool:
    return name.rpartition(".")[2].isdecimal()


def _container_problem(column: str, container: str, modules: Sequence[ModuleSpec]) -> Problem:
    class_name = next((module.class_name for module in modules if module.name == container), "") or "block"
    got = f"sequence_parallel = true and the column layer {generalized(column)} directly in the block, a {class_name}"
    need = "a module around it inside of the block that has a forward, such as an MLP: there the tokens are gathered"
    return Problem(got, need, KEEP_WHOLE)


def _layer_problems(
    blocks: Sequence[str], inside: Mapping[str, Sequence[ModuleSpec]], styles: Mapping[str, Style]
) -> Iterable[Problem]:
    """Split layers that no block can have: their tensors have no tokens in the second-last dim."""
    for block in blocks:
        for module in inside[block]:
            if styles.get(module.name) is Style.VOCABULARY:
                rule = f'"{Style.VOCABULARY}" for {generalized(module.name)}'
                got = f"sequence_parallel = true and {rule}, inside of a block"
                yield Problem(got, "a vocabulary before the first block, or behind the last", KEEP_WHOLE)
            elif module.name in styles and module.kind in (*CONVOLUTIONS, "group_norm"):
                got = (
                    f"sequence_parallel = true and {generalized(module.name)}, a {module.class_name}, inside of a block"
                )
                yield Problem(got, "hidden tensors [..., tokens, features], which have no channels", KEEP_WHOLE)


# ---- lists of blocks -------------------------------------------------------------------------------


class _List(NamedTuple):
    """A list of blocks.

    members  from the first block to the last, with what is between them
    norms    the norms between them
    end      the last module that computes with some tokens: the norm behind the list, or the last block
    """

    members: Sequence[ModuleSpec]
    norms: Sequence[ModuleSpec]
    blocks: frozenset[str]
    end: ModuleSpec


def _list_of(name: str, blocks: Sequence[str], modules: Sequence[ModuleSpec]) -> _List:
    numbered = [m for m in _children(name, modules) if _is_numbered(m.name)]
    own = frozenset(block for block in blocks if parent_name(block) == name)
    places = [index for index, member in enumerate(numbered) if member.name in own]
    members = numbered[places[0] : places[-1] + 1]
    norms = [member for member in members if member.kind == "norm"]
    behind = _behind(members[-1].name, modules)
    end = behind if behind is not None and behind.kind == "norm" else members[-1]
    return _List(members, norms, own, end)


def _children(name: str, modules: Sequence[ModuleSpec]) -> list[ModuleSpec]:
    return [module for module in modules if module.name and parent_name(module.name) == name]


def _behind(name: str, modules: Sequence[ModuleSpec]) -> ModuleSpec | None:
    """The module defined behind a block: the next one of its list, or the next one behind the list."""
    while name:
        siblings = _children(parent_name(name), modules)
        index = next(index for index, sibling in enumerate(siblings) if sibling.name == name)
        if index + 1 < len(siblings):
            return siblings[index + 1]
        if not _is_numbered(name):
            return None
        name = parent_name(name)
    return None


def _list_problems(each: _List, modules: Sequence[ModuleSpec]) -> Iterable[Problem]:
    """Members between blocks that may need all tokens."""
    for member in each.members:
        has_parameters = any(module.parameters for module in modules if is_in(module.name, member.name))
        if member.name not in each.blocks and member.kind != "norm" and has_parameters:
            got = (
                f"sequence_parallel = true and {member.name}, a {member.class_name} without split layers between blocks"
            )
            yield Problem(got, "split layers in each block from the first to the last", KEEP_WHOLE)


# ---- tensor traffic ------------------------------------------------------------------------------------------------


class BlockTraffic(NamedTuple):
    """Elements that a rank sends for a block, over a network."""

    whole_per_token: float
    """Without sequence parallelism."""
    split_per_token: float
    split_per_backward: float


def block_traffic(
    block: str, modules: Sequence[ModuleSpec], styles: Mapping[str, Style], layout: SequenceParallelLayout, tp: int
) -> BlockTraffic:
    """What a block of `layout` costs on `tp` ranks."""
    inside = [module for module in modules if is_in(module.name, block)]
    columns = [module for module in inside if styles.get(module.name) is Style.COLUMN]
    rows = [module for module in inside if module.name in layout.rows]
    # The layers in a container read one tensor.
    inputs = {_container(column.name, layout): _size(column, is_input=True) for column in columns}
    entered, left = sum(inputs.values()), sum(_size(row, is_input=False) for row in rows)
    weights = [shape for module in inside if module.name in layout.summed for shape in module.parameters.values()]
    weights += [row.parameters["bias"] for row in rows if "bias" in row.parameters]

    def sent(collective: Change, num_elements: int) -> float:
        return collective_sent_bytes(collective, whole_bytes=num_elements, size=tp)

    return BlockTraffic(
        whole_per_token=sent(Change.ALL_REDUCE, entered + left),
        split_per_token=sent(Change.ALL_GATHER, 2 * entered + left) + sent(Change.REDUCE_SCATTER, entered + left),
        split_per_backward=sent(Change.ALL_REDUCE, sum(map(math.prod, weights))),
    )


def _container(column: str, layout: SequenceParallelLayout) -> str:
    return next((name for name in layout.containers if is_in(column, name)), parent_name(column))


def _size(layer: ModuleSpec, *, is_input: bool) -> int:
    """The input or output features of a layer."""
    return layer.parameters["weight"][int(is_input != (layer.kind == "conv1d"))]
