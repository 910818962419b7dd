"""Closeness: whether a shard's numbers are the rows of the whole's.

bound  the largest difference as a part of the largest number: rounding makes less than this, mixing of tokens more
floor  a size below which numbers are rounding noise; of gradients that are 0 in theory
"""

import functools

import torch
from torch import Tensor

from fourfold.run.sequence.tokens import Share

# In float64 29 model types of transformers differ by 2e-14 at most, gradients too.
CLOSE = {torch.float64: 1e-9, torch.float32: 1e-3}
CLOSE_OF_HALF = 5e-2
# Gradients add up more rounding: in bfloat16 the sums of these models' gradients differ by up to 3e-2.
CLOSE_GRADIENTS = {torch.float64: 1e-9, torch.float32: 1e-2}
CLOSE_GRADIENTS_OF_HALF = 0.2
# An output of no token is computed by all ranks alike; a mean over tokens is not the same, but may be near.
SAME = {torch.float64: 1e-9}
SAME_OF_OTHERS = 1e-6


class Differs(Exception):
    """The replay is not the whole; `got` says where, and whether other ranks' tokens are seen to matter."""

    def __init__(self, what: str, *, depends: bool = True, in_backward: bool = False) -> None:
        self.got = f"{what} depend on other ranks' tokens" if depends else what
        self.in_backward = in_backward
        super().__init__(self.got)


def bound_of(dtype: torch.dtype) -> float:
    return CLOSE.get(dtype.to_real(), CLOSE_OF_HALF)


def gradient_bound_of(dtype: torch.dtype) -> float:
    return CLOSE_GRADIENTS.get(dtype.to_real(), CLOSE_GRADIENTS_OF_HALF)


@torch.no_grad()  # a checkpoint counts what autograd saves in it
def is_close(whole: Tensor, own: Tensor, bound: float | None = None, *, floor: float = 0.0) -> bool:
    if whole.is_complex():
        whole, own = (torch.view_as_real(tensor.resolve_conj()) for tensor in (whole, own))
    if not whole.is_floating_point():
        return torch.equal(whole, own)
    if not torch.equal(whole.isnan(), own.isnan()):
        return False
    if not whole.numel():
        return True
    bound = bound_of(whole.dtype) if bound is None else bound
    whole, own = (torch.nan_to_num(tensor, posinf=0.0, neginf=0.0).double() for tensor in (whole, own))
    return (whole - own).abs().max().item() <= bound * max(whole.abs().max().item(), floor, 1e-30)


def is_same(whole: Tensor, own: Tensor) -> bool:
    """Whether an output that is of no token is the same on all ranks."""
    return whole.shape == own.shape and is_close(whole, own, SAME.get(whole.dtype, SAME_OF_OTHERS))


def rows(tensor: Tensor, share: Share, dim: int) -> Tensor:
    """A shard's rows of a tensor that has a row for each token."""
    return tensor.index_select(dim, _places(share, tensor.device))


@functools.lru_cache(8)
def _places(share: Share, device: torch.device) -> Tensor:
    return share.places.to(device)


def require_rows(whole: Tensor, own: Tensor, share: Share, dim: int, what: str) -> None:
    """Raise Differs unless `own` is this shard's rows of `whole`."""
    if whole.shape[dim] != share.length or own.shape[dim] != share.size:
        lengths = f"{whole.shape[dim]} long with {share.length} tokens, {own.shape[dim]} with {share.size}"
        raise Differs(f"{what}: {lengths}", depends=False)
    mine = rows(whole, share, dim)
    if mine.shape != own.shape or not is_close(mine, own):
        raise Differs(what)
