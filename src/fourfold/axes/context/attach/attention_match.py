"""Attention match: an attention call for a shard of the tokens must be a part of the call for full sequences.

Law: queries, keys, values, mask and options are the same, or the difference is raised with the name of the call.
"""

import torch
from torch import Tensor

from fourfold.axes.context.attach.attention_replay import QKV
from fourfold.axes.context.attach.shard_rows import ShardMismatch, check_shard_rows, shard_rows
from fourfold.axes.context.attach.token_shards import TokenShard
from fourfold.axes.context.rules.layout import DP_INSTEAD, heads_problem
from fourfold.axes.context.work.document_mask import DocumentMask
from fourfold.model.sdpa_interception import AttentionCall
from fourfold.words.errors import Problem, TaskError


def compare_attention_calls(
    full: AttentionCall, local: AttentionCall, shard: TokenShard, name: str, *, ulysses: int
) -> None:
    """Raise ShardMismatch unless `local` is this shard of `full`; TaskError if the call cannot be sharded at all."""
    if full.q.shape[2] != full.k.shape[2]:
        got = f"cp > 1 and cross-attention at {name}: {full.q.shape[2]} queries, {full.k.shape[2]} keys"
        raise TaskError(Problem(got, "self-attention: queries and keys of the same tokens", DP_INSTEAD))
    for what in QKV:
        check_shard_rows(getattr(full, what), getattr(local, what), shard, 2, f"{what} of {name}")
    if problem := heads_problem(local.q.shape[1], local.k.shape[1], ulysses):
        raise TaskError(problem)
    options = [(call.is_causal, call.scale, call.dropout_p, call.enable_gqa) for call in (full, local)]
    if options[0] != options[1]:
        got = f"{name} with other options than for full sequences (is_causal, scale, dropout_p or enable_gqa)"
        raise ShardMismatch(got, depends_on_others=False)
    _compare_masks(full.mask, local.mask, shard, name)


def _compare_masks(full: Tensor | None, local: Tensor | None, shard: TokenShard, name: str) -> None:
    if full is None and local is None:
        return
    if local is not None and local.requires_grad:
        got = f"cp > 1 and a mask {list(local.shape)} at {name} that requires a gradient"
        raise TaskError(Problem(got, "a mask that does not require one", "mask.detach()"))
    if full is None or local is None:
        which = "a shard of the tokens" if full is None else "full sequences"
        raise ShardMismatch(f"{name} with a mask for {which} only", depends_on_others=False)
    if isinstance(full, DocumentMask) and isinstance(local, DocumentMask):
        check_shard_rows(full.starts, local.starts, shard, 1, f"document starts of {name}")
        return
    if local.shape[-1] == shard.size and (local.dim() < 2 or local.shape[-2] == 1):
        check_shard_rows(full, local, shard, local.dim() - 1, f"masks of {name}")
        return
    is_key_mask = full.dim() < 2 or full.shape[-2] == 1
    expected = full if is_key_mask else shard_rows(full, shard, full.dim() - 2)
    if local.shape != expected.shape:
        raise TaskError(mask_problem(local, shard, name))
    if not torch.equal(local, expected):
        raise ShardMismatch(f"masks of {name}")


def mask_problem(mask: Tensor, shard: TokenShard, name: str) -> Problem:
    """What is wrong with a mask that is no part of the mask of the full sequence."""
    got = f"cp > 1 and a mask {list(mask.shape)} at {name}, made of this rank's {shard.size} tokens"
    need = "is_causal=True, or a key mask [B, 1, 1, l], or this rank's rows of the full mask, [B, 1, l, L]"
    return Problem(got, need, "is_causal=True in place of a causal mask")
