"""Gradient hooks: whether the hooks of parameters may see the gradients of parts of a batch, one by one.

Law: a hook of `Tensor.register_hook` whose result for a sum is not the sum of its results is refused where a batch is
cut: it would clamp or normalize what each part adds to the gradient, and not the gradient.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from fourfold.parts.torch_private import tensor_hooks
from fourfold.step.dry_run.fixed_random import without_randomness
from fourfold.words.errors import Problem

# Lengths of the gradients that hooks are tried with: a bound or a threshold lies between two of them.
GRADIENT_SCALES = (1e-6, 1e-4, 1e-2, 1.0, 1e2)
# Of the largest number in the result, by the size in bytes of a real number.
TOLERANCE = {8: 1e-9, 4: 1e-4, 2: 5e-2, 1: 2e-1}
SEED = 13


def hook_problems(model: nn.Module, num_parts: int) -> list[Problem]:
    """What is wrong with the hooks of the trained parameters, where a batch is cut in so many parts."""
    names = [name for name, p in model.named_parameters() if p.requires_grad and not _is_additive(p)]
    if not names:
        return []
    got = f"a hook of {', '.join(names[:3])}{' …' if len(names) > 3 else ''} that does not treat a sum of gradients"
    got += f" as the sum of what it makes of each, and a batch that is cut in {num_parts}"
    need = "hooks that scale or mask: each part's gradient goes through them before all are added up"
    attempt = "clip=… for the norm, or optimizer.register_step_pre_hook(…), which sees the whole gradient"
    return [Problem(got, need, attempt)]


@torch.no_grad()
def _is_additive(parameter: nn.Parameter) -> bool:
    hooks = tensor_hooks(parameter)
    if not hooks or not parameter.numel():
        return True

    def apply_hooks(gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        for hook in hooks:
            result = hook(gradient)
            gradient = gradient if result is None else result
        return gradient

    for a, b in _random_gradients(parameter):
        with without_randomness(parameter.device):
            whole, parts = apply_hooks(a + b), apply_hooks(a) + apply_hooks(b)
        if not _is_close(whole, parts):
            return False
    return True


def _random_gradients(parameter: nn.Parameter) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs of random gradients of a parameter."""
    generator = torch.Generator().manual_seed(SEED)
    dtype = torch.complex64 if parameter.is_complex() else torch.float32
    for size in GRADIENT_SCALES * max(1, min(16, 1024 // parameter.numel())):
        a, b = (torch.randn(parameter.shape, dtype=dtype, generator=generator) * size for _ in range(2))
        yield a.to(parameter), b.to(parameter)


def _is_close(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape:
        return False
    width = a.element_size() // (2 if a.is_complex() else 1)
    largest = max(float(a.abs().max()), float(b.abs().max()))
    smallest = torch.finfo(a.dtype).tiny * torch.finfo(a.dtype).eps
    return float((a - b).abs().max()) <= TOLERANCE[width] * largest + 4 * smallest
