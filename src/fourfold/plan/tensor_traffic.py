"""Tensor traffic: how many elements a tensor rank sends for a block, in forward and backward together.

per token     activations and their gradients, for each token of a batch
per backward  the gradients of whole parameters that compute with some tokens
Law: with residuals that are whole, a container costs an all-reduce and a row layer another. Split, the same tensors
cost a reduce-scatter and an all-gather, which is as much, and a container another all-gather, in backward.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fourfold.plan.tensor_layers import parent_name
from fourfold.plan.tensor_residual import ResidualLayout, is_in
from fourfold.plan.tensor_rules import ModuleSpec, Style
from fourfold.words.layout import Change, collective_sent_bytes


class BlockTraffic(NamedTuple):
    """Elements that a rank sends for a block, over a network."""

    whole_per_token: float
    """Where residuals are whole."""
    split_per_token: float
    split_per_backward: float


def block_traffic(
    block: str, modules: Sequence[ModuleSpec], styles: Mapping[str, Style], layout: ResidualLayout, tp: int
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


def _container(column: str, layout: ResidualLayout) -> str:
    return next((name for name in layout.containers if is_in(column, name)), parent_name(column))


def _size(layer: ModuleSpec, *, is_input: bool) -> int:
    """The input or output features of a layer."""
    return layer.parameters["weight"][int(is_input != (layer.kind == "conv1d"))]
