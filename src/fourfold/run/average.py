"""Average: an exponential moving average of the weights, kept beside the training.

decay  what stays of the average in a step: min(`decay`, (1 + t) / (10 + t)) after t steps
Law: training with an average gives the same weights as training without.

Source of the warm-up: TensorFlow's ExponentialMovingAverage (`num_updates`); without it the average of a short run
is mostly the weights it began with.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor


class Average:
    """The averages of some parameters, by name. Every rank keeps all of them."""

    def __init__(self, weights: Callable[[], Iterable[tuple[str, Tensor]]], decay: float) -> None:
        """`weights()` gives the parameters, one after the other; where that is collective, so is all of this."""
        self._weights, self._decay = weights, decay
        # In half precision a step's small part of the weights would be rounded away.
        self.values: dict[str, Tensor] = {
            name: p.detach().to(torch.float32 if p.element_size() < 4 else p.dtype, copy=True) for name, p in weights()
        }

    @torch.no_grad()
    def update(self, steps: int) -> None:
        """Take in the weights after `steps` steps."""
        share = 1.0 - min(self._decay, (1 + steps) / (10 + steps))
        for name, parameter in self._weights():
            average = self.values[name]
            average.lerp_(parameter.detach().to(average.dtype), share)

    @torch.no_grad()
    def load(self, values: Mapping[str, Tensor]) -> None:
        """Put back what `values` held."""
        for name, value in self.values.items():
            value.copy_(values[name])

    @contextlib.contextmanager
    def applied(self, put: Callable[[Mapping[str, Tensor]], None]) -> Iterator[None]:
        """Within: the model has the averages for weights. `put` replaces weights by name; collective if it is."""
        before = {name: p.detach().clone() for name, p in self._weights()}
        put(self.values)
        try:
            yield
        finally:
            put(before)
