"""Dropout of attention that does not depend on the mesh: who is dropped is a function of where it is.

A probability is kept or dropped by a hash of (seed, step, call, sample, head, query's place, key's place), all of them
global. The hash is SplitMix64 (Steele, Lea and Flood 2014): one stream for every row of scores, whose start is a hash
of the row, and whose counter is the key's place.

B samples · H query heads · R queries · C keys
Law: any rank, and one process alone, draws the same for the same place.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fourfold.parts.splitmix64 import GOLDEN_GAMMA, MULTIPLIER_1, MULTIPLIER_2
from fourfold.words.errors import Problem, TrainingError

TWO_TO_64 = 2**64


@dataclass(frozen=True)
class AttentionDropout:
    """What is dropped in one call of attention. `samples`: which samples of the global batch these are, [B].

    Probabilities that are kept are divided by 1 − p, as torch does it. Raises TrainingError unless 0 ≤ p ≤ 1.
    """

    p: float
    seed: int = 0
    step: int = 0
    call: int = 0
    samples: Sequence[int] | Tensor | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.p <= 1.0:
            raise TrainingError(Problem(f"dropout of {self.p}", "a probability"), where="attention")

    @property
    def keep_scale(self) -> float:
        """What is kept is multiplied by this."""
        return 1.0 / (1.0 - self.p) if self.p < 1.0 else 0.0


@dataclass(frozen=True)
class DropoutMask:
    """A dropout, and where this rank's scores are: int64 `samples` [B], `heads` [H], `queries` [l], `keys` [k]."""

    dropout: AttentionDropout
    samples: Tensor
    heads: Tensor
    queries: Tensor
    keys: Tensor

    @property
    def keep_scale(self) -> float:
        return self.dropout.keep_scale

    def keep_mask(self, rows: slice, columns: slice) -> Tensor:
        """bool [B, H, R, C]: which of these scores are kept."""
        drop = self.dropout
        key = 0
        for number in (drop.seed, drop.step, drop.call):
            key = _splitmix64_int(key ^ (number % TWO_TO_64))
        keys = _splitmix64(self.samples[:, None] ^ _as_int64(key))
        keys = _splitmix64(keys ^ self.heads)
        keys = _splitmix64(keys[..., None] ^ self.queries[rows])
        drawn = keys[..., None] + self.keys[columns] * _as_int64(GOLDEN_GAMMA)
        # A double times 2^64 is exact, so p is too.
        threshold = int(drop.p * TWO_TO_64) - TWO_TO_64 // 2
        if threshold >= TWO_TO_64 // 2:
            return torch.zeros(drawn.shape, dtype=torch.bool, device=drawn.device)
        return _splitmix64(drawn) >= threshold


def sample_indices(dropout: AttentionDropout, batch: int, device: torch.device) -> Tensor:
    """int64 [B]; those of the batch from 0 on where the dropout does not say. Raises TrainingError."""
    if dropout.samples is None:
        return torch.arange(batch, device=device)
    samples = torch.as_tensor(dropout.samples, dtype=torch.int64, device=device)
    if samples.shape != (batch,):
        got = f"{tuple(samples.shape)} samples of the dropout, a batch of {batch}"
        raise TrainingError(Problem(got, "one for each"), where="attention")
    return samples


def _splitmix64_int(number: int) -> int:
    number = (number + GOLDEN_GAMMA) % TWO_TO_64
    number = ((number ^ (number >> 30)) * MULTIPLIER_1) % TWO_TO_64
    number = ((number ^ (number >> 27)) * MULTIPLIER_2) % TWO_TO_64
    return number ^ (number >> 31)


def _splitmix64(words: Tensor) -> Tensor:
    """SplitMix64's finalizer, of every int64, in place. Products wrap around, as they are to."""
    words = words.add_(_as_int64(GOLDEN_GAMMA))
    for shift, factor in ((30, MULTIPLIER_1), (27, MULTIPLIER_2), (31, 1)):
        # torch shifts the sign in: it is masked off again.
        words.bitwise_xor_((words >> shift).bitwise_and_(2 ** (64 - shift) - 1))
        if factor != 1:
            words.mul_(_as_int64(factor))
    return words


def _as_int64(word: int) -> int:
    return word - TWO_TO_64 if word >= TWO_TO_64 // 2 else word
