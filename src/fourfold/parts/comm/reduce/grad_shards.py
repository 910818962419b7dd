"""Gradient shards: where gradients rest split, each rank adds up its shard of every round of reductions.

round  one reduction of all buckets; a step that accumulates gradients has several
"""

from collections.abc import Sequence

from torch import Tensor

from fourfold.parts import memory


class GradShards:
    """This rank's shard of each bucket's gradient."""

    def __init__(self, grad_buffers: Sequence[Tensor], num_shards: int) -> None:
        self.flats = [
            memory.allocate_private(flat.numel() // num_shards, flat.dtype, flat.device) for flat in grad_buffers
        ]
        self.begin_step()

    def begin_step(self) -> None:
        """From now on, each bucket's first sum replaces the old values."""
        self._is_first_round = [True] * len(self.flats)

    def accumulate(self, bucket: int, total: Tensor) -> None:
        """Add the sum of one round."""
        if self._is_first_round[bucket]:
            self.flats[bucket].copy_(total)
        else:
            self.flats[bucket].add_(total)
        self._is_first_round[bucket] = False
