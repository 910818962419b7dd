"""Same call: a call of attention with one rank's tokens is a part of the call with whole sequences.

Law: same queries, keys, values, mask and options, or the difference is raised with the name of the call.
"""

import torch
from torch import Tensor

from fourfold.plan.sequence import heads_problem
from fourfold.step.sequence.attention_replay import QKV
from fourfold.step.sequence.sdpa_interception import AttentionCall
from fourfold.step.sequence.token_shards import TokenShard
from fourfold.step.sequence.tolerance import ShardMismatch, check_shard_rows, shard_rows
from fourfold.words.errors import Problem, TaskError


def compare_attention_calls(
    whole: AttentionCall, own: AttentionCall, shard: TokenShard, name: str, *, ulysses: int
) -> None:
    """Raise Differs unless a call has this rank's rows of the whole's; TaskError where it cannot be cut at all."""
    if whole.q.shape[2] != whole.k.shape[2]:
        got = f"sp > 1 and cross-attention at {name}: {whole.q.shape[2]} queries, {whole.k.shape[2]} keys"
        raise TaskError(Problem(got, "attention among one sequence's own tokens", "sp = 1, and dp instead"))
    for what in QKV:
        check_shard_rows(getattr(whole, what), getattr(own, what), shard, 2, f"{what} of {name}")
    if problem := heads_problem(own.q.shape[1], own.k.shape[1], ulysses):
        raise TaskError(problem)
    options = [(one.is_causal, one.scale, one.dropout_p, one.enable_gqa) for one in (whole, own)]
    if options[0] != options[1]:
        raise ShardMismatch(f"{name} with other options", depends_on_others=False)
    _compare_masks(whole.mask, own.mask, shard, name)


def _compare_masks(whole: Tensor | None, own: Tensor | None, shard: TokenShard, name: str) -> None:
    if whole is None and own is None:
        return
    if own is not None and own.requires_grad:
        got = f"sp > 1 and a mask {list(own.shape)} at {name} that wants a gradient"
        raise TaskError(Problem(got, "one that does not", "mask.detach()"))
    if whole is None or own is None:
        raise ShardMismatch(f"a mask of {name} that is not always there", depends_on_others=False)
    if own.shape[-1] == shard.size and (own.dim() < 2 or own.shape[-2] == 1):
        check_shard_rows(whole, own, shard, own.dim() - 1, f"masks of {name}")
        return
    is_row = whole.dim() < 2 or whole.shape[-2] == 1
    expected = whole if is_row else shard_rows(whole, shard, whole.dim() - 2)
    if own.shape != expected.shape:
        raise TaskError(mask_problem(own, shard, name))
    if not torch.equal(own, expected):
        raise ShardMismatch(f"masks of {name}")


def mask_problem(mask: Tensor, shard: TokenShard, name: str) -> Problem:
    """What is wrong with a mask that is no part of the whole sequence's."""
    got = f"sp > 1 and a mask {list(mask.shape)} at {name}, made of this rank's {shard.size} tokens"
    need = "is_causal=True, or a mask of keys [B, 1, 1, l], or of this rank's rows by all columns [B, 1, l, L]"
    return Problem(got, need, "is_causal=True instead of a causal mask")
