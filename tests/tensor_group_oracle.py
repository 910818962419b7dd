"""What the ranks of a tensor group hold and what they get, computed in one process.

Law: a sum is in rank order, of half precision in float32 and rounded once.
"""

import functools
from typing import Any

import torch

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(), (1,), (7,), (0, 3), (5, 3), (2, 3, 4), (3, 50, 7), (4, 1, 2, 9)]


def tensor_of(rank, shape, dtype, *, layout="contiguous"):
    """A rank's tensor of a collective. `layout`: how it lies in memory."""
    generator = torch.Generator().manual_seed(rank)
    reverse = shape[::-1] if layout == "transposed" else shape
    values = torch.randn(reverse, generator=generator, dtype=torch.float64).mul(8).to(dtype)
    if layout == "transposed":
        return values.permute(tuple(reversed(range(values.ndim))))
    return values[..., :1].expand(shape) if layout == "expanded" and values.ndim else values


def summed(tensors):
    """The sum in rank order, of half precision in float32 and rounded once."""
    dtype = tensors[0].dtype
    wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    return functools.reduce(torch.add, [tensor.to(wide) for tensor in tensors]).to(dtype)


def expected_results(tensors, index):
    """By collective, what a rank gets."""
    size, found = len(tensors), {}
    found["all_reduce"] = summed(tensors)
    found["all_reduce_max"] = functools.reduce(torch.maximum, tensors)
    for dim in range(tensors[0].ndim):
        found["all_gather", dim] = torch.cat(tensors, dim)
        if tensors[0].shape[dim] % size == 0:
            found["reduce_scatter", dim] = summed(tensors).chunk(size, dim)[index]
    return found


def all_results(group, tensor):
    """By collective, what this rank gets of a tensor."""
    found: dict[Any, torch.Tensor] = {
        "all_reduce": group.all_reduce(tensor.clone(memory_format=torch.preserve_format)),
        "all_reduce_max": group.all_reduce_max(tensor.clone(memory_format=torch.preserve_format)),
    }
    for dim in range(tensor.ndim):
        found["all_gather", dim] = group.all_gather(tensor, dim)
        if tensor.shape[dim] % group.size == 0:
            found["reduce_scatter", dim] = group.reduce_scatter(tensor, dim)
    return found


def bits(tensor):
    assert tensor.is_contiguous()
    return tensor.dtype, tuple(tensor.shape), tensor.reshape(-1).view(torch.uint8).tolist() if tensor.numel() else []
