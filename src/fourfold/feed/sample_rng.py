"""Sample RNG: random numbers that samples draw from the process's generators: torch's, Python's and NumPy's.

Law: what a sample draws is a function of the seed, the epoch and its number. So augmented samples are the same on any
mesh and after a resume; and training draws the numbers that it would draw if the samples drew none.

A source with its own `fetch` draws once for a whole batch, seeded by its first sample: there the mesh makes a
difference.

Law: all ranks have the same fingerprint of one source but for rounding, whichever samples they train on. A source whose
sample differs each time it is read has none.
"""

import functools
import hashlib
import random
from collections.abc import Iterator, Mapping, Sequence
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


# ---- Source fingerprint: numbers from one sample, by which ranks check that they read the same source ---------------

NUM_SAMPLED_ELEMENTS = 256  # of each tensor, spread evenly
TOLERANCE = 1e-3  # different processors may round what a source computes differently

Fingerprint = list[list[Any]]


def fingerprint_of(batch: Any) -> Fingerprint:
    """The shape and some elements of each tensor, in order, as JSON values."""
    return [[list(leaf.shape), _elements(leaf)] for leaf in _leaves(batch)]


def is_same_sample(first: Fingerprint, second: Fingerprint) -> bool:
    """Whether two fingerprints are of the same sample, but for rounding."""
    if [shape for shape, _ in first] != [shape for shape, _ in second]:
        return False
    return all(_are_close(a, b) for (_, a), (_, b) in zip(first, second, strict=True))


def _are_close(first: Sequence[float], second: Sequence[float]) -> bool:
    a, b = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    finite = np.abs(np.concatenate([a, b]))
    largest = float(finite[np.isfinite(finite)].max(initial=0.0))
    return bool(np.allclose(a, b, rtol=0.0, atol=TOLERANCE * largest, equal_nan=True))


def _elements(leaf: Tensor) -> list[float]:
    flat = (torch.view_as_real(leaf) if leaf.is_complex() else leaf).reshape(-1)
    indices = torch.linspace(0, max(0, len(flat) - 1), min(len(flat), NUM_SAMPLED_ELEMENTS)).long()
    return flat[indices].double().tolist()


def _leaves(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Mapping):
        for key in sorted(batch, key=str):
            yield from _leaves(batch[key])
    elif isinstance(batch, tuple | list):
        for part in batch:
            yield from _leaves(part)
    elif isinstance(batch, Tensor) and batch.layout is torch.strided and not batch.is_quantized:
        yield batch.detach()


def probe_source(source: Source, *, seed: int, uses_rng: bool) -> Fingerprint | None:
    """The fingerprint of the source's middle sample; None if it is damaged, or differs each time it is read."""
    options = {"seed": seed, "epoch": 0, "uses_rng": uses_rng}
    try:
        twice = [fetch_seeded(source, [len(source) // 2], **options)[0] for _ in range(2)]
    except Exception:  # the batch that holds this sample will raise the error
        return None
    if any(each.damaged for each in twice):
        return None
    first, second = (fingerprint_of(each.values) for each in twice)
    return first if is_same_sample(first, second) else None
