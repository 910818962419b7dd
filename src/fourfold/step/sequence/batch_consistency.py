"""Batch consistency: ranks that work on the same samples must get the same batch. Every step checks it.

digest    a hash of all numbers of a batch
mismatch  different digests in an sp group: its ranks take part in the step without samples
Law: all ranks receive a mismatch together with the loss, and refuse the step before a weight changes.
"""

from collections.abc import Sequence
from typing import Any

import torch
import xxhash
from torch import Tensor

from fourfold.parts.comm.ring.protocol import RingGroup
from fourfold.step.tensor_tree import tree_leaves
from fourfold.words.errors import Problem

DIGEST_BITS = 62  # fits an int64, which every transport carries


def batch_digest(batch: Any) -> int:
    """A hash of the values, dtypes and shapes of a batch."""
    digest = xxhash.xxh3_64()
    for tensor in tree_leaves(batch):
        digest.update(f"{tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(_tensor_bytes(tensor))
    return digest.intdigest() >> (64 - DIGEST_BITS)


def _tensor_bytes(tensor: Tensor) -> memoryview:
    flat = tensor.detach().cpu().reshape(-1)
    if flat.stride(0) != 1:
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8).numpy().data


def is_equal_across_ranks(number: int, ring_groups: Sequence[RingGroup], device: torch.device) -> bool:
    """Whether all ranks of an sp group have this number. Collective; `ring_groups` together reach them all."""
    differs = 0
    for group in ring_groups:
        rows = [row.tolist() for row in group.all_gather([torch.tensor([number, differs], device=device)])]
        differs = int(any(row != [number, 0] for row in rows))
    return not differs


def batch_mismatch_problem(axis: str = "", ranks: Sequence[int] = ()) -> Problem:
    """What is wrong if ranks that differ on this axis only have different batches; "": on another rank's axes."""
    if axis:
        group = f"ranks {', '.join(map(str, ranks))}, which differ only on {axis}"
    else:
        group = "the ranks that differ only on sp or tp"
    got = f"different batches on some of {group}"
    need = "the same batch on each of these ranks: they work on the same samples"
    return Problem(got, need, "ff.Feed(dataset, plan, batch_size=…), or ff.shard(loader, plan)")
