"""Broadcasts: a rank sends a nested value, or the tensors of its model, to all ranks.

tree  dicts, lists, tuples, numbers, strings, None and tensors, nested
spec  a tree as JSON, with each tensor replaced by its dtype, shape and kind of device
Law: nothing is pickled. The spec travels as JSON, tensors as their bytes.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fourfold.comm.communicator import Communicator
from fourfold.words.errors import Problem, TrainingError

PLAIN_TYPES = (bool, int, float, str, type(None))


@torch.no_grad()
def broadcast_tree(communicator: Communicator, tree: Any, *, src: int = 0) -> Any:
    """Rank `src`'s tree, on every rank; rank `src` gets its own object back. Collective.

    Raises TrainingError, on every rank, if the tree contains an object of another type.
    """
    tensors: list[Tensor] = []
    message: dict[str, Any] = {}
    if communicator.rank == src:
        try:
            message["shape"] = _tree_spec(tree, tensors)
        except TrainingError as error:  # Sent to all ranks, so that none waits for tensors that never come.
            message["problem"] = error.problems[0]
    message = communicator.all_gather_json(message)[src]
    if "problem" in message:
        raise TrainingError(Problem(*message["problem"]), where=f"the value of rank {src}")
    if communicator.rank != src:
        tensors = [_empty_tensor(*spec) for spec in _tensor_specs(message["shape"])]
    for tensor in tensors:
        # As bytes: backends cannot send every dtype.
        flat = tensor.detach().reshape(-1).contiguous().view(torch.uint8).to(communicator.device)
        if flat.numel():
            communicator.broadcast(flat, src)
        if communicator.rank != src:
            tensor.copy_(flat.view(tensor.dtype).view(tensor.shape))
    return tree if communicator.rank == src else _rebuild(message["shape"], iter(tensors))


def broadcast_model(communicator: Communicator, model: nn.Module, *, src: int = 0) -> None:
    """Give all ranks the parameters and buffers of rank `src`. Collective."""
    for tensor in (*model.parameters(), *model.buffers()):
        communicator.broadcast(tensor.data, src)
    torch.autograd.graph.increment_version(list(model.parameters()))


def _tree_spec(tree: Any, tensors: list[Tensor]) -> dict[str, Any]:
    if isinstance(tree, Tensor):
        tensors.append(tree)
        return {"tensor": [str(tree.dtype).removeprefix("torch."), list(tree.shape), tree.device.type]}
    if isinstance(tree, dict):
        return {"dict": [[_tree_spec(key, tensors), _tree_spec(value, tensors)] for key, value in tree.items()]}
    if type(tree) in (list, tuple):
        return {type(tree).__name__: [_tree_spec(value, tensors) for value in tree]}
    if type(tree) not in PLAIN_TYPES:
        need = "dicts, lists, tuples, numbers, strings, None, tensors"
        raise TrainingError(Problem(f"a {type(tree).__name__}", need, "a plain value instead"))
    return {"value": tree}


def _tensor_specs(spec: dict[str, Any]) -> Iterator[tuple[str, list[int], str]]:
    """Dtype, shape and kind of device of each tensor, in the order of `_tree_spec`."""
    ((kind, content),) = spec.items()
    if kind == "tensor":
        yield content
    elif kind == "dict":
        for key, value in content:
            yield from _tensor_specs(key)
            yield from _tensor_specs(value)
    elif kind != "value":
        for value in content:
            yield from _tensor_specs(value)


def _rebuild(spec: dict[str, Any], tensors: Iterator[Tensor]) -> Any:
    ((kind, content),) = spec.items()
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
