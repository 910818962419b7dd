"""Average: an exponential moving average of the weights, kept beside the training.

decay  what stays of the average in a step: min(`decay`, (1 + t) / (10 + t)) after t steps
Law: training with an average gives the same weights as training without.

Source of the warm-up: TensorFlow's ExponentialMovingAverage (`num_updates`); without it the average of a short run
is mostly the weights it began with.
"""

from collections.abc import Mapping

import torch
from torch import Tensor


class EMA:
    """The averages of some weights, by name: of what this rank has of them, as `TrainStep.shares_of_weights` gives."""

    def __init__(self, weights: Mapping[str, Tensor], decay: float) -> None:
        self._weights, self._decay = dict(weights), decay
        # In half precision a step's small part of the weights would be rounded away.
        self.values: dict[str, Tensor] = {
            name: p.detach().to(torch.float32 if p.element_size() < 4 else p.dtype, copy=True)
            for name, p in weights.items()
        }

    @torch.no_grad()
    def update(self, num_steps: int) -> None:
        """Take in the weights after `steps` steps."""
        share = 1.0 - min(self._decay, (1 + num_steps) / (10 + num_steps))
        for name, weight in self._weights.items():
            average = self.values[name]
            average.lerp_(weight.detach().to(average.dtype), share)

    @torch.no_grad()
    def load(self, values: Mapping[str, Tensor]) -> None:
        """Put back what `values` held."""
        for name, value in self.values.items():
            value.copy_(values[name])
