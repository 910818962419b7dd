"""Gradient taps: backward records the gradients of embeddings' outputs, and of inputs that hold features.

Law: a tap changes no number and no gradient.

B samples · L length · l = L / cp
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fourfold.axes.context.attach.attention_replay import OUTPUT, tap_output
from fourfold.axes.context.attach.module_tracker import ModuleTracker
from fourfold.axes.context.attach.token_shards import TokenShard
from fourfold.model.batch import has_token_dim
from fourfold.torch_kit.tensor_tree import tree_map
from fourfold.torch_kit.torch_private import is_in_backward


class GradTap(NamedTuple):
    """One tensor, the module that made it, and the gradients that backward has recorded."""

    module_name: str
    output: Tensor
    gradients: dict[str, Tensor]


class GradTaps:
    """The taps of one pass, in forward order."""

    def __init__(self, tracker: ModuleTracker, shard: TokenShard) -> None:
        self._tracker, self._shard = tracker, shard
        self.taps: list[GradTap] = []

    def tap_inputs(self, inputs: Mapping[str, Any]) -> Any:
        """The model's inputs, with a tap on each that holds features of tokens."""

        def tapped(tensor: Tensor) -> Tensor:
            is_tokens = tensor.dim() == 3 and tensor.shape[1] in (self._shard.length, self._shard.size)
            # A square tensor may be a mask, whose gradient belongs to no token.
            if not is_tokens or not tensor.is_floating_point() or tensor.shape[2] == self._shard.length:
                return tensor
            return self._tap(tensor.detach().clone().requires_grad_(torch.is_grad_enabled()), "the inputs")

        return tree_map(inputs, tapped)

    def tap_embedding(self, func: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """Replaces torch's embedding function."""
        output = func(*args, **kwargs)
        # The second forward of a checkpoint is not tapped again.
        return output.clone() if is_in_backward() else self._tap(output, self._tracker.current_module_name)

    def _tap(self, tensor: Tensor, module_name: str) -> Tensor:
        self.taps.append(GradTap(module_name, tensor.detach(), {}))
        return tap_output(tensor, self.taps[-1].gradients, OUTPUT)


def shard_shape(full: Tensor, shard: TokenShard) -> torch.Size | None:
    """The shape of a shard of a token tensor; None for a tensor without tokens."""
    if not has_token_dim(full, shard.length):
        return None
    return torch.Size((full.shape[0], shard.size, *full.shape[2:]))
