"""Operations: what kernels take by themselves, for models that no calibration has seen.

Law: all ranks run the same kernels at the same time, with the threads of the job.
"""

from collections.abc import Callable
from statistics import mean
from typing import NamedTuple

import torch
import torch.nn.functional as F

from fourfold.analysis.calibrate.timing import Points, Turns

PRODUCT_SIZES = (16, 64, 128, 256, 512, 1024)
ROWS, WEIGHT_SIZE = (1, 4, 16, 64, 256), 2050  # no power of two: see SIZES in `buckets.py`
ATTENTION_LENGTHS = (64, 128, 256, 512)
HEADS, HEAD_SIZE = 8, 32
CHANNELS, IMAGE = (16, 64, 128), 16
POINTWISE_ELEMENTS, COLUMNS = (1_024, 16_384, 128_000, 1_024_000, 8_192_000), 64
PASS_BYTES = (2**12, 2**16, 2**20, 2**22, 2**24, 2**26, 2**28)
MIN_FLOPS, MIN_BYTES = 2e7, 2**22  # of what is timed at once: the clock has to see it


class OperationTimes(NamedTuple):
    """In the order of `OperationRates`."""

    products: Points
    thin: Points
    outer: Points
    attention: Points
    convolution: Points
    pointwise: Points
    passes: Points


@torch.no_grad()
def measure_operations(turns: Turns) -> OperationTimes:
    """Collective."""
    with turns.ranks.device:  # of all tensors below
        return _measure_operations(turns)


def _measure_operations(turns: Turns) -> OperationTimes:
    weight = torch.randn(WEIGHT_SIZE, WEIGHT_SIZE)
    rows = [torch.randn(count, WEIGHT_SIZE) for count in ROWS]
    return OperationTimes(
        [_product(turns, size) for size in PRODUCT_SIZES],
        [(len(each), turns.median_seconds(lambda x=each: F.linear(x, weight)) / weight.numel()) for each in rows],
        [(len(each), turns.median_seconds(lambda x=each: x.t() @ x) / weight.numel()) for each in rows],
        [_attention(turns, length) for length in ATTENTION_LENGTHS],
        [_convolution(turns, channels) for channels in CHANNELS],
        [_pointwise(turns, size) for size in POINTWISE_ELEMENTS],
        [_pass(turns, num_bytes) for num_bytes in PASS_BYTES],
    )


def _repeated(run: Callable[[], object], turns: Turns, size: float, least: float) -> float:
    """Seconds of a call; so many at a time that together they have the least size."""
    count = max(1, round(least / size))

    def repeat() -> None:
        for _ in range(count):
            run()

    return turns.median_seconds(repeat) / count


def _product(turns: Turns, size: int) -> tuple[float, float]:
    left, right = torch.randn(size, size), torch.randn(size, size)
    flops = 2.0 * size**3
    return flops, _repeated(lambda: F.linear(left, right), turns, flops, MIN_FLOPS)


def _attention(turns: Turns, length: int) -> tuple[float, float]:
    q, k, v = torch.randn(3, 1, HEADS, length, HEAD_SIZE)
    flops = 4.0 * HEADS * HEAD_SIZE * length**2
    return flops, _repeated(lambda: F.scaled_dot_product_attention(q, k, v), turns, flops, MIN_FLOPS)


def _convolution(turns: Turns, channels: int) -> tuple[float, float]:
    images, weight = torch.randn(4, channels, IMAGE, IMAGE), torch.randn(channels, channels, 3, 3)
    flops = 2.0 * images.numel() * channels * 9
    return flops, _repeated(lambda: F.conv2d(images, weight, padding=1), turns, flops, MIN_FLOPS)


def _pointwise(turns: Turns, size: int) -> tuple[float, float]:
    """A sum, a product with a number of each row, an activation and a norm; bytes and seconds are their means."""
    x, y, scale = (
        torch.randn(size // COLUMNS, COLUMNS),
        torch.randn(size // COLUMNS, COLUMNS),
        torch.randn(size // COLUMNS, 1),
    )
    kernels = [lambda: x + y, lambda: x * scale, lambda: F.silu(x), lambda: F.layer_norm(x, (COLUMNS,))]
    moved = x.nbytes * mean((3, 2, 2, 2))
    return moved, mean(_repeated(each, turns, moved, MIN_BYTES) for each in kernels)


def _pass(turns: Turns, num_bytes: int) -> tuple[float, float]:
    """A copy reads half of the bytes and writes the other half."""
    source = torch.zeros(num_bytes // 2 // 4)
    target = torch.empty_like(source)
    return float(num_bytes), _repeated(lambda: target.copy_(source), turns, num_bytes, MIN_BYTES)
