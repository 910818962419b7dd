"""Sample RNG: random numbers that samples draw from the process's generators: torch's, Python's and NumPy's.

Law: what a sample draws is a function of the seed, the epoch and its number. So augmented samples are the same on any
mesh and after a resume; and training draws the numbers that it would draw if the samples drew none.

A source with its own `fetch` draws once for a whole batch, seeded by its first sample: there the mesh makes a
difference.
"""

import functools
import hashlib
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fourfold.feed.readable import Fetched, fetch_any, fetch_readable
from fourfold.feed.source import fetch
from fourfold.words.errors import DamagedSample
from fourfold.words.task import Source


class GeneratorStates(NamedTuple):
    """The states of the generators on the CPU."""

    torch: Tensor
    python: Any
    numpy: Any


def fetch_seeded(
    source: Source, indices: Sequence[int], *, seed: int, epoch: int, uses_rng: bool = False
) -> tuple[Fetched, bool]:
    """The batch of these samples that can be read, and whether they draw random numbers. `uses_rng`: they are known to.

    No other code may draw meanwhile. If samples turn out to draw, they are read a second time, seeded.
    """
    before = generator_states()
    seeded = functools.partial(seed_generators, seed, epoch)
    try:
        if not uses_rng:
            batch = fetch_readable(source, indices)
            if are_current(before):
                return batch, False
        return fetch_readable(source, indices, before_sample=seeded), True
    finally:
        if not are_current(before):
            restore(before)


def fetch_one(source: Source, number: int) -> Any:
    """A batch of sample `number`, or of another one if it is damaged. Advances no generator."""
    before = generator_states()
    seeded = functools.partial(seed_generators, 0, 0)
    try:
        try:
            return fetch(source, [number], before_sample=seeded)
        except DamagedSample:
            return fetch_any(source, before_sample=seeded)
    finally:
        restore(before)


def generator_states() -> GeneratorStates:
    """The states that the generators have now."""
    return GeneratorStates(torch.get_rng_state(), random.getstate(), np.random.get_state())


def are_current(states: GeneratorStates) -> bool:
    """Whether no number has been drawn since these states."""
    now = generator_states()
    ours, theirs = now.numpy, states.numpy
    if not torch.equal(now.torch, states.torch) or now.python != states.python:
        return False
    return np.array_equal(ours[1], theirs[1]) and ours[2:] == theirs[2:]


def restore(states: GeneratorStates) -> None:
    """Put the generators into these states."""
    torch.set_rng_state(states.torch)
    random.setstate(states.python)
    np.random.set_state(states.numpy)


def seed_generators(seed: int, epoch: int, number: int) -> None:
    """Seed the generators for sample `number` of an epoch."""
    digest = hashlib.blake2b(f"fourfold sample {seed} {epoch} {number}".encode(), digest_size=8).digest()
    value = int.from_bytes(digest, "little")
    torch.default_generator.manual_seed(value)  # not torch.manual_seed, which seeds the GPUs' generators too
    random.seed(value)
    np.random.seed(value % 2**32)
