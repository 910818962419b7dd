"""Mixed precision: the model computes in a two-byte dtype, and takes and returns float32.

full precision  parameters that keep their dtype: those of batch normalization, because of its statistics, and integers
cast            all other floating-point parameters, also frozen ones
Law: floating-point inputs are cast to the model's dtype, and outputs in that dtype to float32.

Buffers keep their dtype: two bytes would spoil running statistics and position tables. Other normalizations (layer,
group, RMS) are cast: torch computes their means and variances in float32 anyway.
"""

import functools
from typing import Any

import torch
from torch import Tensor, nn

from fourfold.axes.data.rules.buckets import Bucket
from fourfold.plan.precision import COMPUTE_FORMATS, is_float
from fourfold.torch_kit.torch_private import BatchNormBase, forward_pre_hooks, tree_map_only

# ---- Dtypes: what buckets are made of, and what sums are made in ----------------------------------------------------


def bucket_dtype(bucket: Bucket) -> torch.dtype:
    """The dtype that a bucket names."""
    return getattr(torch, bucket.dtype)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums and residuals: float32, or the numbers' own dtype if that is wider."""
    return torch.promote_types(dtype, torch.float32)


def autocast_device(tensor: Tensor) -> str:
    """The type of the device whose autocast applies to a tensor. On the meta device, which has none, that of a CPU."""
    return "cpu" if tensor.is_meta else tensor.device.type


def full_precision_params(model: nn.Module) -> set[str]:
    """The names of the parameters that keep their dtype."""
    norms = [module for module in model.modules() if isinstance(module, BatchNormBase)]
    norm_ids = {id(p) for module in norms for p in module.parameters(recurse=False)}
    return {
        name
        for name, p in model.named_parameters(remove_duplicate=False)
        if id(p) in norm_ids or not is_float(str(p.dtype).removeprefix("torch."))
    }


@torch.no_grad()
def cast_model(model: nn.Module, precision: str) -> None:
    """Cast frozen parameters to the dtype of `precision`, and from now on inputs and outputs too.

    Trainable parameters are cast when they move into their buckets.
    """
    dtype = getattr(torch, COMPUTE_FORMATS[precision].dtype)
    full_precision = full_precision_params(model)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad and name not in full_precision:
            parameter.data = parameter.data.to(dtype)
    model.register_forward_pre_hook(functools.partial(_cast_inputs, dtype), with_kwargs=True)
    model.register_forward_hook(functools.partial(_cast_outputs, dtype))


def find_cast_module(model: nn.Module) -> str | None:
    """The name of a module that `cast_model` was called on before; None if there is none."""
    for name, module in model.named_modules():
        hooks = [hook for hook in forward_pre_hooks(module) if isinstance(hook, functools.partial)]
        if any(hook.func is _cast_inputs for hook in hooks):
            return name or "the model"
    return None


def _cast_inputs(dtype: torch.dtype, model: nn.Module, args: Any, kwargs: Any) -> Any:
    return tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, (args, kwargs))


def _cast_outputs(dtype: torch.dtype, model: nn.Module, args: Any, output: Any) -> Any:
    return tree_map_only(Tensor, lambda t: t.float() if t.dtype == dtype else t, output)
