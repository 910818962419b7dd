"""Token shards: which tensors of a batch have tokens, and which of the tokens a rank keeps.

length        tokens of a sample, from the positions
token tensor  a tensor whose dim 1 is that long
shard         the tokens that one rank keeps: ranges of a sequence that is padded until it divides
pad           the last token once more; no query attends to it, and its output is dropped
Law: the shards tile the sequence, and no pad reaches a loss or another token.

B samples · L length · P padded length · l = P / cp
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fourfold.axes.context.rules.layout import DP_INSTEAD, ContextSpec, TokenRanges
from fourfold.axes.context.work.document_mask import DocumentMask
from fourfold.model.batch import POSITION_KEYS, find_positions, has_token_dim, unpack_batch
from fourfold.model.sdpa_interception import AttentionCall
from fourfold.model.transformers_attention import has_transformers_model
from fourfold.torch_kit.tensor_tree import tree_leaves, tree_map
from fourfold.words.errors import Problem, TaskError

POSITION_HELP = " or ".join(POSITION_KEYS)


class TokenShard(NamedTuple):
    """The tokens that one rank keeps of sequences of `length` tokens, padded to `padded_length`."""

    length: int
    padded_length: int
    ranges: TokenRanges

    @property
    def size(self) -> int:
        """l: the number of tokens, including pads."""
        return sum(stop - start for start, stop in self.ranges)

    @property
    def positions(self) -> Tensor:
        """The position of each token in the full sequence: int64 [l]; positions from `length` on are pads."""
        return torch.cat([torch.arange(start, stop) for start, stop in self.ranges])

    @property
    def real_tokens(self) -> Tensor | None:
        """The local indices of the tokens that are no pads: int64; None: all."""
        if all(stop <= self.length for _, stop in self.ranges):
            return None
        return (self.positions < self.length).nonzero().flatten()

    def shard_tensor(self, tensor: Tensor) -> Tensor:
        """The shard [B, l, …] of a token tensor [B, L, …]."""
        if self.padded_length == self.length:
            return torch.cat([tensor[:, start:stop] for start, stop in self.ranges], dim=1)
        return tensor[:, self.positions.clamp(max=self.length - 1).to(tensor.device)]


def token_shards(spec: ContextSpec, length: int) -> list[TokenShard]:
    """The shard of each index on the context axis, for sequences of this length."""
    padded = spec.padded_length(length)
    return [TokenShard(length, padded, ranges) for ranges in spec.token_ranges(padded)]


def inputs_and_targets(batch: Any) -> tuple[Any, Any]:
    """The inputs and targets of a batch. Raises TaskError for anything else."""
    inputs, targets = unpack_batch(batch)
    if targets is None:
        got = f"cp > 1 and a batch of {', '.join(map(str, inputs))} without targets"
        raise TaskError(Problem(got, "a pair (inputs, targets)"), where="the batch")
    return inputs, targets


def sequence_length(batch: Any) -> int:
    """The number of tokens of each sample. Raises TaskError if they cannot be sharded."""
    need = f"a dict with {POSITION_HELP}, int64 [samples, tokens]"
    attempt = "{'tokens': …, 'positions': torch.arange(length).expand(samples, length)}, which the model must use"
    inputs, targets = batch
    if not isinstance(inputs, dict):
        got = f"cp > 1 and inputs that are a {type(inputs).__name__}"
        raise TaskError(Problem(got, need, attempt), where="the batch")
    positions = find_positions(inputs)
    if positions is None:
        raise TaskError(
            Problem(f"cp > 1 and inputs {', '.join(inputs)} without positions", need, attempt), where="the batch"
        )
    if positions.dim() != 2:
        raise TaskError(
            Problem(f"cp > 1 and positions of shape {list(positions.shape)}", need, attempt), where="the batch"
        )
    length = positions.shape[1]
    if not any(has_token_dim(tensor, length) for tensor in tree_leaves(targets)):
        shapes = ", ".join(str(list(tensor.shape)) for tensor in tree_leaves(targets))
        need = f"a target for each of the {length} tokens: each rank has the outputs of its own tokens only"
        raise TaskError(Problem(f"cp > 1 and targets of shape {shapes}", need, DP_INSTEAD), where="the batch")
    return length


def shard_tokens(tree: Any, shard: TokenShard) -> Any:
    """A tree of tensors in which each token tensor is cut to the shard; the others stay."""
    return tree_map(tree, lambda tensor: shard.shard_tensor(tensor) if has_token_dim(tensor, shard.length) else tensor)


def mask_padding(call: AttentionCall, shard: TokenShard) -> Tensor | None:
    """The mask of a call, extended so that no query attends to pads. A causal call needs none: pads come last."""
    if isinstance(call.mask, DocumentMask):
        return call.mask
    mask, num_pads = call.mask, shard.padded_length - shard.length
    if not num_pads or (mask is None and call.is_causal):
        return mask
    real = (shard.positions < shard.length).to(call.k.device)
    if mask is None:
        return real.view(1, 1, 1, -1)
    if mask.shape[-1] == shard.length:
        hidden = False if mask.dtype == torch.bool else float("-inf")
        return F.pad(mask, (0, num_pads), value=hidden)
    if mask.shape[-1] == shard.size:
        return mask & real if mask.dtype == torch.bool else mask.masked_fill(~real, float("-inf"))
    return mask


def packed_problems(model: nn.Module, inputs: Mapping[str, Any]) -> list[Problem]:
    """Refuse packed documents, which transformers recognizes by positions that restart."""
    if not has_transformers_model(model) or inputs.get("attention_mask") is not None:
        return []
    if not bool((find_positions(inputs).diff(dim=1) != 1).any()):
        return []
    got = "cp > 1 and positions that restart within a sample (packed documents), for a transformers model"
    return [Problem(got, "one document per sample, or attention_mask for padding", "position_ids = 0, 1, 2 …")]
