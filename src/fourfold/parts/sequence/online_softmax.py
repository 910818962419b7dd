"""Online softmax: merges attention to some keys with attention to others.

weight  a block's part of the sum of exponentials, σ(lse of the block − lse so far)
Law: the sum of exponentials itself is never formed, so no score overflows, however large.
"""

from math import inf

import torch
from torch import Tensor

from fourfold.parts.dtypes import accumulation_dtype
from fourfold.parts.sequence.kernels import BlockOutput
from fourfold.plan.sequence import TokenRange


class OnlineSoftmax:
    """Attention of a rank's queries to the keys seen so far: out [B, H, l, V] and lse [B, H, l]."""

    def __init__(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> None:
        self._shape, self._dtype, self._device = shape, accumulation_dtype(dtype), device
        self._output: BlockOutput | None = None

    def merge(self, block: BlockOutput, samples: slice, queries: TokenRange) -> None:
        """Merge the output of a block of the queries [start, stop) of some samples."""
        start, stop = queries
        block = BlockOutput(block.out.to(self._dtype), block.lse.to(self._dtype))
        if self._output is None and block.lse.shape == self._shape[:-1]:
            self._output = block
            return
        out, lse = self.out[samples, :, start:stop], self.lse[samples, :, start:stop]
        total = torch.logaddexp(lse, block.lse)
        # A query that attends to nothing in this block has weight 0 here, even if it has attended to nothing so far.
        weight = (block.lse - total).exp_().masked_fill_(block.lse == -inf, 0.0)
        out.lerp_(block.out, weight[..., None])
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
            self._output = BlockOutput(out, torch.full(self._shape[:-1], -inf, dtype=self._dtype, device=self._device))
        return self._output
