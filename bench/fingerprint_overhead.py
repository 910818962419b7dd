"""The cost of collective fingerprints: the same steps with and without them, in turn.

with     each rank publishes its call, and compares those of the others when it reads the summed loss
without  neither published nor compared
Law: steps with and without alternate, in the same order on all ranks, and are compared within neighbouring pairs.

    PYTHONPATH=. fourfold run -n 2 bench/fingerprint_overhead.py shared|gloo PAIRS
"""

import contextlib
import functools
import sys
import time
from collections.abc import Iterator
from statistics import median, quantiles
from typing import Any
from unittest import mock

import torch

import fourfold as ff
from bench.measurement import describe_machine
from bench.models import CASES, losses
from fourfold.comm.reduce.scalars import BOARD_DEPTH

NUM_RANKS, WARMUP, NUM_CALLS = 2, 4, 5000
CALL_TEXT = "step 1000, positions 2000 to 2002 of epoch 0, seed 0"


@contextlib.contextmanager
def without_fingerprints(scalars: Any, calls: Any) -> Iterator[None]:
    """Within: calls are neither published nor compared."""
    with mock.patch.object(calls, "begin"), mock.patch.object(scalars, "_calls", None):
        yield


def main() -> None:
    kind, pairs = sys.argv[1], int(sys.argv[2])
    case = CASES["gpt1"]
    step = ff.parallelize(
        case.build(), losses, functools.partial(torch.optim.AdamW, lr=case.lr), ff.Plan(dp=NUM_RANKS, transport=kind)
    )
    scalars, calls = step._parts.scalars, step._calls.checker._world_calls
    (batch,) = case.batches(step.rank, 1)
    pairs_of_seconds = []
    for number in range(WARMUP + pairs):
        seconds = {}
        for is_checked in (True, False) if number % 2 else (False, True):
            with contextlib.nullcontext() if is_checked else without_fingerprints(scalars, calls):
                begin = time.perf_counter()
                step(batch)
                seconds[is_checked] = time.perf_counter() - begin
        pairs_of_seconds.append((seconds[True], seconds[False]))
    ratios = [checked / unchecked for checked, unchecked in pairs_of_seconds[WARMUP:]]
    low, _, high = quantiles(ratios, n=4)
    without = median(unchecked for _, unchecked in pairs_of_seconds[WARMUP:])
    alone = _board_seconds(calls) if kind == "shared" else _message_seconds(scalars)
    if step.rank == 0:
        print(describe_machine())
        print(f"{kind}: step without {without * 1e3:.1f} ms")
        print(f"with / without {median(ratios):.4f}, middle half {low:.3f}–{high:.3f}")
        print(f"publishing and comparing: {alone * 1e6:.1f} µs of CPU, {alone / without:.4%} of the step")


def _board_seconds(calls: Any) -> float:
    """Seconds to publish and compare one call in shared memory, from many in a row without waiting."""
    counts = [1] * NUM_RANKS
    for _ in range(BOARD_DEPTH):
        calls.begin(CALL_TEXT)
    calls.check_same()
    begin = time.process_time()
    for _ in range(NUM_CALLS):
        calls.begin(CALL_TEXT)
        calls.check_begun(None)
        # The other rank may be too far ahead or behind to be compared above.
        calls._board.check(calls._host.index, lambda: counts)
    return (time.process_time() - begin) / NUM_CALLS


def _message_seconds(scalars: Any) -> float:
    """Seconds to make the fingerprint of one call. The message exists anyway, and grows by 48 bytes."""
    values = torch.zeros(4, dtype=torch.float64)
    begin = time.process_time()
    for _ in range(NUM_CALLS):
        scalars._over_group._with_fingerprint(values, CALL_TEXT)
    return (time.process_time() - begin) / NUM_CALLS


if __name__ == "__main__":
    main()
