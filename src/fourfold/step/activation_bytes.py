"""Activation bytes: what autograd certainly saves in a forward, measured with a meta model.

saved  the storages that linear and convolution layers save for the gradients of their weights, and the outputs
Law: a real forward holds every byte that is counted here, from the layer until backward reaches it. Not counted: what a
backend may choose to save, such as attention scores, and what is checkpointed or offloaded by hooks.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fourfold.model.model_call import call_model
from fourfold.torch_kit.dropped_arguments import restore_arguments
from fourfold.torch_kit.tensor_tree import tree_leaves, tree_map
from fourfold.torch_kit.torch_private import storage_key

LAYER_FUNCTIONS = {F.linear, F.conv1d, F.conv2d, F.conv3d}
AUTOCAST_DEVICES = ("cpu", "cuda")


def activation_bytes_per_sample(model: nn.Module, inputs: Any, *, is_half_precision: bool) -> float:
    """Bytes that a forward of a meta model saves for each sample; 0 if the model cannot run on the meta device.

    `inputs`: of one sample. `is_half_precision`: the run computes in two-byte numbers.
    """
    if not all(p.is_meta for p in model.parameters()):
        return 0.0
    try:
        two, four = (_saved_bytes(model, inputs, number, is_half_precision=is_half_precision) for number in (2, 4))
    except Exception:  # a forward that needs values: the bound leaves activations out
        return 0.0
    return max(0.0, (four - two) / 2)


def _saved_bytes(model: nn.Module, inputs: Any, num_samples: int, *, is_half_precision: bool) -> float:
    """Bytes saved in a forward of `num_samples` samples."""
    saved: weakref.WeakSet[_SavedTensor] = weakref.WeakSet()

    def pack(tensor: Tensor) -> _SavedTensor:
        entry = _SavedTensor(tensor)
        saved.add(entry)
        return entry

    on_meta = tree_map(
        inputs, lambda tensor: torch.empty((num_samples, *tensor.shape[1:]), dtype=tensor.dtype, device="meta")
    )
    watch = _LayerInputMode()
    with torch.device("meta"), watch, torch.autograd.graph.saved_tensors_hooks(pack, lambda entry: entry.tensor):
        outputs = call_model(model, on_meta)
    # The entries that are still alive are held by the outputs' graph: a branch that the model dropped is freed.
    storages = {
        storage_key(each.tensor): each.tensor for each in saved if storage_key(each.tensor) in watch.inputs_by_storage
    }
    storages |= {storage_key(tensor): tensor for tensor in tree_leaves(outputs)}
    max_element_bytes = 2 if is_half_precision or watch.is_autocast else 8
    return float(sum(_storage_bytes(tensor, max_element_bytes) for tensor in storages.values()))


class _SavedTensor:
    """A tensor that autograd has saved; alive as long as the graph holds it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class _LayerInputMode(TorchFunctionMode):
    """Records the inputs of layers, and holds them, so that no storage address is reused."""

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
    """Bytes of a tensor's storage, with elements of at most `max_element_bytes`."""
    return tensor.untyped_storage().nbytes() * min(1.0, max_element_bytes / tensor.element_size())
