"""Draws: random numbers that samples draw from the generators of the process: torch's, Python's and NumPy's.

Law: what a sample draws is a function of seed, epoch and its number, so augmented samples are the same on any mesh and
after a resume; and training draws what it would have drawn if the samples drew nothing.

A source that has its own `fetch` draws for a batch as a whole, by its first sample: there the mesh counts.
"""

import functools
import hashlib
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fourfold.feed.source import fetch
from fourfold.words.task import Source


class States(NamedTuple):
    """The states of the generators on the CPU."""

    torch: Tensor
    python: Any
    numpy: Any


def fetch_drawing(source: Source, indices: Sequence[int], *, seed: int, epoch: int, draws: bool = False) -> Any:
    """The batch of these samples, and whether they draw. `draws`: they are known to.

    Nobody else may draw meanwhile. Samples are read twice where it turns out that they draw.
    """
    before = _states()
    seeded = functools.partial(_seed, seed, epoch)
    try:
        if not draws:
            batch = fetch(source, indices)
            if _are_as(before):
                return batch, False
        return fetch(source, indices, before=seeded), True
    finally:
        if not _are_as(before):
            _put_back(before)


def _states() -> States:
    return States(torch.get_rng_state(), random.getstate(), np.random.get_state())


def _are_as(states: States) -> bool:
    now = _states()
    ours, theirs = now.numpy, states.numpy
    if not torch.equal(now.torch, states.torch) or now.python != states.python:
        return False
    return np.array_equal(ours[1], theirs[1]) and ours[2:] == theirs[2:]


def _put_back(states: States) -> None:
    torch.set_rng_state(states.torch)
    random.setstate(states.python)
    np.random.set_state(states.numpy)


def _seed(seed: int, epoch: int, number: int) -> None:
    digest = hashlib.blake2b(f"fourfold sample {seed} {epoch} {number}".encode(), digest_size=8).digest()
    value = int.from_bytes(digest, "little")
    torch.default_generator.manual_seed(value)  # not torch.manual_seed, which seeds the GPUs' generators too
    random.seed(value)
    np.random.seed(value % 2**32)
