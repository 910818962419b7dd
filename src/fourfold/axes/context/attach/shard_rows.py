"""Shard rows: whether a shard's numbers are the rows of the full tensor's."""

import functools

import torch
from torch import Tensor

from fourfold.axes.context.attach.token_shards import TokenShard
from fourfold.proof.tolerance import is_close

# All ranks compute an output without tokens in the same way. A mean over tokens differs, but may be close.
REPLICATED_TOLERANCE = {torch.float64: 1e-9}
DEFAULT_REPLICATED_TOLERANCE = 1e-6


class ShardMismatch(Exception):
    """A replay differs from the full sequences. `got` says where, and whether other ranks' tokens matter there."""

    def __init__(self, what: str, *, depends_on_others: bool = True, is_in_backward: bool = False) -> None:
        self.got = f"{what} depend on other ranks' tokens" if depends_on_others else what
        self.is_in_backward = is_in_backward
        super().__init__(self.got)


def is_replicated(full: Tensor, local: Tensor) -> bool:
    """Whether an output without tokens is the same on all ranks."""
    return full.shape == local.shape and is_close(
        full, local, REPLICATED_TOLERANCE.get(full.dtype, DEFAULT_REPLICATED_TOLERANCE)
    )


def is_shard_of(full: Tensor, local: Tensor, shard: TokenShard) -> bool:
    """Whether `local` is this shard of `full`, in any dim; or equal to it, if it has no tokens."""
    for dim in range(full.dim()):
        if full.shape[dim] == shard.length and local.dim() == full.dim() and local.shape[dim] == shard.size:
            rows = shard_rows(full, shard, dim)
            if rows.shape == local.shape:
                return is_close(rows, local)
    return full.shape == local.shape and is_close(full, local)


def shard_rows(tensor: Tensor, shard: TokenShard, dim: int) -> Tensor:
    """A shard's rows of a tensor that has a row for each token."""
    return tensor.index_select(dim, _shard_positions(shard, tensor.device))


@functools.lru_cache(8)
def _shard_positions(shard: TokenShard, device: torch.device) -> Tensor:
    return shard.positions.to(device)


def check_shard_rows(full: Tensor, local: Tensor, shard: TokenShard, dim: int, what: str) -> None:
    """Raise ShardMismatch unless `local` is this shard's rows of `full`."""
    if full.shape[dim] != shard.length or local.shape[dim] != shard.size:
        lengths = f"{full.shape[dim]} long for {shard.length} tokens, {local.shape[dim]} for {shard.size}"
        raise ShardMismatch(f"{what}: {lengths}", depends_on_others=False)
    rows = shard_rows(full, shard, dim)
    if rows.shape != local.shape or not is_close(rows, local):
        raise ShardMismatch(what)
