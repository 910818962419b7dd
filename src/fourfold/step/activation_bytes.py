"""Activations: what autograd certainly keeps of a forward, counted on a model without values.

kept  the storages that linear and convolution layers have saved for their weights' gradients, and the outputs
Law: every byte counted here is held by a real forward too, from the layer until backward reaches it. What a backend
may choose otherwise, such as attention's scores, and what is checkpointed or offloaded by hooks, is not counted.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fourfold.parts.dropped_arguments import restore_arguments
from fourfold.parts.torch_private import storage_key
from fourfold.step.model_call import call_model
from fourfold.step.tensor_tree import tree_leaves, tree_map

LAYER_FUNCTIONS = {F.linear, F.conv1d, F.conv2d, F.conv3d}
AUTOCAST_DEVICES = ("cpu", "cuda")


def activation_bytes_per_sample(model: nn.Module, inputs: Any, *, is_half_precision: bool) -> float:
    """Bytes that a forward of `model`, a model without memory, keeps of each sample; 0 where it cannot run so.

    `inputs`: those of one sample. `halves`: whether the run computes in two-byte numbers.
    """
    if not all(p.is_meta for p in model.parameters()):
        return 0.0
    try:
        few, more = (_saved_bytes(model, inputs, number, is_half_precision=is_half_precision) for number in (2, 4))
    except Exception:  # A forward that needs values, or more memory than a shape: the bound goes without it.
        return 0.0
    return max(0.0, (more - few) / 2)


def _saved_bytes(model: nn.Module, inputs: Any, num_samples: int, *, is_half_precision: bool) -> float:
    """Bytes kept of a forward of so many samples."""
    saved: weakref.WeakSet[_SavedTensor] = weakref.WeakSet()

    def pack(tensor: Tensor) -> _SavedTensor:
        held = _SavedTensor(tensor)
        saved.add(held)
        return held

    on_meta = tree_map(
        inputs, lambda tensor: torch.empty((num_samples, *tensor.shape[1:]), dtype=tensor.dtype, device="meta")
    )
    watch = _LayerInputMode()
    with torch.device("meta"), watch, torch.autograd.graph.saved_tensors_hooks(pack, lambda held: held.tensor):
        outputs = call_model(model, on_meta)
    # What is alive now is held by the outputs' graph: a branch that the model has dropped is gone.
    storages = {
        storage_key(held.tensor): held.tensor for held in saved if storage_key(held.tensor) in watch.inputs_by_storage
    }
    storages |= {storage_key(tensor): tensor for tensor in tree_leaves(outputs)}
    most = 2 if is_half_precision or watch.is_autocast else 8
    return float(sum(_storage_bytes(tensor, most) for tensor in storages.values()))


class _SavedTensor:
    """A tensor that autograd has saved."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class _LayerInputMode(TorchFunctionMode):
    """Sees the inputs of layers; holds them, so that no storage takes the place of another."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs_by_storage: dict[int, Tensor] = {}
        self.is_autocast = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.is_autocast = self.is_autocast or any(map(torch.is_autocast_enabled, AUTOCAST_DEVICES))
        if func in LAYER_FUNCTIONS and args and isinstance(args[0], Tensor):
            self.inputs_by_storage[storage_key(args[0])] = args[0]
        return func(*args, **restore_arguments(func, args, kwargs or {}))


def _storage_bytes(tensor: Tensor, max_element_bytes: int) -> float:
    """Of its storage, in numbers of at most so many bytes."""
    return tensor.untyped_storage().nbytes() * min(1.0, max_element_bytes / tensor.element_size())
