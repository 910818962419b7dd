"""Random weights: what a dry run computes with, in place of the model's own weights.

free  every weight is drawn at order 1, so that no mixing of tokens hides behind a small scale or a closed gate
near  every weight is its own value times a number from 0.5 to 1.5; a zero becomes a small number
tile  random numbers are drawn once per parameter, at most TILE_SIZE of them, and repeated
window  a weight of a model that is not all here: it takes nearly no memory
Law: all ranks get the same weights, whatever their device.
"""

import contextlib
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fourfold.proof.checks import CheckConfig
from fourfold.torch_kit.torch_private import DisableTorchFunction

# A prime: no dim of a weight is a multiple of it, so no two rows of a weight are equal.
TILE_SIZE = 65_521
SEED = 20_240_601


@torch.no_grad()
def make_state(model: nn.Module, config: CheckConfig) -> dict[str, Tensor]:
    """Parameters and buffers for a functional call. Buffers are copies: what forward writes is dropped."""
    state = copy_buffers(model, config.dtype)
    for name, p in model.named_parameters():
        generator = _generator_of(name)
        if not (p.is_floating_point() or p.is_complex()):
            continue
        if config.weights == "own":
            filled = _fill_zeros(p, generator)
            if filled is not None:
                state[name] = filled
            continue
        drawn = near_values(name, p) if config.weights == "near" else _random_weight(p, generator)
        drawn = cast_real(drawn, config.dtype) if config.dtype is not None else drawn.to(p.dtype)
        state[name] = nn.Parameter(drawn, requires_grad=p.requires_grad)
    return state


@torch.no_grad()
def copy_parameters(
    model: nn.Module, config: CheckConfig, existing: Mapping[int, nn.Parameter] | None = None
) -> dict[str, nn.Parameter]:
    """Copies of all parameters: trained ones with the weights of the configuration, frozen ones unchanged.

    existing  copies to reuse, by the id of the parameter
    """
    copies: dict[str, nn.Parameter] = {}
    for name, p in model.named_parameters():
        if existing and id(p) in existing:
            copies[name] = existing[id(p)]
            continue
        is_near = config.weights == "near" and p.requires_grad
        drawn = near_values(name, p) if is_near else p.detach().clone()
        drawn = drawn.to(p.dtype) if config.dtype is None else cast_real(drawn, config.dtype)
        copies[name] = nn.Parameter(drawn, requires_grad=p.requires_grad)
    return copies


def near_values(name: str, tensor: Tensor) -> Tensor:
    """Numbers near those of a tensor, drawn for its name; float64 or complex128."""
    return _perturbed_weight(tensor, _generator_of(name))


def _generator_of(name: str) -> torch.Generator:
    """A generator for one parameter: ranks whose shards of another one differ in size draw the same for this one."""
    return torch.Generator().manual_seed(SEED + zlib.crc32(name.encode()))


def copy_buffers(model: nn.Module, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Copies of all buffers: what a forward writes there is dropped."""
    return {name: cast_real(buffer.detach().clone(), dtype) for name, buffer in model.named_buffers()}


def random_tiled(like: Tensor, generator: torch.Generator, *, is_uniform: bool = False) -> Tensor:
    """Random numbers in the shape and on the device of a tensor: normal, or uniform from -1 to 1; float64."""
    count = min(like.numel(), TILE_SIZE)
    with DisableTorchFunction():  # a mode of the dry run has fixed values in place of draws
        # Drawing float32 is four times as fast.
        draw = torch.rand if is_uniform else torch.randn
        numbers = draw(count, generator=generator, dtype=torch.float32)
    numbers = numbers * 2 - 1 if is_uniform else numbers
    times = math.ceil(like.numel() / max(count, 1))
    return numbers.to(like.device).double().repeat(times)[: like.numel()].view(like.shape)


@torch.no_grad()
def window_weight(name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A weight of order 1 that takes nearly no memory: a random vector, of which the rows of the weight are windows.

    Row i begins at element i: a weight [n, m] takes n + m − 1 elements, and its rows differ. Vectors are positive: the
    model may take their logarithm or root. Integers are 0.
    """
    shape = tuple(shape)
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.zeros((), dtype=dtype, device=device).expand(shape)
    if not shape or 0 in shape:
        return torch.ones(shape, dtype=dtype, device=device)
    num_rows, row = shape[0], math.prod(shape[1:])
    step = 2 if len(shape) > 1 and shape[-1] == 2 else 1  # the model may take such weights as complex numbers
    count = step * (num_rows - 1) + row
    values = torch.rand(count * (1 + dtype.is_complex), generator=_generator_of(name), dtype=torch.float64)
    values = 0.75 + values / 2 if len(shape) == 1 else (values - 0.5) * math.sqrt(12 / row)
    values = torch.view_as_complex(values.view(-1, 2)) if dtype.is_complex else values
    strides = [step, *(math.prod(shape[dim + 1 :]) for dim in range(1, len(shape)))]
    return values.to(device, dtype).as_strided(shape, strides)


def _random_weight(p: Tensor, generator: torch.Generator) -> Tensor:
    """A weight of order 1. Signs are kept: a model may take its logarithm or its root."""
    if p.is_complex():
        return torch.view_as_complex(
            _random_weight(torch.view_as_real(p.detach().resolve_conj()).contiguous(), generator)
        )
    if sum(size > 1 for size in p.shape) <= 1:  # a gate, a bias, the scale of a norm
        numbers = random_tiled(p, generator, is_uniform=True)
        numbers += 0.5 * numbers.sign()
    else:
        numbers = random_tiled(p, generator) / math.sqrt(max(1, math.prod(p.shape[1:])))
    signs = p.detach().double().sign()
    return torch.where(signs == 0, numbers, signs * numbers.abs())


def _perturbed_weight(p: Tensor, generator: torch.Generator) -> Tensor:
    if p.is_complex():
        return torch.view_as_complex(
            _perturbed_weight(torch.view_as_real(p.detach().resolve_conj()).contiguous(), generator)
        )
    # Tile by tile, in few passes: one over a large model takes longer than the forward of a few samples.
    own, drawn = p.detach().flatten(), torch.empty(p.numel(), dtype=torch.float64, device=p.device)
    tile = random_tiled(own[:TILE_SIZE], generator, is_uniform=True)
    scale = 1.0 + 0.5 * tile
    for before, after in zip(own.split(TILE_SIZE), drawn.split(TILE_SIZE), strict=True):
        torch.mul(before, scale[: before.numel()], out=after)
        if before.count_nonzero() < before.numel():
            after.add_(0.1 * tile[: before.numel()] * (before == 0))
    return drawn.view(p.shape)


def _fill_zeros(p: Tensor, generator: torch.Generator) -> Tensor | None:
    """A copy of a weight with small numbers in place of zeros; None if it has no zeros."""
    zeros = p == 0
    if p.is_complex() or not bool(zeros.any()):
        return None
    return torch.where(zeros, 0.1 * random_tiled(p, generator).to(p.dtype), p.detach())


def cast_real(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """A real or complex tensor in this dtype or its complex counterpart; any other tensor unchanged."""
    if dtype is None:
        return tensor
    with DisableTorchFunction():  # a mode casts the operands of every operation, and most have the dtype already
        before = tensor.dtype
    after = dtype.to_complex() if before.is_complex else dtype if before.is_floating_point else before
    return tensor if after == before else tensor.to(after)


@contextlib.contextmanager
def copy_tensor_attributes(model: nn.Module, dtype: torch.dtype | None) -> Iterator[None]:
    """Within, tensors that modules hold as plain attributes are copies in this dtype (None: in their own)."""
    replaced: list[tuple[dict[str, Any], str, Tensor]] = []
    for attributes in map(vars, model.modules()):
        for name, value in list(attributes.items()):
            if isinstance(value, Tensor):
                replaced.append((attributes, name, value))
                attributes[name] = cast_real(value.detach().clone(), dtype)
    try:
        yield
    finally:
        for attributes, name, value in replaced:
            attributes[name] = value
