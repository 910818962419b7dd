"""The cut: a whole model becomes this rank's part of it.

Law: a rank that has cut a model holds no element that its shards do not name; whole parameters and buffers are the
first rank's, on all of them.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

from fourfold.axes.tensor.rules.layout import TensorLayout
from fourfold.axes.tensor.work.layers import split_layer
from fourfold.axes.tensor.work.split_region import SplitRegion
from fourfold.plan.tensor_shard import TensorShard
from fourfold.torch_kit.deferred_init import InitialModel, InitialWeights


class TensorRanks(Protocol):
    """Of a communicator along tp, what a cut needs."""

    @property
    def rank(self) -> int: ...

    def broadcast(self, tensor: torch.Tensor) -> Any:
        """The first rank's values go to all."""
        ...


@torch.no_grad()
def cut_model(
    initial: InitialModel,
    layout: TensorLayout,
    region: SplitRegion,
    tensor_ranks: TensorRanks,
    is_own: Callable[[str], bool],
) -> None:
    """Cut a model in place. Collective: the first rank's parameters and buffers go to all.

    is_own  whether this rank's stage computes with a parameter; others get shapes only, and no memory

    Of parameters whose parts can be had by themselves, such as those in files, each rank has its own.
    Parameters stay the same objects, so an optimizer made of them goes on with the shards.
    """
    model, index = initial.model, tensor_ranks.rank
    for name, parameter in model.named_parameters():  # each tied parameter once
        part = _own_part(initial.weights, parameter, layout.shards[name][index], tensor_ranks)
        parameter.data = part if is_own(name) else part.new_zeros(()).expand(part.shape)
    for buffer in model.buffers():
        tensor_ranks.broadcast(buffer)
    for name, counts in layout.counts.items():
        module = model.get_submodule(name)
        for attribute, count in counts.items():
            setattr(module, attribute, count)
    for name, style in layout.styles.items():
        module = model.get_submodule(name)
        prefix = f"{name}." if name else ""
        own = {key: layout.shards[f"{prefix}{key}"][index] for key, _ in module.named_parameters(recurse=False)}
        split_layer(module, style, region, own)


def _own_part(
    weights: InitialWeights, parameter: nn.Parameter, shard: TensorShard, tensor_ranks: TensorRanks
) -> torch.Tensor:
    """This rank's part of a parameter's initial values. Collective."""
    part = None if shard.is_whole else weights.part(parameter, shard)
    if part is not None:
        return part
    whole = weights.whole(parameter)  # if weights are deferred: one at a time
    tensor_ranks.broadcast(whole)
    return whole if shard.is_whole else local_part(whole, shard)


def local_part(whole: torch.Tensor, shard: TensorShard) -> torch.Tensor:
    """A copy of the pieces that a shard names, in memory of its own."""
    if shard.is_whole:  # of a scalar too, which has no dim to take a piece of
        return whole.clone(memory_format=torch.contiguous_format)
    pieces = [whole.narrow(shard.dim, piece.start, piece.length) for piece in shard.pieces]
    return torch.cat(pieces, shard.dim) if len(pieces) > 1 else pieces[0].clone(memory_format=torch.contiguous_format)
