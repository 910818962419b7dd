"""Ring calls: what one call of attention has in common on all ranks of a ring.

B batch · H query heads · l tokens of a rank · K head size
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from fourfold.axes.context.rules.document_tiles import DocumentSpan, document_tiles
from fourfold.axes.context.rules.layout import Tile, TokenRanges, tiles
from fourfold.axes.context.work.document_mask import document_spans
from fourfold.axes.context.work.dropout import AttentionDropout, DropoutMask, sample_indices
from fourfold.comm.channel import Channel

ALL_SAMPLES = slice(None)


class SampleTile(NamedTuple):
    """A tile of the scores of some samples of a batch."""

    samples: slice
    tile: Tile


@dataclass(frozen=True)
class RingCall:
    """One call of attention around a ring. `ranges_by_index`: the ranges of the sequence that each ring index keeps.

    gathers_kv  all-gather keys and values at once, instead of passing them round
    first_head  the first of the heads of q that this rank computes
    document_starts  of packed documents, int64 [B or 1, l]: a query attends to the keys from its start to itself
    """

    group: Channel
    ranges_by_index: tuple[TokenRanges, ...]
    gathers_kv: bool
    is_causal: bool
    scale: float
    dropout: AttentionDropout | None = None
    first_head: int = 0
    document_starts: Tensor | None = None

    @property
    def local_ranges(self) -> TokenRanges:
        return self.ranges_by_index[self.group.index]

    @cached_property
    def _document_spans(self) -> Sequence[Sequence[DocumentSpan]]:
        assert self.document_starts is not None
        return document_spans(self.document_starts, self.local_ranges)

    def tiles(self, keys: TokenRanges) -> Iterator["SampleTile"]:
        """What this rank's queries compute of a block with the keys of these ranges."""
        if self.document_starts is None:
            for tile in tiles(self.local_ranges, keys, causal=self.is_causal):
                yield SampleTile(ALL_SAMPLES, tile)
            return
        for sample, spans in enumerate(self._document_spans):
            samples = ALL_SAMPLES if len(self._document_spans) == 1 else slice(sample, sample + 1)
            for tile in document_tiles(self.local_ranges, keys, spans):
                yield SampleTile(samples, tile)

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
