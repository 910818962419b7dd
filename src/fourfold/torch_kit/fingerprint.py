"""Fingerprints: 64-bit hashes of tensors' bytes, computed on the tensors' devices.

word  8 bytes of a tensor, as an int64
Law: equal bytes have equal fingerprints because only integers are added. A changed bit or two swapped
elements give another fingerprint, except in about one of 2^64 cases.

Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators" (2014).
"""

from collections.abc import Sequence

import torch
import xxhash
from torch import Tensor

# ---- splitmix64 ----------------------------------------------------------------------------------------------------

GOLDEN_GAMMA = 0x9E3779B97F4A7C15
MULTIPLIER_1, MULTIPLIER_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


# ---- fingerprints --------------------------------------------------------------------------------------------------


# As signed numbers.
STRIDE, MULTIPLIER = GOLDEN_GAMMA - 2**64, MULTIPLIER_1 - 2**64
CHUNK_WORDS = 2**22  # temporaries take the memory of two chunks


@torch.no_grad()
def fingerprints(tensors: Sequence[Tensor]) -> list[int]:
    """The fingerprint of each tensor. Waits for a device once."""
    # On CPUs XXH3 is as fast as memory; the sum below takes 20 times as long there.
    hashes: list[int | None] = [
        xxhash.xxh3_64_intdigest(_as_bytes(t).numpy().data) if t.device.type == "cpu" else None for t in tensors
    ]
    on_devices = [device_fingerprint(tensor) for tensor in tensors if tensor.device.type != "cpu"]
    numbers = iter(torch.stack(on_devices).tolist() if on_devices else [])
    return [next(numbers) if number is None else number for number in hashes]


@torch.no_grad()
def device_fingerprint(tensor: Tensor) -> Tensor:
    """int64 [], on the tensor's device: the sum modulo 2^64 of its words, each mixed with its index."""
    raw = _as_bytes(tensor)
    num_aligned = raw.numel() // 8 * 8
    total = torch.zeros((), dtype=torch.int64, device=raw.device)
    words = raw[:num_aligned].view(torch.int64)
    for start in range(0, len(words), CHUNK_WORDS):
        total += _mixed_sum(words[start : start + CHUNK_WORDS], start)
    if num_aligned < raw.numel():
        last = torch.zeros(8, dtype=torch.uint8, device=raw.device)
        last[: raw.numel() - num_aligned] = raw[num_aligned:]
        total += _mixed_sum(last.view(torch.int64), len(words))
    return total


def _mixed_sum(words: Tensor, first: int) -> Tensor:
    # Not linear in the words: swapping +1 and -1 in float64 would change a linear sum by 2^63 times an even number.
    mixed = torch.arange(first, first + len(words), device=words.device).mul_(STRIDE).add_(words)
    mixed ^= mixed >> 32
    mixed *= MULTIPLIER
    mixed ^= mixed >> 29
    return mixed.sum()


def _as_bytes(tensor: Tensor) -> Tensor:
    """uint8 [n], aligned to words."""
    flat = tensor.detach().contiguous().reshape(-1)
    raw = (torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat).view(torch.uint8)
    return raw.clone() if raw.storage_offset() % 8 else raw
