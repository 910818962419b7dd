"""Taps: the gradients of what embeddings give, and of inputs that hold features, are recorded in backward.

Law: a tap changes no number and no gradient.

B samples · L length · l = L / sp
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fourfold.run.batch import has_token_dim, tree_map
from fourfold.run.sequence.recorded_attention import OUTPUT, is_in_backward, tap_output
from fourfold.run.sequence.tokens import Share
from fourfold.run.sequence.where import Names


class Tap(NamedTuple):
    """One tensor, where it was made, and what backward has found."""

    where: str
    output: Tensor
    gradients: dict[str, Tensor]


class Taps:
    """The taps of one pass, in the order of forward."""

    def __init__(self, names: Names, share: Share) -> None:
        self._names, self._share = names, share
        self.found: list[Tap] = []

    def inputs(self, inputs: Mapping[str, Any]) -> Any:
        """The model's inputs, those that hold the features of each token with a gradient of their own."""

        def tapped(tensor: Tensor) -> Tensor:
            is_tokens = tensor.dim() == 3 and tensor.shape[1] in (self._share.length, self._share.size)
            # A square one may be a mask, whose gradient is of no token.
            if not is_tokens or not tensor.is_floating_point() or tensor.shape[2] == self._share.length:
                return tensor
            return self._tap(tensor.detach().clone().requires_grad_(torch.is_grad_enabled()), "the inputs")

        return tree_map(inputs, tapped)

    def embedding(self, func: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """Stands in the place of torch's embedding."""
        output = func(*args, **kwargs)
        # What a checkpoint computes again is not counted again.
        return output.clone() if is_in_backward() else self._tap(output, self._names.here)

    def _tap(self, tensor: Tensor, where: str) -> Tensor:
        self.found.append(Tap(where, tensor.detach(), {}))
        return tap_output(tensor, self.found[-1].gradients, OUTPUT)


def rows_shape(whole: Tensor, share: Share) -> torch.Size | None:
    """The shape that a shard of a token tensor has; None for a tensor without tokens."""
    if not has_token_dim(whole, share.length):
        return None
    return torch.Size((whole.shape[0], share.size, *whole.shape[2:]))
