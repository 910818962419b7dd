"""Alike: ranks that hold tokens of the same samples are given the same batch, and in every step this is checked.

mark   of a batch on one rank: all ranks' marks add up to 0 where lines have the same batch; they travel with the loss
Law: exact integers in float64, so that no order of adding rounds; other batches go unseen once in 2^32 steps.
"""

from collections.abc import Sequence
from typing import Any

import torch
import xxhash

from fourfold.run.batch import leaves
from fourfold.words.errors import Problem

MARK_BITS = 32


def digest(batch: Any) -> int:
    """A hash of all numbers of a batch, 64 bits."""
    found = xxhash.xxh3_64()
    for tensor in leaves(batch):
        found.update(f"{tensor.dtype} {list(tensor.shape)}".encode())
        found.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return found.intdigest()


def mark(batch: Any, index: int, size: int) -> float:
    """The mark of a batch on the rank of this index in a line of `size` ranks."""
    number = digest(batch) % 2**MARK_BITS
    return float(number * (size - 1) if index == 0 else -number)


def unlike(ranks: Sequence[int] = ()) -> Problem:
    """What is wrong where a line's ranks, if they are known, have other batches."""
    those = f"ranks {', '.join(map(str, ranks))}, which" if ranks else "the ranks that"
    got = f"sp > 1, and other batches on some of {those} share sequences"
    need = "the same batch on each of them: a rank takes its own tokens of it"
    return Problem(got, need, "a sampler with num_replicas=step.plan.dp and rank=step.data_index, or ff.Feed")
