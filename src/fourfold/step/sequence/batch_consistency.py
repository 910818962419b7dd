"""Alike: ranks that hold tokens of the same samples are given the same batch, and in every step this is checked.

digest   a hash of all numbers of a batch
unlike   a rank whose line has other batches takes part in the step with no samples at all; all ranks learn of it with
         the loss, and refuse the step before a weight moves
"""

from collections.abc import Sequence
from typing import Any

import torch
import xxhash
from torch import Tensor

from fourfold.parts.comm.ring.protocol import RingGroup
from fourfold.step.tensor_tree import tree_leaves
from fourfold.words.errors import Problem

DIGEST_BITS = 62  # of an int64, which every transport carries


def batch_digest(batch: Any) -> int:
    """A hash of all numbers of a batch, of their dtypes and shapes."""
    found = xxhash.xxh3_64()
    for tensor in tree_leaves(batch):
        found.update(f"{tensor.dtype} {list(tensor.shape)}".encode())
        found.update(_tensor_bytes(tensor))
    return found.intdigest() >> (64 - DIGEST_BITS)


def _tensor_bytes(tensor: Tensor) -> memoryview:
    flat = tensor.detach().cpu().reshape(-1)
    if flat.stride(0) != 1:
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8).numpy().data


def is_equal_across_ranks(number: int, ring_groups: Sequence[RingGroup], device: torch.device) -> bool:
    """Whether all ranks of a line have this number. Collective among them: `links` lead to all of them by turns."""
    differs = 0
    for link in ring_groups:
        rows = [row.tolist() for row in link.all_gather([torch.tensor([number, differs], device=device)])]
        differs = int(any(row != [number, 0] for row in rows))
    return not differs


def batch_mismatch_problem(ranks: Sequence[int] = ()) -> Problem:
    """What is wrong where a line's ranks, if they are known, have other batches."""
    those = f"ranks {', '.join(map(str, ranks))}, which" if ranks else "the ranks that"
    got = f"sp > 1, and other batches on some of {those} share sequences"
    need = "the same batch on each of them: a rank takes its own tokens of it"
    return Problem(got, need, "ff.Feed(dataset, plan, batch_size=…), or ff.shard(loader, plan)")
