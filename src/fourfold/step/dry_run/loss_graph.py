"""Loss graph: walks over the nodes that autograd has recorded for a loss, and tables of their names.

node  one recorded operation, `tensor.grad_fn`; its `next_functions` lead to the nodes of its inputs
op    a node's name without "Backward0": autograd has several nodes for the overloads of one function
"""

from collections.abc import Set as AbstractSet
from typing import Any

Node = Any

DIV_NODE = "DivBackward0"
MEAN_NODES = frozenset({"MeanBackward0", "MeanBackward1"})
RESHAPING_OPS = ("ToCopy", "View", "Squeeze", "Unsqueeze", "Alias", "Clone")
_LINEAR_OPS = (
    *RESHAPING_OPS,
    *("Add", "Sub", "Mul", "Neg", "Sum", "NanToNum", "Where", "MaskedFill"),
    *("Stack", "Cat", "Unbind", "Select", "UnsafeView", "Reshape", "Expand", "Permute", "Transpose"),
)
# The inputs of these are the same loss, or the summands of it.
LINEAR_NODES = frozenset(f"{op}Backward{overload}" for op in _LINEAR_OPS for overload in range(5))
MAX_FINAL_NODES = 32  # reading nodes takes time in each forward


def op_name(node: Node) -> str:
    return node.name().partition("Backward")[0]


def final_nodes(root: Node) -> list[tuple[Node, str]]:
    """The nodes that make one number of others, back from the root, and the first nodes before these; with names."""
    found, pending = [], [root]
    while pending and len(found) < MAX_FINAL_NODES:
        node = pending.pop()
        if node is None:
            continue
        name = node.name()
        found.append((node, name))
        if name in LINEAR_NODES:
            pending += [before for before, _ in reversed(node.next_functions)]
        elif name == DIV_NODE or name in MEAN_NODES:
            pending.append(node.next_functions[0][0])
    return found


def topological_order(root: Node, ends: AbstractSet[Node] = frozenset()) -> list[Node]:
    """All nodes from the ends (or the leaves) to the root; each comes after the nodes of its inputs."""
    found: list[Node] = []
    seen: set[Node] = set()
    stack = [(root, False)]
    while stack:
        node, is_done = stack.pop()
        if is_done:
            found.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            before = [each for each, _ in node.next_functions] if node not in ends else []
            stack += [(each, False) for each in before if each is not None and each not in seen]
    return found
