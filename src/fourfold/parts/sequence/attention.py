"""The sequence axis: exact attention among ranks that keep some tokens of every sequence each.

axis     this rank's view of the ranks of one sequence, and how they attend to each other's tokens
attend   torch's `scaled_dot_product_attention`, where q, k and v are this rank's tokens only

sp = ulysses × ring. The `ulysses` neighbours exchange tokens for heads first; then keys and values go round among
the places of the ring. See `plan/sequence.py` for which tokens a rank keeps.

B batch · H heads of queries · G heads of keys and values · l tokens of a rank · L = l · sp · K, V head sizes
Law: output and gradients are those of one process with all tokens, whatever the upstream gradient.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from fourfold.parts.comm.communicator import Communicator
from fourfold.parts.comm.ring.protocol import RingGroup
from fourfold.parts.comm.rings import make_ring
from fourfold.parts.sequence import masks, ring, rsa, ulysses
from fourfold.parts.sequence.dropout import AttentionDropout
from fourfold.plan.sequence import TokenRanges, heads_problem, ring_size, token_ranges
from fourfold.words.errors import Problem, TrainingError

__all__ = ["AttentionDropout", "SequenceGroup", "connect_sequence", "sequence_attention"]

WHERE = "attention over the sequence axis"


@dataclass(frozen=True)
class SequenceGroup:
    """The ranks of one sequence, as one of them sees them. `ring`: one of `plan.sequence.RINGS`."""

    ring_group: RingGroup
    """The places of the ring."""
    ulysses_group: RingGroup
    """The neighbours that exchange tokens for heads."""
    ring: str = "zigzag"

    @property
    def size(self) -> int:
        return self.ring_group.size * self.ulysses_group.size

    @property
    def index(self) -> int:
        return self.ring_group.index * self.ulysses_group.size + self.ulysses_group.index

    @property
    def ulysses(self) -> int:
        return self.ulysses_group.size

    @property
    def groups(self) -> tuple[RingGroup, RingGroup]:
        return self.ring_group, self.ulysses_group

    def token_ranges_by_index(self, length: int) -> tuple[TokenRanges, ...]:
        """The spans of a sequence of this length that each index keeps, in its local order. Raises PlanError."""
        return token_ranges(length, self.size, self.ring, self.ulysses)

    def local_token_ranges(self, length: int) -> TokenRanges:
        """Those that this rank keeps."""
        return self.token_ranges_by_index(length)[self.index]


def connect_sequence(
    ranks: Communicator,
    sequences: Sequence[Sequence[int]],
    *,
    ring: str = "zigzag",
    ulysses: int = 1,
    transport: str = "by-host",
) -> SequenceGroup:
    """The axis of this rank. Collective among all ranks.

    `sequences` are the ranks of each sequence in the order of the axis (`mesh.groups("sp")`), `choice` the plan's
    `transport`. Raises PlanError.
    """
    ring_size(len(sequences[0]), ulysses)
    neighbours = [group[start : start + ulysses] for group in sequences for start in range(0, len(group), ulysses)]
    places = [group[first::ulysses] for group in sequences for first in range(ulysses)]
    around = make_ring(ranks, places, "ring", choice=transport)
    return SequenceGroup(around, make_ring(ranks, neighbours, "heads", choice=transport), ring)


def sequence_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: SequenceGroup,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    dropout: AttentionDropout | None = None,
    grouped: bool = False,
) -> Tensor:
    """Attention of this rank's queries to the keys of the whole sequence: [B, H, l, V].

    q [B, H, l, K], k [B, G, l, K], v [B, G, l, V] are this rank's tokens in the order of `axis.spans`; G is H, or
    divides it if `grouped`. `mask` is as torch's, boolean (True: attends) or added, of this rank's keys [.., 1, l], or
    of this rank's queries by all keys in the order of the whole sequence, [.., l or 1, L]. It may come with `causal`.
    Queries that attend to nothing give 0. `scale` is 1/√K if not given. Without heads, tensors may be [B, l, K].

    Collective among the ranks of the axis, also in backward. Raises TrainingError, PlanError where the length does
    not divide, PeerError where a rank has gone.
    """
    if q.ndim == 3 and k.ndim == 3 and v.ndim == 3:
        mask = mask.unsqueeze(1) if mask is not None and mask.ndim == 3 else mask
        q, k, v = (tensor.unsqueeze(1) for tensor in (q, k, v))
        return sequence_attention(q, k, v, group, mask=mask, causal=causal, scale=scale, dropout=dropout).squeeze(1)
    _check_inputs(q, k, v, group, grouped=grouped)
    if q.shape[0] == 0:
        return _local_attention(q, k, v, None, causal=False, scale=scale)
    if group.size == 1 and _torch_supports(mask, causal, dropout):
        return _local_attention(q, k, v, mask, causal=causal, scale=scale)
    known = masks.parse_mask(mask, q, k, group.size)
    whole = q.shape[-2] * group.size
    first_head = q.shape[1] // group.ulysses * group.ulysses_group.index
    if group.ulysses > 1:
        q, k, v = ulysses.tokens_to_heads(group.ulysses_group, q, k, v)
        known = ulysses.mask_to_heads(group.ulysses_group, known)
    one = known.query_mask if known.query_mask is not None else known.key_mask
    if group.ring_group.size == 1 and _torch_supports(one, causal, dropout):
        out = _local_attention(q, k, v, one, causal=causal, scale=scale)
    else:
        call = ring.RingCall(
            group.ring_group,
            token_ranges(whole, group.ring_group.size, group.ring),
            gathers_kv=group.ring == "gather",
            is_causal=causal,
            scale=1.0 / math.sqrt(q.shape[-1]) if scale is None else scale,
            dropout=dropout,
            first_head=first_head,
        )
        out = (rsa if group.ring == "rsa" else ring).ring_attention(q, k, v, known, call)
    return ulysses.heads_to_tokens(group.ulysses_group, out) if group.ulysses > 1 else out


def _torch_supports(mask: Tensor | None, causal: bool, dropout: AttentionDropout | None) -> bool:
    """Whether torch's own attention does this: not with a dropout that is to be the same on every mesh."""
    return not (causal and mask is not None) and (dropout is None or dropout.p == 0.0)


def _local_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, causal: bool, scale: float | None
) -> Tensor:
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped)


def _check_inputs(q: Tensor, k: Tensor, v: Tensor, group: SequenceGroup, *, grouped: bool) -> None:
    """Raises TrainingError with all that is wrong."""
    shapes = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    if {q.ndim, k.ndim, v.ndim} != {4} or q.shape[-1] != k.shape[-1] or k.shape[:-1] != v.shape[:-1]:
        need = "q [batch, heads, tokens, size], k as q, v as k but for its size"
        raise TrainingError(Problem(shapes, need), where=WHERE)
    problems = []
    if group.size > 1 and (q.shape[-2] != k.shape[-2] or q.shape[0] != k.shape[0]):
        problems.append(Problem(shapes, "queries and keys of the same tokens: self-attention", "sp = 1"))
    if not grouped and q.shape[1] != k.shape[1]:
        problems.append(Problem(shapes, "as many heads of keys as of queries", "enable_gqa"))
    elif k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        problems.append(Problem(shapes, "heads of queries divisible by those of keys"))
    if len({tensor.dtype for tensor in (q, k, v)}) > 1 or not q.is_floating_point():
        problems.append(Problem(f"{q.dtype}, {k.dtype}, {v.dtype}", "one floating-point dtype"))
    heads = heads_problem(q.shape[1], k.shape[1], group.ulysses)
    problems += [] if heads is None else [heads]
    if problems:
        raise TrainingError(problems, where=WHERE)
