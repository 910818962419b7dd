"""Copies of models.

computed  a tensor with a graph that hooks keep in a module and compute again in each forward, such as the weights of
          torch's old weight_norm and of pruned layers
"""

import copy
from collections.abc import Mapping
from typing import Any, TypeVar

from torch import Tensor, nn

T = TypeVar("T")


def deep_copy(value: T, model: nn.Module, memo: Mapping[int, Any] | None = None) -> T:
    """A copy of a model, or of something that holds it; computed tensors, which torch cannot copy, lose their graph.

    memo  by id: what stands for an object in the copy. Raises what copy.deepcopy raises.
    """
    attributes = (each for module in model.modules() for each in vars(module).values())
    computed = {id(each): each.detach() for each in attributes if isinstance(each, Tensor) and each.grad_fn is not None}
    return copy.deepcopy(value, {**computed, **(memo or {})})
