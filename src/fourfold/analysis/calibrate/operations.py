"""Operations: what kernels take by themselves, for models that no calibration has seen.

Law: all ranks run the same kernels at the same time, on one thread more than none: that of the job.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fourfold.analysis.calibrate.timing import Points, Turns

PRODUCT_SIZES = (16, 64, 128, 256, 512, 1024)
ATTENTION_LENGTHS = (64, 128, 256, 512)
HEADS, HEAD_SIZE = 8, 32
CHANNELS, IMAGE = (16, 64, 128), 16
PASS_BYTES = (2**12, 2**16, 2**20, 2**22, 2**24, 2**26, 2**28)
MIN_FLOPS = 2e7  # of what is timed at once: the clock has to see it


class OperationTimes(NamedTuple):
    """Seconds by floating-point operations, and of a pass by bytes read and written."""

    products: Points
    attention: Points
    convolution: Points
    passes: Points


@torch.no_grad()
def measure_operations(turns: Turns) -> OperationTimes:
    """Collective."""
    return OperationTimes(
        [_product(turns, size) for size in PRODUCT_SIZES],
        [_attention(turns, length) for length in ATTENTION_LENGTHS],
        [_convolution(turns, channels) for channels in CHANNELS],
        [_pass(turns, num_bytes) for num_bytes in PASS_BYTES],
    )


def _repeated(run: Callable[[], object], turns: Turns, flops: float) -> tuple[float, float]:
    count = max(1, round(MIN_FLOPS / flops))

    def repeat() -> None:
        for _ in range(count):
            run()

    return flops, turns.median_seconds(repeat) / count


def _product(turns: Turns, size: int) -> tuple[float, float]:
    left, right = torch.randn(size, size), torch.randn(size, size)
    return _repeated(lambda: F.linear(left, right), turns, 2.0 * size**3)


def _attention(turns: Turns, length: int) -> tuple[float, float]:
    q, k, v = torch.randn(3, 1, HEADS, length, HEAD_SIZE)
    flops = 4.0 * HEADS * HEAD_SIZE * length**2
    return _repeated(lambda: F.scaled_dot_product_attention(q, k, v), turns, flops)


def _convolution(turns: Turns, channels: int) -> tuple[float, float]:
    images, weight = torch.randn(4, channels, IMAGE, IMAGE), torch.randn(channels, channels, 3, 3)
    flops = 2.0 * images.numel() * channels * 9
    return _repeated(lambda: F.conv2d(images, weight, padding=1), turns, flops)


def _pass(turns: Turns, num_bytes: int) -> tuple[float, float]:
    """A copy reads half of the bytes and writes the other half."""
    source = torch.zeros(num_bytes // 2 // 4)
    target = torch.empty_like(source)
    count = max(1, 2**22 // num_bytes)

    def repeat(target: Tensor = target) -> None:
        for _ in range(count):
            target.copy_(source)

    return float(num_bytes), turns.median_seconds(repeat) / count
