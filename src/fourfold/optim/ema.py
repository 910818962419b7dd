"""EMA: an exponential moving average of the weights.

decay  the factor of the old average in an update after t steps: d = min(`decay`, (1 + t) / (10 + t));
       new average = d · average + (1 − d) · weights
Law: training with an average gives the same weights as training without.

Source of the warm-up: TensorFlow's ExponentialMovingAverage (`num_updates`). Without it, the average of a short run
is mostly the initial weights.
"""

from collections.abc import Mapping

import torch
from torch import Tensor


class EMA:
    """The averages of weights, by name: of this rank's shards, as `TrainStep.weight_shards` gives them."""

    def __init__(self, weights: Mapping[str, Tensor], decay: float) -> None:
        self._weights, self._decay = dict(weights), decay
        # In half precision the small contribution of a step would be rounded away.
        self.values: dict[str, Tensor] = {
            name: p.detach().to(torch.float32 if p.element_size() < 4 else p.dtype, copy=True)
            for name, p in weights.items()
        }

    @torch.no_grad()
    def update(self, num_steps: int) -> None:
        """Update the averages with the current weights. `num_steps`: steps so far; with local steps, syncs so far."""
        new_fraction = 1.0 - min(self._decay, (1 + num_steps) / (10 + num_steps))
        for name, weight in self._weights.items():
            average = self.values[name]
            average.lerp_(weight.detach().to(average.dtype), new_fraction)

    @torch.no_grad()
    def load_average(self, name: str, value: Tensor) -> None:
        """Restore one of the saved `values`, given flat."""
        self.values[name].copy_(value.view(self.values[name].shape))
