"""Closeness: whether a shard's numbers are the rows of the whole's.

bound  the largest difference as a part of the largest number: rounding makes less than this, mixing of tokens more
floor  a size below which numbers are rounding noise; of gradients that are 0 in theory
"""

import functools

import torch
from torch import Tensor

from fourfold.step.sequence.token_shards import TokenShard

# In float64 29 model types of transformers differ by 2e-14 at most, gradients too.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}
HALF_TOLERANCE = 5e-2
# Gradients add up more rounding: in bfloat16 the sums of these models' gradients differ by up to 3e-2.
GRADIENT_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-2}
HALF_GRADIENT_TOLERANCE = 0.2
# An output of no token is computed by all ranks alike; a mean over tokens is not the same, but may be near.
REPLICATED_TOLERANCE = {torch.float64: 1e-9}
DEFAULT_REPLICATED_TOLERANCE = 1e-6


class ShardMismatch(Exception):
    """The replay is not the whole; `got` says where, and whether other ranks' tokens are seen to matter."""

    def __init__(self, what: str, *, depends_on_others: bool = True, is_in_backward: bool = False) -> None:
        self.got = f"{what} depend on other ranks' tokens" if depends_on_others else what
        self.is_in_backward = is_in_backward
        super().__init__(self.got)


def tolerance_of(dtype: torch.dtype) -> float:
    return TOLERANCE.get(dtype.to_real(), HALF_TOLERANCE)


def gradient_tolerance_of(dtype: torch.dtype) -> float:
    return GRADIENT_TOLERANCE.get(dtype.to_real(), HALF_GRADIENT_TOLERANCE)


@torch.no_grad()  # a checkpoint counts what autograd saves in it
def is_close(whole: Tensor, own: Tensor, tolerance: float | None = None, *, floor: float = 0.0) -> bool:
    if whole.is_complex():
        whole, own = (torch.view_as_real(tensor.resolve_conj()) for tensor in (whole, own))
    if not whole.is_floating_point():
        return torch.equal(whole, own)
    if not torch.equal(whole.isnan(), own.isnan()):
        return False
    if not whole.numel():
        return True
    tolerance = tolerance_of(whole.dtype) if tolerance is None else tolerance
    whole, own = (torch.nan_to_num(tensor, posinf=0.0, neginf=0.0).double() for tensor in (whole, own))
    return (whole - own).abs().max().item() <= tolerance * max(whole.abs().max().item(), floor, 1e-30)


def is_replicated(whole: Tensor, own: Tensor) -> bool:
    """Whether an output that is of no token is the same on all ranks."""
    return whole.shape == own.shape and is_close(
        whole, own, REPLICATED_TOLERANCE.get(whole.dtype, DEFAULT_REPLICATED_TOLERANCE)
    )


def shard_rows(tensor: Tensor, shard: TokenShard, dim: int) -> Tensor:
    """A shard's rows of a tensor that has a row for each token."""
    return tensor.index_select(dim, _shard_positions(shard, tensor.device))


@functools.lru_cache(8)
def _shard_positions(shard: TokenShard, device: torch.device) -> Tensor:
    return shard.positions.to(device)


def check_shard_rows(whole: Tensor, own: Tensor, shard: TokenShard, dim: int, what: str) -> None:
    """Raise Differs unless `own` is this shard's rows of `whole`."""
    if whole.shape[dim] != shard.length or own.shape[dim] != shard.size:
        lengths = f"{whole.shape[dim]} long with {shard.length} tokens, {own.shape[dim]} with {shard.size}"
        raise ShardMismatch(f"{what}: {lengths}", depends_on_others=False)
    mine = shard_rows(whole, shard, dim)
    if mine.shape != own.shape or not is_close(mine, own):
        raise ShardMismatch(what)
