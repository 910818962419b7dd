"""Gradient hooks: whether parameter hooks may see the gradients of the parts of a batch one by one.

additive  hook(a + b) = hook(a) + hook(b), as for a hook that scales or masks
Law: if a batch is split into parts, a hook of `Tensor.register_hook` that is not additive for random gradients is
refused. It would change the gradient of each part (clamp or normalize it, for example), and not their sum.

Hooks of `register_multi_grad_hook` return nothing, and must not write (torch says so): they are not called here.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from fourfold.axes.tensor.work.layers import local_part
from fourfold.model.fixed_random import without_randomness
from fourfold.plan.param_spec import TensorShard
from fourfold.torch_kit.torch_private import is_multi_grad_hook, tensor_hooks
from fourfold.words.error_notes import format_names
from fourfold.words.errors import Problem

# The sizes of the random gradients: a hook's bound or threshold lies between two of them.
GRADIENT_SCALES = (1e-6, 1e-4, 1e-2, 1.0, 1e2)
# Relative to the largest number in the result, by the size in bytes of a real number.
TOLERANCE = {8: 1e-9, 4: 1e-4, 2: 5e-2, 1: 2e-1}
SEED = 13


def hook_problems(trained: Mapping[str, nn.Parameter], num_parts: int) -> list[Problem]:
    """What is wrong with the hooks of the trained parameters, if a batch is split into so many parts."""
    names = [name for name, p in trained.items() if not _is_additive(p)]
    if not names:
        return []
    got = f"a hook of {format_names(names)} that is not additive: hook(a + b) differs from hook(a) + hook(b);"
    got += f" and a batch that is split into {num_parts} parts"
    need = "hooks that scale or mask: each part's gradient passes through them before the gradients are summed"
    attempt = "clip=… to limit the norm, or optimizer.register_step_pre_hook(…), which sees the full gradient"
    return [Problem(got, need, attempt)]


def treats_parts_alike(parameter: nn.Parameter, shard: TensorShard) -> bool:
    """Whether a split weight's hooks do with a part of its gradient what they do with the same part of all of it."""
    hooks = tensor_hooks(parameter)
    if not hooks or not parameter.numel():
        return True
    if any(map(is_multi_grad_hook, hooks)):  # autograd knows its tensors by their old shapes
        return False
    try:
        return all(
            _is_close(local_part(_hooked(parameter, a), shard), _hooked(parameter, local_part(a, shard)))
            for a, _ in _random_gradients(parameter, shard.shape)
        )
    except (RuntimeError, IndexError, ValueError):  # the hook fails with a part, as one that masks the whole does
        return False


def _is_additive(parameter: nn.Parameter) -> bool:
    if not _changing_hooks(parameter) or not parameter.numel():
        return True
    return all(
        _is_close(_hooked(parameter, a + b), _hooked(parameter, a) + _hooked(parameter, b))
        for a, b in _random_gradients(parameter, parameter.shape)
    )


def _changing_hooks(parameter: nn.Parameter) -> list[Callable[[Tensor], Tensor | None]]:
    """The hooks of a parameter that may change its gradient."""
    return [hook for hook in tensor_hooks(parameter) if not is_multi_grad_hook(hook)]


@torch.no_grad()
def _hooked(parameter: nn.Parameter, gradient: Tensor) -> Tensor:
    """What the hooks of a parameter make of a gradient."""
    gradient = gradient.clone()
    with without_randomness(parameter.device):
        for hook in _changing_hooks(parameter):
            result = hook(gradient)
            gradient = gradient if result is None else result
    return gradient


def _random_gradients(parameter: nn.Parameter, shape: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs of random gradients of a parameter, in this shape."""
    generator = torch.Generator().manual_seed(SEED)
    dtype = torch.complex64 if parameter.is_complex() else torch.float32
    for size in GRADIENT_SCALES * max(1, min(16, 1024 // parameter.numel())):
        a, b = (torch.randn(tuple(shape), dtype=dtype, generator=generator) * size for _ in range(2))
        yield a.to(parameter), b.to(parameter)


def _is_close(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape:
        return False
    width = a.element_size() // (2 if a.is_complex() else 1)
    largest = max(float(a.abs().max()), float(b.abs().max()))
    smallest = torch.finfo(a.dtype).tiny * torch.finfo(a.dtype).eps
    return float((a - b).abs().max()) <= TOLERANCE[width] * largest + 4 * smallest
