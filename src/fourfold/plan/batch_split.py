"""Batch split: into how many parts a step cuts a global batch.

part  what one rank computes at once: a microbatch, or with cp > 1 its tokens of one
Law: each sample, or token of it, is in one part.
"""

from typing import NamedTuple

from fourfold.words.errors import Problem


class BatchSplit(NamedTuple):
    """Data ranks have different samples; ranks that differ on cp have shards of the tokens of the same ones."""

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


def batch_size_problems(batch_size: int, *, dp: int, microbatches: int) -> list[Problem]:
    """The samples of a step are divided evenly among data ranks and microbatches."""
    parts = dp * microbatches
    if batch_size % parts == 0:
        return []
    below = batch_size // parts * parts
    attempt = f"batch_size={below} or {below + parts}" if below else f"batch_size={parts}"
    need = "a batch divisible by dp × microbatches" if microbatches > 1 else "a batch divisible by dp"
    got = f"batch_size = {batch_size}, dp = {dp}" + (f", microbatches = {microbatches}" if microbatches > 1 else "")
    return [Problem(got, need, attempt)]
