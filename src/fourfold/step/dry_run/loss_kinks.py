"""Bends: functions that look like a multiple of a mean until it is large or small enough, as `mean.clamp(max=1)`.

bend  a step of autograd with a kink, such as clamp, that makes one element of a mean over the batch
Law: a number with a bend is no mean, though the first batch may not reach the kink: of the parts of a later batch one
may lie beyond it, and the whole batch not.

Seen are torch's own functions, between the loss and a mean of torch's or outputs with a row for each sample. Not seen
are `if loss > 1`, `torch.where`, and in a model that makes its own loss what becomes of means that are made by hand.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from fourfold.parts.torch_private import grad_shapes, saved_maximum, saved_minimum

# Names of autograd's nodes without "Backward0".
KINKED_OPS = frozenset(
    {"Abs", "Amax", "Amin", "Clamp", "ClampMax", "ClampMin", "Fmax", "Fmin", "Hardtanh", "HuberLoss", "LeakyRelu"}
    | {"Max", "Maximum", "Min", "Minimum", "Relu", "SmoothL1Loss", "Threshold"}
)
_Node = Any


def find_kinks(value: Tensor, means: Iterable[Tensor], outputs: Iterable[Tensor]) -> Sequence[str]:
    """The names of all bends between a number and means over the batch, or outputs with a row for each sample."""
    ends = {tensor.grad_fn for tensor in means} - {None}
    over = ends | {tensor.grad_fn for tensor in outputs} - {None}
    if value.grad_fn is None or not over:
        return []
    nodes = _topological_order(value.grad_fn, over)
    reaching, found = set(over), []
    for node in nodes:  # those it was made of come first
        if node in over or not any(before in reaching for before, _ in node.next_functions):
            continue
        reaching.add(node)
        if _is_nonnegative_clamp(node, ends):
            ends.add(node)
        elif _is_kink(node):
            found.append(_op_name(node))
    return found


def _topological_order(root: _Node, ends: set[_Node]) -> list[_Node]:
    """All nodes between a root and the ends; each after those that it was made of."""
    found: list[_Node] = []
    seen: set[_Node] = set()
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


def _is_kink(node: _Node) -> bool:
    return _op_name(node) in KINKED_OPS and all(math.prod(shape) == 1 for shape in grad_shapes(node))


def _is_nonnegative_clamp(node: _Node, means: set[_Node]) -> bool:
    """Whether it keeps one of torch's means from being negative, which it is not anyhow."""
    is_floor = _op_name(node) == "Relu"
    if _op_name(node) in ("Clamp", "ClampMin"):
        minimum = saved_minimum(node)
        is_floor = saved_maximum(node) is None and minimum is not None and bool(minimum <= 0)
    return is_floor and node.next_functions[0][0] in means


def _op_name(node: _Node) -> str:
    return node.name().partition("Backward")[0]
