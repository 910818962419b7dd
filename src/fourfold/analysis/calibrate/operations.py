"""Operations: what kernels take by themselves, for models that no calibration has seen.

Law: all ranks run the same kernels at the same time, on one thread more than none: that of the job.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fourfold.analysis.calibrate.timing import Points, median_seconds
from fourfold.parts.comm.communicator import Communicator

PRODUCT_SIZES = (16, 64, 128, 256, 512, 1024)
ATTENTION_LENGTHS = (64, 128, 256, 512)
HEADS, HEAD_SIZE = 8, 32
CHANNELS, IMAGE = (16, 64, 128), 16
PASS_BYTES = (2**12, 2**16, 2**20, 2**22, 2**24, 2**26)
MIN_FLOPS = 2e7  # of what is timed at once: the clock has to see it


class OperationTimes(NamedTuple):
    """Seconds by floating-point operations, and of a pass by bytes read and written."""

    products: Points
    attention: Points
    convolution: Points
    passes: Points


@torch.no_grad()
def measure_operations(ranks: Communicator) -> OperationTimes:
    """Collective."""
    return OperationTimes(
        [_product(ranks, size) for size in PRODUCT_SIZES],
        [_attention(ranks, length) for length in ATTENTION_LENGTHS],
        [_convolution(ranks, channels) for channels in CHANNELS],
        [_pass(ranks, num_bytes) for num_bytes in PASS_BYTES],
    )


def _repeated(run: Callable[[], object], ranks: Communicator, flops: float) -> tuple[float, float]:
    count = max(1, round(MIN_FLOPS / flops))

    def repeat() -> None:
        for _ in range(count):
            run()

    return flops, median_seconds(repeat, ranks) / count


def _product(ranks: Communicator, size: int) -> tuple[float, float]:
    left, right = torch.randn(size, size), torch.randn(size, size)
    return _repeated(lambda: F.linear(left, right), ranks, 2.0 * size**3)


def _attention(ranks: Communicator, length: int) -> tuple[float, float]:
    q, k, v = torch.randn(3, 1, HEADS, length, HEAD_SIZE)
    flops = 4.0 * HEADS * HEAD_SIZE * length**2
    return _repeated(lambda: F.scaled_dot_product_attention(q, k, v), ranks, flops)


def _convolution(ranks: Communicator, channels: int) -> tuple[float, float]:
    images, weight = torch.randn(4, channels, IMAGE, IMAGE), torch.randn(channels, channels, 3, 3)
    flops = 2.0 * images.numel() * channels * 9
    return _repeated(lambda: F.conv2d(images, weight, padding=1), ranks, flops)


def _pass(ranks: Communicator, num_bytes: int) -> tuple[float, float]:
    """A copy reads half of the bytes and writes the other half."""
    source = torch.zeros(num_bytes // 2 // 4)
    target = torch.empty_like(source)
    count = max(1, 2**22 // num_bytes)

    def repeat(target: Tensor = target) -> None:
        for _ in range(count):
            target.copy_(source)

    return float(num_bytes), median_seconds(repeat, ranks) / count
