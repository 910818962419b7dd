"""Ring calls: what one call of attention has in common on all ranks of a ring.

B batch · H query heads · l tokens of a rank · K head size
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fourfold.parts.comm.ring.protocol import RingGroup
from fourfold.parts.sequence.dropout import AttentionDropout, DropoutMask, sample_indices
from fourfold.plan.sequence import TokenRanges


@dataclass(frozen=True)
class RingCall:
    """One call of attention around a ring. `ranges_by_index`: the ranges of the sequence that each ring index keeps.

    gathers_kv  all-gather keys and values at once, instead of passing them round
    first_head  the first of the heads of q that this rank computes
    """

    group: RingGroup
    ranges_by_index: tuple[TokenRanges, ...]
    gathers_kv: bool
    is_causal: bool
    scale: float
    dropout: AttentionDropout | None = None
    first_head: int = 0

    @property
    def local_ranges(self) -> TokenRanges:
        return self.ranges_by_index[self.group.index]

    def token_positions(self, ranges: TokenRanges, device: torch.device) -> Tensor:
        """The positions in the full sequence of the tokens of some ranges: int64."""
        return torch.cat([torch.arange(start, stop, device=device) for start, stop in ranges])

    def dropout_mask(self, q: Tensor) -> DropoutMask | None:
        """The dropout mask of this rank's queries [B, H, l, K], with no keys yet. None without dropout."""
        if self.dropout is None or self.dropout.p == 0.0:
            return None
        first_head = self.dropout.first_head + self.first_head
        heads = torch.arange(first_head, first_head + q.shape[1], device=q.device)
        positions = self.token_positions(self.local_ranges, q.device)
        samples = sample_indices(self.dropout, q.shape[0], q.device)
        return DropoutMask(self.dropout, samples, heads, positions, positions[:0])
