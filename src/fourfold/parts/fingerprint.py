"""Fingerprints: 64 bits of a tensor's bytes, each at its place; computed where the tensor lies.

word  8 bytes of a tensor, as an int64
Law: integers only, so equal bytes have equal fingerprints; a changed bit or two elements that change places give
another one (but for one case in about 2^64).
"""

from collections.abc import Sequence

import torch
import xxhash
from torch import Tensor

# Of splitmix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014), as signed numbers.
STRIDE = 0x9E3779B97F4A7C15 - 2**64
MULTIPLIER = 0xBF58476D1CE4E5B9 - 2**64
CHUNK_WORDS = 2**22  # words at a time: what is computed on the way takes two chunks of memory


@torch.no_grad()
def fingerprints(tensors: Sequence[Tensor]) -> list[int]:
    """Of each tensor. Waits for a device once."""
    # On CPUs XXH3 reads as fast as memory gives; the same in torch's operations takes 20 times as long.
    found: list[int | None] = [
        xxhash.xxh3_64_intdigest(_as_bytes(t).numpy().data) if t.device.type == "cpu" else None for t in tensors
    ]
    elsewhere = [device_fingerprint(tensor) for tensor in tensors if tensor.device.type != "cpu"]
    numbers = iter(torch.stack(elsewhere).tolist() if elsewhere else [])
    return [next(numbers) if number is None else number for number in found]


@torch.no_grad()
def device_fingerprint(tensor: Tensor) -> Tensor:
    """int64 [], on the tensor's device: the sum modulo 2^64 of its words, each mixed with its place."""
    raw = _as_bytes(tensor)
    whole = raw.numel() // 8 * 8
    total = torch.zeros((), dtype=torch.int64, device=raw.device)
    words = raw[:whole].view(torch.int64)
    for start in range(0, len(words), CHUNK_WORDS):
        total += _mixed_sum(words[start : start + CHUNK_WORDS], start)
    if whole < raw.numel():
        last = torch.zeros(8, dtype=torch.uint8, device=raw.device)
        last[: raw.numel() - whole] = raw[whole:]
        total += _mixed_sum(last.view(torch.int64), len(words))
    return total


def _mixed_sum(words: Tensor, first: int) -> Tensor:
    # Not linear in the words: else +1 and -1 that change places in float64 would differ by 2^63 times an even number.
    mixed = torch.arange(first, first + len(words), device=words.device).mul_(STRIDE).add_(words)
    mixed ^= mixed >> 32
    mixed *= MULTIPLIER
    mixed ^= mixed >> 29
    return mixed.sum()


def _as_bytes(tensor: Tensor) -> Tensor:
    """uint8 [n], from a place where words may be read."""
    flat = tensor.detach().contiguous().reshape(-1)
    raw = (torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat).view(torch.uint8)
    return raw.clone() if raw.storage_offset() % 8 else raw
