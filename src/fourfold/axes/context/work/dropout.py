"""Attention dropout: which probabilities are dropped, independent of the mesh.

A hash of (seed, step, call, sample, head, query position, key position), all of them global, decides whether a
probability is kept. The hash is SplitMix64 (Steele, Lea and Flood 2014), with one stream per row of scores: a hash of
the row is its start, the key position is its counter.

B samples · H query heads · R queries · C keys
Law: on any mesh, and in one process, the same entry of the score matrix is dropped.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fourfold.torch_kit.fingerprint import GOLDEN_GAMMA, MULTIPLIER_1, MULTIPLIER_2
from fourfold.words.errors import Problem, TrainingError

TWO_TO_64 = 2**64


@dataclass(frozen=True)
class AttentionDropout:
    """Dropout in one call of attention.

    samples     [B]: the indices of these samples in the global batch
    first_head  the index of the first of the H heads, where other tensor ranks have others
    As in torch, the probabilities that are kept are divided by 1 − p. Raises TrainingError unless 0 ≤ p ≤ 1.
    """

    p: float
    seed: int = 0
    step: int = 0
    call: int = 0
    samples: Sequence[int] | Tensor | None = None
    first_head: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.p <= 1.0:
            raise TrainingError(Problem(f"dropout of {self.p}", "a probability from 0 to 1"), where="attention")

    @property
    def keep_scale(self) -> float:
        """The factor 1 / (1 − p) of the probabilities that are kept."""
        return 1.0 / (1.0 - self.p) if self.p < 1.0 else 0.0


@dataclass(frozen=True)
class DropoutMask:
    """A dropout at the global indices of a block of scores: int64 samples [B], heads [H], queries [R], keys [C]."""

    dropout: AttentionDropout
    samples: Tensor
    heads: Tensor
    queries: Tensor
    keys: Tensor

    @property
    def keep_scale(self) -> float:
        return self.dropout.keep_scale

    def keep_mask(self, rows: slice, columns: slice) -> Tensor:
        """Which of these scores are kept: bool [B, H, R, C]."""
        dropout = self.dropout
        call_hash = 0
        for number in (dropout.seed, dropout.step, dropout.call):
            call_hash = _splitmix64_int(call_hash ^ (number % TWO_TO_64))
        hashes = _splitmix64(self.samples[:, None] ^ _as_int64(call_hash))
        hashes = _splitmix64(hashes ^ self.heads)
        hashes = _splitmix64(hashes[..., None] ^ self.queries[rows])
        counters = hashes[..., None] + self.keys[columns] * _as_int64(GOLDEN_GAMMA)
        # The product of a double and 2^64 is exact, so the threshold is p exactly.
        threshold = int(dropout.p * TWO_TO_64) - TWO_TO_64 // 2
        if threshold >= TWO_TO_64 // 2:
            return torch.zeros(counters.shape, dtype=torch.bool, device=counters.device)
        return _splitmix64(counters) >= threshold


def sample_indices(dropout: AttentionDropout, batch: int, device: torch.device) -> Tensor:
    """The samples of a dropout, int64 [B]; 0, 1, 2 … if it names none. Raises TrainingError."""
    if dropout.samples is None:
        return torch.arange(batch, device=device)
    samples = torch.as_tensor(dropout.samples, dtype=torch.int64, device=device)
    if samples.shape != (batch,):
        got = f"dropout with sample indices of shape {list(samples.shape)}, and a batch of {batch} samples"
        raise TrainingError(Problem(got, f"one index per sample: [{batch}]"), where="attention")
    return samples


def _splitmix64_int(number: int) -> int:
    number = (number + GOLDEN_GAMMA) % TWO_TO_64
    number = ((number ^ (number >> 30)) * MULTIPLIER_1) % TWO_TO_64
    number = ((number ^ (number >> 27)) * MULTIPLIER_2) % TWO_TO_64
    return number ^ (number >> 31)


def _splitmix64(words: Tensor) -> Tensor:
    """SplitMix64's finalizer on every int64, in place. Products wrap around, as the algorithm requires."""
    words = words.add_(_as_int64(GOLDEN_GAMMA))
    for shift, factor in ((30, MULTIPLIER_1), (27, MULTIPLIER_2), (31, 1)):
        # torch shifts the sign bit in; the mask removes it.
        words.bitwise_xor_((words >> shift).bitwise_and_(2 ** (64 - shift) - 1))
        if factor != 1:
            words.mul_(_as_int64(factor))
    return words


def _as_int64(word: int) -> int:
    return word - TWO_TO_64 if word >= TWO_TO_64 // 2 else word
