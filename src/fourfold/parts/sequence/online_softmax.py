"""Merge: attention to some keys and attention to others -> attention to both.

A block's output counts by its share of the sum of exponentials, σ(lse of the block − lse so far). As a share it can
not overflow, however large the scores; the sum itself is never formed.
"""

import torch
from torch import Tensor

from fourfold.parts.dtypes import accumulation_dtype
from fourfold.parts.sequence.kernels import BlockOutput
from fourfold.plan.sequence import TokenRange

INF = float("inf")


class OnlineSoftmax:
    """What a rank's queries have attended to so far: out [B, H, l, V] and lse [B, H, l]."""

    def __init__(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> None:
        self._shape, self._dtype, self._device = shape, accumulation_dtype(dtype), device
        self._output: BlockOutput | None = None

    def merge(self, part: BlockOutput, queries: TokenRange) -> None:
        """Take in a block of the queries [start, stop)."""
        start, stop = queries
        part = BlockOutput(part.out.to(self._dtype), part.lse.to(self._dtype))
        if self._output is None and stop - start == self._shape[2]:
            self._output = part
            return
        out, lse = self.out[:, :, start:stop], self.lse[:, :, start:stop]
        total = torch.logaddexp(lse, part.lse)
        # Of a query that attends to nothing in this block: its share is 0, also where it attends to nothing so far.
        share = (part.lse - total).exp_().masked_fill_(part.lse == -INF, 0.0)
        out.lerp_(part.out, share[..., None])
        lse.copy_(total)

    @property
    def out(self) -> Tensor:
        return self._get_output().out

    @property
    def lse(self) -> Tensor:
        return self._get_output().lse

    def _get_output(self) -> BlockOutput:
        if self._output is None:
            out = torch.zeros(self._shape, dtype=self._dtype, device=self._device)
            self._output = BlockOutput(out, torch.full(self._shape[:-1], -INF, dtype=self._dtype, device=self._device))
        return self._output
