"""Spread: what one rank holds, brought to all ranks.

tree   dicts, lists, tuples, numbers, texts, None and tensors, nested
shape  a tree as JSON, each tensor replaced by its dtype, sizes and kind of device
Law: nothing is pickled; the shape travels as JSON, tensors as their bytes.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fourfold.parts.comm import transports
from fourfold.words.errors import Problem, TrainingError

PLAIN_TYPES = (bool, int, float, str, type(None))


@torch.no_grad()
def broadcast_tree(communicator: transports.Communicator, tree: Any, *, src: int = 0) -> Any:
    """Rank `source`'s tree, on every rank; that rank gets its own back. Collective.

    Raises TrainingError, on every rank, where something in the tree is none of the kinds above.
    """
    tensors: list[Tensor] = []
    told: dict[str, Any] = {}
    if communicator.rank == src:
        try:
            told["shape"] = _tree_spec(tree, tensors)
        except TrainingError as error:  # Told to all: nobody may wait for tensors that never come.
            told["problem"] = error.problems[0]
    told = communicator.all_gather_json(told)[src]
    if "problem" in told:
        raise TrainingError(Problem(*told["problem"]), where=f"what rank {src} holds")
    if communicator.rank != src:
        tensors = [_empty_tensor(*meta) for meta in _tensor_specs(told["shape"])]
    for tensor in tensors:
        # As bytes: not every dtype travels by itself.
        flat = tensor.detach().reshape(-1).contiguous().view(torch.uint8).to(communicator.device)
        if flat.numel():
            communicator.broadcast(flat, src)
        if communicator.rank != src:
            tensor.copy_(flat.view(tensor.dtype).view(tensor.shape))
    return tree if communicator.rank == src else _rebuild(told["shape"], iter(tensors))


def _tree_spec(tree: Any, tensors: list[Tensor]) -> dict[str, Any]:
    if isinstance(tree, Tensor):
        tensors.append(tree)
        return {"tensor": [str(tree.dtype).removeprefix("torch."), list(tree.shape), tree.device.type]}
    if isinstance(tree, dict):
        return {"dict": [[_tree_spec(key, tensors), _tree_spec(value, tensors)] for key, value in tree.items()]}
    if type(tree) in (list, tuple):
        return {type(tree).__name__: [_tree_spec(value, tensors) for value in tree]}
    if type(tree) not in PLAIN_TYPES:
        kinds = "dicts, lists, tuples, numbers, texts, None, tensors"
        raise TrainingError(Problem(f"a {type(tree).__name__}", kinds, "a plain value instead"))
    return {"value": tree}


def _tensor_specs(shape: dict[str, Any]) -> Iterator[tuple[str, list[int], str]]:
    """Dtype, sizes and kind of device of each tensor, in the order of `_shape`."""
    ((kind, content),) = shape.items()
    if kind == "tensor":
        yield content
    elif kind == "dict":
        for key, value in content:
            yield from _tensor_specs(key)
            yield from _tensor_specs(value)
    elif kind != "value":
        for value in content:
            yield from _tensor_specs(value)


def _rebuild(shape: dict[str, Any], tensors: Iterator[Tensor]) -> Any:
    ((kind, content),) = shape.items()
    if kind == "tensor":
        return next(tensors)
    if kind == "dict":
        return {_rebuild(key, tensors): _rebuild(value, tensors) for key, value in content}
    if kind == "value":
        return content
    values = [_rebuild(value, tensors) for value in content]
    return tuple(values) if kind == "tuple" else values


def _empty_tensor(dtype: str, sizes: list[int], device: str) -> Tensor:
    return torch.empty(sizes, dtype=getattr(torch, dtype), device=device)
