"""Batch split: into how many parts a step cuts a global batch.

part  what one rank computes at once: a microbatch, or with sp > 1 its tokens of one
Law: each sample, or token of it, is in one part.
"""

from typing import NamedTuple


class BatchSplit(NamedTuple):
    """Data ranks have different samples; ranks that differ on sp have shards of the tokens of the same ones."""

    num_data_ranks: int = 1
    num_token_shards: int = 1
    num_microbatches: int = 1
    has_local_batch_norm: bool = False
    """Whether batch normalization may use the statistics of each part; else those of a split batch are refused."""

    @property
    def num_ranks(self) -> int:
        return self.num_data_ranks * self.num_token_shards

    @property
    def num_parts(self) -> int:
        return self.num_ranks * self.num_microbatches
