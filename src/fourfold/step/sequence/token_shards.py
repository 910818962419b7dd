"""Tokens: which of a batch's tensors have tokens, and the part of them that a rank keeps.

length  tokens of a sample, as the positions have it; a token tensor is one whose dim 1 is that long
share   what one rank keeps: spans of a sequence that is padded until it divides
pad     a token that fills up: the last one once more; it is a key for nobody, and its output is dropped
Law: the shares tile the sequence, and no pad reaches a loss or a token that is none.

B samples · L length · P padded length · l = P / sp
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fourfold.plan.plan import Plan
from fourfold.plan.sequence import TokenRanges, padded_length, token_ranges
from fourfold.step.batch import POSITION_KEYS, find_positions, has_token_dim
from fourfold.step.sequence.sdpa_interception import AttentionCall
from fourfold.step.tensor_tree import tree_leaves, tree_map
from fourfold.words.errors import Problem, TaskError

POSITION_HELP = " or ".join(POSITION_KEYS)


class TokenShard(NamedTuple):
    """The tokens of one rank, of sequences of `length` tokens, padded to `padded`."""

    length: int
    padded_length: int
    ranges: TokenRanges

    @property
    def size(self) -> int:
        """l: tokens, pads among them."""
        return sum(stop - start for start, stop in self.ranges)

    @property
    def positions(self) -> Tensor:
        """Where each token is in the whole sequence: int64 [l]; from `length` on they are pads."""
        return torch.cat([torch.arange(start, stop) for start, stop in self.ranges])

    @property
    def real_tokens(self) -> Tensor | None:
        """Which local tokens are no pads: int64; None: all."""
        if all(stop <= self.length for _, stop in self.ranges):
            return None
        return (self.positions < self.length).nonzero().flatten()

    def shard_tensor(self, tensor: Tensor) -> Tensor:
        """The part of a token tensor [B, L, …] that is this share's: [B, l, …]."""
        if self.padded_length == self.length:
            return torch.cat([tensor[:, start:stop] for start, stop in self.ranges], dim=1)
        return tensor[:, self.positions.clamp(max=self.length - 1).to(tensor.device)]


def token_shard(plan: Plan, length: int, sp_index: int) -> TokenShard:
    """What the index on the sequence axis keeps of sequences of this length."""
    padded = padded_length(length, plan.sp, plan.ring, plan.ulysses)
    return TokenShard(length, padded, token_ranges(padded, plan.sp, plan.ring, plan.ulysses)[sp_index])


def sequence_length(batch: Any) -> int:
    """Tokens of each sample. Raises TaskError where they cannot be cut."""
    need = f"a dict with {POSITION_HELP}, int64 [samples, tokens]"
    attempt = "{'tokens': …, 'positions': torch.arange(length).expand(samples, length)}, which the model must use"
    inputs, targets = batch
    if not isinstance(inputs, dict):
        got = f"sp > 1 and inputs that are a {type(inputs).__name__}"
        raise TaskError(Problem(got, need, attempt), where="the batch")
    positions = find_positions(inputs)
    if positions is None:
        raise TaskError(Problem(f"sp > 1 and inputs {', '.join(inputs)}", need, attempt), where="the batch")
    if positions.dim() != 2:
        raise TaskError(Problem(f"positions {list(positions.shape)}", need, attempt), where="the batch")
    length = positions.shape[1]
    if not any(has_token_dim(tensor, length) for tensor in tree_leaves(targets)):
        shapes = ", ".join(str(list(tensor.shape)) for tensor in tree_leaves(targets))
        need = f"a target for each of the {length} tokens: each rank has the outputs of its own tokens only"
        raise TaskError(Problem(f"sp > 1 and targets {shapes}", need, "sp = 1, and dp instead"), where="the batch")
    return length


def shard_tokens(tree: Any, shard: TokenShard) -> Any:
    """A tree of tensors with each token tensor cut to the share; the others are the samples' own, and whole."""
    return tree_map(tree, lambda tensor: shard.shard_tensor(tensor) if has_token_dim(tensor, shard.length) else tensor)


def mask_padding(call: AttentionCall, shard: TokenShard) -> Tensor | None:
    """The mask of a call, with pads as keys for nobody. A causal one needs none: pads come last."""
    mask, missing = call.mask, shard.padded_length - shard.length
    if not missing or (mask is None and call.is_causal):
        return mask
    real = (shard.positions < shard.length).to(call.k.device)
    if mask is None:
        return real.view(1, 1, 1, -1)
    if mask.shape[-1] == shard.length:
        hidden = False if mask.dtype == torch.bool else float("-inf")
        return F.pad(mask, (0, missing), value=hidden)
    if mask.shape[-1] == shard.size:
        return mask & real if mask.dtype == torch.bool else mask.masked_fill(~real, float("-inf"))
    return mask
