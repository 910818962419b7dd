"""Source fingerprint: numbers from one sample, by which ranks check that they read the same source.

Law: all ranks have the same fingerprint of one source but for rounding, whichever samples they train on. A source whose
sample differs each time it is read has none.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fourfold.feed.sample_rng import fetch_seeded
from fourfold.words.task import Source

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
