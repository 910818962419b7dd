"""Skeleton: a model with all of its modules and weights of nearly no memory, for dry runs on a rank that has one stage.

Each weight is a random vector, of which the rows of the weight are windows: row i begins at element i. So a weight
[n, m] takes n + m − 1 elements, and its rows differ.
Law: all ranks make the same skeleton. Its modules are copies, its buffers too; the model's own are not touched.
"""

import math
import zlib
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from fourfold.plan.precision import COMPUTE_FORMATS
from fourfold.proof.random_weights import SEED
from fourfold.torch_kit import mixed_precision
from fourfold.torch_kit.model_copy import deep_copy


def make_skeleton(model: nn.Module, precision: str, shared: Iterable[object] = ()) -> nn.Module:
    """The skeleton of a model, which computes as the plan's `precision` says. `shared` objects are not copied.

    Raises TaskError if the model cannot be copied.
    """
    full_precision = mixed_precision.full_precision_params(model)
    memo: dict[int, object] = {id(each): each for each in shared}
    for name, p in model.named_parameters():
        dtype = p.dtype
        if precision != "keep" and name not in full_precision:
            dtype = getattr(torch, COMPUTE_FORMATS[precision].dtype)
        memo[id(p)] = nn.Parameter(_windows(name, p, dtype), requires_grad=p.requires_grad)
    skeleton = deep_copy(model, model, "with pp > 1, a dry run of all stages is made with the copy", memo)
    if precision != "keep":
        mixed_precision.cast_model(skeleton, precision)
    return skeleton


@torch.no_grad()
def _windows(name: str, p: Tensor, dtype: torch.dtype) -> Tensor:
    """Random values in the shape of a parameter. Vectors are positive: the model may take their logarithm or root."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.zeros((), dtype=dtype, device=p.device).expand(p.shape)
    generator = torch.Generator().manual_seed(SEED + zlib.crc32(name.encode()))
    shape = tuple(p.shape)
    if p.dim() == 0 or 0 in shape:
        return torch.ones(shape, dtype=dtype, device=p.device)
    row = math.prod(shape[1:])
    step = 2 if p.dim() > 1 and shape[-1:] == (2,) else 1  # the model may take such weights as complex numbers
    values = torch.rand(step * (shape[0] - 1) + row, generator=generator, dtype=torch.float64)
    values = 0.75 + values / 2 if p.dim() == 1 else (values - 0.5) * math.sqrt(12 / row)
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    strides[0] = step
    return values.to(p.device, dtype).as_strided(shape, strides)
