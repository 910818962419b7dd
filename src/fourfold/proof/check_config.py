"""Check configurations: how a dry run computes, and which of these ways can be had.

strictest  the configuration that proves most; a dry run falls back on the next one where a configuration is unavailable
Law: all ranks run the same configuration, so its memory must be there on every one of them.
"""

from typing import NamedTuple

import psutil
import torch
from torch import nn

_WEIGHTS = {"free": "random weights", "near": "weights near the model's own", "own": "the model's own weights"}


class CheckConfig(NamedTuple):
    """The dtype (None: the model's), the weights (a key of `_WEIGHTS`), and whether gradients are compared."""

    dtype: torch.dtype | None
    weights: str
    has_gradients: bool

    def __str__(self) -> str:
        dtype = "the model's own dtype" if self.dtype is None else str(self.dtype).removeprefix("torch.")
        return f"in {dtype}, with {_WEIGHTS[self.weights]}{'' if self.has_gradients else ', without gradients'}"


STRICTEST_SEQUENCE_CHECK = CheckConfig(torch.float64, "free", True)
SEQUENCE_CHECKS = (STRICTEST_SEQUENCE_CHECK, CheckConfig(torch.float64, "near", True), CheckConfig(None, "free", True))
WEAKEST_SEQUENCE_CHECK = CheckConfig(None, "own", False)
STRICTEST_LOSS_CHECK = CheckConfig(torch.float64, "near", True)
LOSS_CHECKS = (STRICTEST_LOSS_CHECK, CheckConfig(torch.float64, "own", True), CheckConfig(None, "own", True))


class CheckUnavailable(Exception):
    """A model cannot be checked with one configuration. Another one may work."""


class MemoryFit(NamedTuple):
    """Whether weights and gradients of the dry run fit into memory: in float64, and in the model's dtype."""

    fits_float64: bool = True
    fits_model_dtype: bool = True


def find_memory_fit(
    model: nn.Module, device: torch.device, *, num_local_ranks: int, num_activations: int = 0
) -> MemoryFit:
    """Whether a dry run fits into the free memory of this device, which `num_local_ranks` ranks share.

    `num_activations` is how many numbers autograd keeps of a forward.
    """
    elements = sum(p.numel() for p in model.parameters())
    weight_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    # The weights and their gradients.
    float64_bytes = 2 * 8 * elements + 8 * num_activations
    return fit_of_bytes(float64_bytes, 2 * weight_bytes, device, num_local_ranks=num_local_ranks)


def fit_of_bytes(
    float64_bytes: int, model_dtype_bytes: int, device: torch.device, *, num_local_ranks: int
) -> MemoryFit:
    """Whether so many bytes of each rank fit into the free memory of this device, which `num_local_ranks` share."""
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    elif device.type == "cpu":
        free = psutil.virtual_memory().available
    else:
        return MemoryFit()
    return MemoryFit(float64_bytes * num_local_ranks <= free, model_dtype_bytes * num_local_ranks <= free)
