"""Cross entropy: `ff.losses.cross_entropy` against torch's, on the same logits, in turns.

torch    F.cross_entropy(reduction="none")
ours     ff.losses.cross_entropy
ratio    of the times of forward and backward: the median over turns, and the first decile of each
kept     what autograd saves for backward, as a multiple of the logits' bytes; the targets are not counted
peak     the most that forward and backward hold at once besides the logits, in the same unit
Law: both get the same logits, and their losses and gradients agree before anything is timed.

    PYTHONPATH=src:. OMP_NUM_THREADS=1 python -m bench.cross_entropy [TURNS]
"""

import sys
import time
from collections.abc import Callable
from statistics import median, quantiles
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.measurement import describe_machine, format_table
from fourfold.losses import cross_entropy
from fourfold.planner.task_facts.fake_memory import PeakMemory
from fourfold.testing.saved_tensors import recording_saved

SHAPES = [(2048, 256), (2048, 2048), (512, 32_000), (256, 50_257)]
DTYPES = [torch.float32, torch.bfloat16]
WARMUP, NUM_TURNS = 3, 30
Loss = Callable[[Tensor, Tensor], Tensor]


class Timings(NamedTuple):
    torch: list[float]
    ours: list[float]


def of_torch(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits, targets, reduction="none")


def forward_and_backward(loss: Loss, logits: Tensor, targets: Tensor) -> Tensor:
    logits.grad = None
    loss(logits, targets).sum().backward()
    assert logits.grad is not None
    return logits.grad


def seconds(loss: Loss, logits: Tensor, targets: Tensor) -> float:
    start = time.perf_counter()
    forward_and_backward(loss, logits, targets)
    return time.perf_counter() - start


def kept_bytes(loss: Loss, logits: Tensor, targets: Tensor) -> int:
    """What a loss adds to what is held between forward and backward: each storage once."""
    with recording_saved(excluded=[targets]) as saved:
        value = loss(logits, targets)
    del value
    return saved.num_bytes


def peak_bytes(loss: Loss, logits: Tensor, targets: Tensor) -> int:
    logits.grad = None
    with PeakMemory() as memory:
        loss(logits, targets).sum().backward()
    return memory.peak_bytes


def compare(shape: tuple[int, int], dtype: torch.dtype, turns: int) -> list[str]:
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(shape, generator=generator)).to(dtype).requires_grad_()
    targets = torch.randint(shape[1], shape[:1], generator=generator)
    expected = forward_and_backward(of_torch, logits, targets)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(forward_and_backward(cross_entropy, logits, targets), expected, rtol=0, atol=tolerance)
    timings = Timings([], [])
    for turn in range(WARMUP + turns):
        pair = (seconds(of_torch, logits, targets), seconds(cross_entropy, logits, targets))
        if turn >= WARMUP:
            timings.torch.append(pair[0])
            timings.ours.append(pair[1])
    fast = [quantiles(each, n=10)[0] for each in timings]
    ratio = median(ours / theirs for theirs, ours in zip(*timings, strict=True))
    unit = logits.numel() * logits.element_size()
    figures = [
        measure(each, logits, targets) / unit
        for measure in (kept_bytes, peak_bytes)
        for each in (of_torch, cross_entropy)
    ]
    return [
        f"{shape[0]} × {shape[1]}",
        str(dtype).removeprefix("torch."),
        f"{1e3 * fast[0]:.2f}",
        f"{1e3 * fast[1]:.2f}",
        f"{ratio:.2f}",
        f"{fast[1] / fast[0]:.2f}",
        *(f"{each:.2f}" for each in figures),
    ]


def main() -> None:
    turns = int(sys.argv[1]) if len(sys.argv) > 1 else NUM_TURNS
    print(describe_machine(), f"threads {torch.get_num_threads()}", sep="\n")
    head = [
        "logits",
        "dtype",
        "torch ms",
        "ours ms",
        "ratio",
        "of fast",
        "kept torch",
        "kept ours",
        "peak torch",
        "peak ours",
    ]
    print(format_table([head, *(compare(shape, dtype, turns) for shape in SHAPES for dtype in DTYPES)]))


if __name__ == "__main__":
    main()
