"""Copies of models.

computed  a tensor with a graph that hooks keep in a module and compute again in each forward, such as the weights of
          torch's old weight_norm and of pruned layers
"""

import copy
from collections.abc import Mapping
from typing import Any, TypeVar

from torch import Tensor, nn

from fourfold.words.errors import Problem, TaskError

T = TypeVar("T")


def deep_copy(value: T, model: nn.Module, purpose: str, memo: Mapping[int, Any] | None = None) -> T:
    """A copy of a model, or of something that holds it; computed tensors, which torch cannot copy, lose their graph.

    purpose  what needs the copy
    memo     by id: what stands for an object in the copy

    Raises TaskError if there is something that cannot be copied.
    """
    attributes = (each for module in model.modules() for each in vars(module).values())
    computed = {id(each): each.detach() for each in attributes if isinstance(each, Tensor) and each.grad_fn is not None}
    try:
        return copy.deepcopy(value, {**computed, **(memo or {})})
    except Exception as error:  # whatever the model's attributes raise
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        need = f"a model that copy.deepcopy can copy: {purpose}"
        attempt = "no locks, no open files and no tensors with a graph among its attributes"
        raise TaskError(Problem(f"a model that cannot be copied: {text}", need, attempt)) from error
