"""Tensor trees: dicts, lists and tuples of tensors, nested.

leaf  a tensor of a tree
Law: a map keeps the containers and their types, and whatever is not a tensor.
"""

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor


def tree_map(tree: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """The same tree with `function` applied to every tensor."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, dict):
        # A subclass of dict, such as a ModelOutput of transformers, keeps its type: the loss may read its attributes.
        changed = {name: tree_map(part, function) for name, part in tree.items()}
        return changed if type(tree) is dict else type(tree)(**changed)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(tree_map(part, function) for part in tree))
    if isinstance(tree, list | tuple):
        return type(tree)(tree_map(part, function) for part in tree)
    return tree


def tree_leaves(tree: Any) -> Iterator[Tensor]:
    """The tensors of a tree, in order."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, dict | list | tuple):
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from tree_leaves(part)


def is_plain(tree: Any) -> bool:
    """Whether a value is a tree of tensors, numbers and strings, and of nothing that has a state of its own."""
    if isinstance(tree, dict | list | tuple):
        return all(map(is_plain, tree.values() if isinstance(tree, dict) else tree))
    return tree is None or isinstance(tree, Tensor | bool | int | float | str)


def detached_clone(tensor: Tensor) -> Tensor:
    """A copy without a graph."""
    return tensor.detach().clone()
