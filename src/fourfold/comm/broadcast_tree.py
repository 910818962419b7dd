"""Broadcasts: a rank sends a nested value, or the tensors of its model, to all ranks.

tree  dicts, lists, tuples, numbers, strings, None and tensors, nested
spec  of a tensor: its dtype, shape and kind of device
Law: nothing is pickled. The tree and the specs of its tensors travel as JSON, tensors as their bytes.
"""

from typing import Any

import torch
from torch import Tensor, nn

from fourfold.comm.communicator import Communicator
from fourfold.torch_kit.tensor_tree import skeleton_of, tree_of
from fourfold.words.errors import Problem, TrainingError

PLAIN_TYPES = (bool, int, float, str, type(None), list, tuple)


@torch.no_grad()
def broadcast_tree(communicator: Communicator, tree: Any, *, src: int = 0) -> Any:
    """Rank `src`'s tree, on every rank; rank `src` gets its own object back. Collective.

    Raises TrainingError, on every rank, if the tree contains an object of another type.
    """
    tensors: list[Tensor] = []
    message: dict[str, Any] = {}
    if communicator.rank == src:
        try:
            message["tree"] = skeleton_of(tree, tensors, _check)
            message["tensors"] = list(map(_spec, tensors))
        except TrainingError as error:  # Sent to all ranks, so that none waits for tensors that never come.
            message["problem"] = error.problems[0]
    message = communicator.all_gather_json(message)[src]
    if "problem" in message:
        raise TrainingError(Problem(*message["problem"]), where=f"the value of rank {src}")
    if communicator.rank != src:
        tensors = [_empty_tensor(*spec) for spec in message["tensors"]]
    for tensor in tensors:
        # As bytes: backends cannot send every dtype.
        flat = tensor.detach().reshape(-1).contiguous().view(torch.uint8).to(communicator.device)
        if flat.numel():
            communicator.broadcast(flat, src)
        if communicator.rank != src:
            tensor.copy_(flat.view(tensor.dtype).view(tensor.shape))
    return tree if communicator.rank == src else tree_of(message["tree"], tensors)


def broadcast_model(communicator: Communicator, model: nn.Module, *, src: int = 0) -> None:
    """Give all ranks the parameters and buffers of rank `src`. Collective."""
    for tensor in (*model.parameters(), *model.buffers()):
        communicator.broadcast(tensor.data, src)
    torch.autograd.graph.increment_version(list(model.parameters()))


def _check(value: Any) -> None:
    if not isinstance(value, Tensor | dict) and type(value) not in PLAIN_TYPES:
        need = "dicts, lists, tuples, numbers, strings, None, tensors"
        raise TrainingError(Problem(f"a {type(value).__name__}", need, "a plain value instead"))


def _spec(tensor: Tensor) -> list[Any]:
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), tensor.device.type]


def _empty_tensor(dtype: str, sizes: list[int], device: str) -> Tensor:
    return torch.empty(sizes, dtype=getattr(torch, dtype), device=device)
