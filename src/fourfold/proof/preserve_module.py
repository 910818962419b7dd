"""Preserving a module: a dry run leaves no trace in the attributes and gradients of a model.

A model may cache tensors in attributes, such as tables of positions. In a dry run they would be made in float64.
Law: on exit, every attribute of every module has its value from before, and so have the contents of dicts, lists and
plain tensors among them.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fourfold.proof.weight_write_check import is_identical


@contextlib.contextmanager
def preserve_module(model: nn.Module) -> Iterator[None]:
    """Within, forwards and backwards of the model leave no trace; its gradients are None."""
    modules = list(model.modules())
    attributes = [dict(vars(module)) for module in modules]
    contents = [(value, value.copy()) for each in attributes for value in each.values() if _is_container(value)]
    tensors = [(value, value.detach().clone()) for each in attributes for value in each.values() if _is_plain(value)]
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
        for tensor, before in tensors:
            if not is_identical(tensor, before):
                with torch.no_grad():
                    tensor.copy_(before)
        for parameter, gradient in gradients:
            parameter.grad = gradient


def _is_container(value: Any) -> bool:
    return isinstance(value, dict | list) and hasattr(value, "copy")


def _is_plain(value: Any) -> bool:
    """Whether this is a tensor with numbers of its own: neither of a device without memory, nor of a class that stands
    in for one."""
    return type(value) is Tensor and value.layout is torch.strided and value.device.type != "meta"
