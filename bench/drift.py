"""Drift: what the drift check costs, compared with one step and with the steps between two checks.

step   one training step, the median
check  `TrainStep.check_drift`, the median: fingerprints of all weights that this rank holds, and one all-gather

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


def median_seconds(call: Callable[[], Any], times: int) -> float:
    seconds = []
    for _ in range(times):
        begin = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin)
    return median(seconds)


def main() -> None:
    name, zero = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 0
    size = ff.world().size
    if name == "mlp":  # a very short step
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
    step_seconds = median_seconds(lambda: step(batch), STEPS)
    check_seconds = median_seconds(step.check_drift, NUM_CHECKS)
    if step.rank == 0:
        count = sum(p.numel() for p in step.model.parameters())
        fraction = check_seconds / (step_seconds * DRIFT_CHECK + check_seconds)
        print(describe_machine())
        print(
            f"{name}, {count / 1e6:.2f} M parameters, {size} ranks, zero = {zero}: step {step_seconds * 1e3:.2f} ms, "
            f"check {check_seconds * 1e3:.2f} ms; with drift_check = {DRIFT_CHECK} {fraction:.3%} of the time"
        )


if __name__ == "__main__":
    main()
