"""Lowered: a model that computes in two-byte numbers, and looks from outside as if it did not.

kept     parameters that stay what they are: those of batch normalization, whose statistics are kept in full; integers
lowered  all other floating-point parameters, frozen ones too
Law: floating-point inputs come in as the user has them and go on in the model's numbers; outputs come out as float32.

Buffers stay what they are: running statistics, and tables of positions, which two bytes would spoil. Other
normalizations (layer, group, RMS) are lowered: torch takes their means and variances in float32 all the same.
"""

import functools
from typing import Any

import torch
from torch import Tensor, nn

from fourfold.parts.torch_private import BatchNormBase, forward_pre_hooks, tree_map_only
from fourfold.plan.precision import COMPUTE_FORMATS, is_float


def full_precision_params(model: nn.Module) -> set[str]:
    """The names of the parameters that stay what they are."""
    normalizing = [module for module in model.modules() if isinstance(module, BatchNormBase)]
    whole = {id(p) for module in normalizing for p in module.parameters(recurse=False)}
    return {
        name
        for name, p in model.named_parameters(remove_duplicate=False)
        if id(p) in whole or not is_float(str(p.dtype).removeprefix("torch."))
    }


@torch.no_grad()
def cast_model(model: nn.Module, precision: str) -> None:
    """Have the model compute in the numbers of `precision`: frozen parameters, inputs and outputs.

    Trainable parameters are the update's: they are moved by `data.rehome`.
    """
    dtype = getattr(torch, COMPUTE_FORMATS[precision].dtype)
    stay = full_precision_params(model)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad and name not in stay:
            parameter.data = parameter.data.to(dtype)
    model.register_forward_pre_hook(functools.partial(_cast_inputs, dtype), with_kwargs=True)
    model.register_forward_hook(functools.partial(_cast_outputs, dtype))


def find_cast_module(model: nn.Module) -> str | None:
    """The name of a module of the model that has been lowered before; None where there is none."""
    for name, module in model.named_modules():
        hooks = [hook for hook in forward_pre_hooks(module) if isinstance(hook, functools.partial)]
        if any(hook.func is _cast_inputs for hook in hooks):
            return name or "the model"
    return None


def _cast_inputs(dtype: torch.dtype, model: nn.Module, args: Any, kwargs: Any) -> Any:
    return tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, (args, kwargs))


def _cast_outputs(dtype: torch.dtype, model: nn.Module, args: Any, output: Any) -> Any:
    return tree_map_only(Tensor, lambda t: t.float() if t.dtype == dtype else t, output)
