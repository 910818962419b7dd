"""Memory order: the order in which a parameter's elements lie in flats: that of its own memory.

A parameter in `torch.channels_last` has its channels innermost, and kernels for it need them there.
Law: what is in a parameter's shape is in the order of its dims; what is flat is in memory order.
"""

import logging
from collections.abc import Mapping

from torch import Tensor

from fourfold.comm.communicator import Communicator
from fourfold.torch_kit.tensor_reader import MemoryReader, ParameterState

log = logging.getLogger("fourfold")


def dims_in_memory(like: Tensor) -> tuple[int, ...]:
    """The dims of a tensor, the outermost in memory first."""
    strides = like.stride()
    return tuple(sorted(range(like.ndim), key=lambda dim: -strides[dim]))


def is_in_order(tensor: Tensor) -> bool:
    """Whether the memory order is that of the dims. Of a placeholder, whose strides are 0, it is."""
    return dims_in_memory(tensor) == tuple(range(tensor.ndim))


def flat_of(values: Tensor, like: Tensor) -> Tensor:
    """The elements of `values` in the memory order of `like`, which has the same shape; a copy unless they lie so."""
    return values.permute(dims_in_memory(like)).reshape(-1)


def shaped(flat: Tensor, like: Tensor) -> Tensor:
    """A view of a flat in the shape and memory order of `like`."""
    dims = dims_in_memory(like)
    return flat.view([like.shape[dim] for dim in dims]).permute([dims.index(dim) for dim in range(like.ndim)])


def state_in_memory_order(state: ParameterState, like: Tensor) -> ParameterState:
    """The state of a parameter, whose tensors are read in the memory order of `like`."""
    if is_in_order(like):
        return state
    whole = {key: each.read(0, like.numel()).view(like.shape) for key, each in state.tensors.items()}
    return state._replace(tensors={key: MemoryReader(flat_of(each, like)) for key, each in whole.items()})


def agree_on_memory_order(parameters: Mapping[str, Tensor], ranks: Communicator, *, is_possible: bool) -> None:
    """Weights keep their memory order if it is possible and the same on all ranks; else they become contiguous.

    Before anything is made that has views of flats. Collective.
    """
    orders = {name: list(dims_in_memory(each)) for name, each in parameters.items()}
    is_same = all(each == orders for each in ranks.all_gather_json(orders))
    lost = [] if is_possible and is_same else [name for name, each in parameters.items() if not is_in_order(each)]
    for name in lost:
        parameters[name].data = parameters[name].data.contiguous()
    if lost and ranks.rank == 0:
        why = "the plan shards them, or keeps masters, averages or codes of them" if is_same else "ranks differ in it"
        log.warning("%s does not keep its memory order (channels_last?), and %d more: %s", lost[0], len(lost) - 1, why)
