"""Tensor trees: dicts, lists and tuples of tensors, nested.

leaf  a tensor of a tree
Law: a map keeps the containers and their types, and whatever is not a tensor.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
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


def skeleton_of(tree: Any, tensors: list[Tensor], check: Callable[[Any], None]) -> Any:
    """A tree as values of JSON and msgpack; its tensors, which are appended to `tensors`, as their numbers.

    `[kind, content]`: of a dict [key, part] pairs, of a list or tuple its parts. `check` is called with each part, and
    raises an error for one that the tree may not have.
    """
    check(tree)
    if isinstance(tree, Tensor):
        tensors.append(tree)
        return ["tensor", len(tensors) - 1]
    if isinstance(tree, dict):
        pairs = tree.items()
        return ["dict", [[skeleton_of(key, tensors, check), skeleton_of(part, tensors, check)] for key, part in pairs]]
    if type(tree) in (list, tuple):
        return [type(tree).__name__, [skeleton_of(part, tensors, check) for part in tree]]
    return ["value", tree]


def tree_of(skeleton: Any, tensors: Sequence[Tensor]) -> Any:
    """The tree of a skeleton, with these tensors."""
    kind, content = skeleton
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {tree_of(key, tensors): tree_of(part, tensors) for key, part in content}
    if kind == "value":
        return content
    parts = [tree_of(part, tensors) for part in content]
    return parts if kind == "list" else tuple(parts)


def detached_clone(tensor: Tensor) -> Tensor:
    """A copy without a graph."""
    return tensor.detach().clone()


def tensor_of_list(values: Sequence[Any]) -> Tensor:
    """A list of numbers, or of lists of numbers, as torch makes it. Raises what torch.as_tensor raises.

    torch reads the shape from the first list: of [[], [1]] it makes a tensor of shape [2, 0]. ValueError for these.
    """
    tensor = torch.as_tensor(values)
    if not tensor.numel() and any(map(_holds_number, values)):
        raise ValueError("lists of other lengths than the first, which is empty")
    return tensor


def _holds_number(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_holds_number, value))
    return bool(getattr(value, "size", 1))
