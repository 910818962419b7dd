"""What the drift check costs: one check beside one step, and that over the steps between two checks.

step   one training step, the median
check  `TrainStep.check_drift`, the median: fingerprints of all weights that this rank holds, and one exchange

    PYTHONPATH=src:. fourfold run -n 2 bench/drift.py mlp|gpt [ZERO]
"""

import functools
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

import fourfold as ff
from bench.measurement import describe_machine
from bench.models import CASES, losses
from fourfold.plan.intervals import DRIFT_CHECK

WARMUP, STEPS, NUM_CHECKS = 3, 20, 50


def median_seconds(act: Callable[[], Any], times: int) -> float:
    found = []
    for _ in range(times):
        begin = time.perf_counter()
        act()
        found.append(time.perf_counter() - begin)
    return median(found)


def main() -> None:
    name, zero = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 0
    size = ff.world().size
    if name == "mlp":  # the least that a step may take
        model: Any = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
        batch: Any = torch.randn(32, 32), torch.randint(0, 10, (32,))
        loss = functools.partial(torch.nn.functional.cross_entropy, reduction="none")
    else:
        case = CASES[name]
        model, loss = case.build(), losses
        (batch,) = case.batches(ff.world().rank, 1)
    make = functools.partial(torch.optim.AdamW, lr=1e-4)
    step = ff.parallelize(model, loss, make, ff.Plan(dp=size, zero=zero), drift_check=0)
    for _ in range(WARMUP):
        step(batch)
    one, check = median_seconds(lambda: step(batch), STEPS), median_seconds(step.check_drift, NUM_CHECKS)
    if step.rank == 0:
        count = sum(p.numel() for p in step.model.parameters())
        part = check / (one * DRIFT_CHECK + check)
        print(describe_machine())
        print(
            f"{name}, {count / 1e6:.2f} M parameters, {size} ranks, zero = {zero}: step {one * 1e3:.2f} ms, "
            f"check {check * 1e3:.2f} ms; with drift_check = {DRIFT_CHECK} {part:.3%} of the time"
        )


if __name__ == "__main__":
    main()
