"""Preserving a module: a dry run leaves no trace in the attributes and gradients of a model.

A model may cache tensors in attributes, such as tables of positions. In a dry run they would be made in float64.
Law: on exit, every attribute of every module has its value from before, and so have the contents of dicts and lists
among them.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fourfold.proof.random_weights import cast_real


@contextlib.contextmanager
def preserve_module(model: nn.Module) -> Iterator[None]:
    """Within, forwards and backwards of the model leave no trace; its gradients are None."""
    modules = list(model.modules())
    attributes = [dict(vars(module)) for module in modules]
    contents = [(value, value.copy()) for each in attributes for value in each.values() if _is_container(value)]
    gradients = [(p, p.grad) for p in model.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        for module, before in zip(modules, attributes, strict=True):
            vars(module).clear()
            vars(module).update(before)
        for container, before in contents:
            container.clear()
            container.update(before) if isinstance(container, dict) else container.extend(before)
        for parameter, gradient in gradients:
            parameter.grad = gradient


@contextlib.contextmanager
def copy_tensor_attributes(model: nn.Module, dtype: torch.dtype | None) -> Iterator[None]:
    """Within, tensors that modules hold as plain attributes are copies in this dtype (None: in their own)."""
    replaced: list[tuple[dict[str, Any], str, Tensor]] = []
    for attributes in map(vars, model.modules()):
        for name, value in list(attributes.items()):
            if isinstance(value, Tensor):
                replaced.append((attributes, name, value))
                attributes[name] = cast_real(value.detach().clone(), dtype)
    try:
        yield
    finally:
        for attributes, name, value in replaced:
            attributes[name] = value


def _is_container(value: Any) -> bool:
    return isinstance(value, dict | list) and hasattr(value, "copy")
