"""Whole model: what a dry run needs of a model that has been cut: its modules as they were, and random weights.

structure  the modules of the whole model, with parameters on the meta device: they have shapes and no memory
Law: all ranks draw the same weights, each from a seed of its own name, and a rank's shards are parts of them.
"""

import copy
from collections.abc import Mapping

import torch
from torch import nn

from fourfold.parts.tensor.cut import local_part
from fourfold.plan.tensor_shard import TensorShard
from fourfold.step.dry_run.check_config import CheckUnavailable
from fourfold.step.dry_run.random_weights import cast_real, draw_weight
from fourfold.words.errors import Problem, TaskError


def copy_structure(model: nn.Module) -> nn.Module:
    """A copy of a model whose parameters have no memory. It shares the buffers. Raises TaskError if it has no copy."""
    memo: dict[int, object] = {id(buffer): buffer for buffer in model.buffers()}
    for p in model.parameters():
        memo[id(p)] = nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:  # whatever the model's attributes raise
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        got = f"tp > 1 and a model that cannot be copied: {text}"
        need = "a model that copy.deepcopy can copy: a dry run compares it with the model that is cut"
        attempt = "no locks, no open files and no tensors with a graph among its attributes"
        raise TaskError(Problem(got, need, attempt)) from error


@torch.no_grad()
def draw_whole_weights(
    model: nn.Module, shards: Mapping[str, TensorShard], dtype: torch.dtype | None, device: torch.device
) -> dict[str, nn.Parameter]:
    """Whole parameters in the shapes of a model that has been cut; integers are its own.

    dtype  of what is drawn; None: of the parameter
    Raises CheckUnavailable for parameters that are split and are integers.
    """
    drawn = {}
    for name, p in model.named_parameters():
        if not (p.is_floating_point() or p.is_complex()):
            if not shards[name].is_whole:
                raise CheckUnavailable(f"{name} is split, and {str(p.dtype).removeprefix('torch.')}")
            drawn[name] = nn.Parameter(p.detach().clone(), requires_grad=False)
            continue
        numbers = draw_weight(name, shards[name].shape, device)
        if p.is_complex():
            numbers = torch.complex(numbers, draw_weight(f"{name} (imaginary)", shards[name].shape, device))
        numbers = numbers.to(p.dtype) if dtype is None else cast_real(numbers, dtype)
        drawn[name] = nn.Parameter(numbers, requires_grad=p.requires_grad)
    return drawn


@torch.no_grad()
def local_weights(whole: Mapping[str, nn.Parameter], shards: Mapping[str, TensorShard]) -> dict[str, nn.Parameter]:
    """This rank's parts of whole parameters."""
    return {
        name: nn.Parameter(
            p.detach().clone() if shards[name].is_whole else local_part(p.detach(), shards[name]),
            requires_grad=p.requires_grad,
        )
        for name, p in whole.items()
    }
