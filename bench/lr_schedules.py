"""Learning-rate schedules for a batch eight times as large, on the same samples.

    python -m bench.lr_schedules [--seeds 10]

Every run sees 43,008 handwritten digits (about 30 epochs); the table has medians over seeds, on the validation data.
The network has no normalization: after too large a first step its units are dead.
"""

import argparse
import dataclasses
import functools
import itertools
import statistics
import tempfile
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

import fourfold as ff
from fourfold.tasks import digits

NUM_SAMPLES = 84 * 512
LARGE_BATCH_SIZE = 8 * digits.TUNED_BATCH_SIZE


class Deep(nn.Sequential):
    """Images [B, 1, 8, 8] -> logits [B, 10]."""

    def __init__(self) -> None:
        widths = (digits.SIDE**2, 64, 64, 64, 64)
        layers = [layer for a, b in itertools.pairwise(widths) for layer in (nn.Linear(a, b), nn.ReLU())]
        super().__init__(nn.Flatten(), *layers, nn.Linear(64, digits.NUM_CLASSES))


ADAM = functools.partial(torch.optim.Adam, lr=0.012)
LAMB = functools.partial(ff.optim.LAMB, lr=0.05)
LARS = functools.partial(ff.optim.LARS, lr=20.0)

# name: optimizer, batch size, schedule
CASES: dict[str, tuple[Any, int, ff.LRSchedule]] = {
    "Adam, batch 64": (ADAM, digits.TUNED_BATCH_SIZE, ff.LRSchedule(schedule="cosine")),
    "Adam, batch 512, rate as it is": (ADAM, LARGE_BATCH_SIZE, ff.LRSchedule(schedule="cosine")),
    "Adam, batch 512, × 8": (ADAM, LARGE_BATCH_SIZE, ff.LRSchedule(schedule="cosine", scale="linear")),
    "Adam, batch 512, × 8, warm-up": (
        ADAM,
        LARGE_BATCH_SIZE,
        ff.LRSchedule(schedule="cosine", scale="linear", warmup=28),
    ),
    "Adam, batch 512, × √8": (ADAM, LARGE_BATCH_SIZE, ff.LRSchedule(schedule="cosine", scale="sqrt")),
    "Adam, batch 512, × √8, warm-up": (
        ADAM,
        LARGE_BATCH_SIZE,
        ff.LRSchedule(schedule="cosine", scale="sqrt", warmup=28),
    ),
    "LAMB, batch 512": (LAMB, LARGE_BATCH_SIZE, ff.LRSchedule(schedule="cosine")),
    "LAMB, batch 512, warm-up": (LAMB, LARGE_BATCH_SIZE, ff.LRSchedule(schedule="cosine", warmup=28)),
    "LARS, batch 512": (LARS, LARGE_BATCH_SIZE, ff.LRSchedule(schedule="cosine")),
    "LARS, batch 512, warm-up": (LARS, LARGE_BATCH_SIZE, ff.LRSchedule(schedule="cosine", warmup=28)),
}


def train(name: str, *, seed: int, folder: str) -> Mapping[str, float]:
    """The validation metrics of one run."""
    optimizer, batch_size, schedule = CASES[name]
    task = dataclasses.replace(digits.task(), model=Deep, optimizer=optimizer, schedule=None)
    settings: dict[str, Any] = {
        "steps": NUM_SAMPLES // batch_size,
        "batch_size": batch_size,
        "rates": schedule,
        "seed": seed,
    }
    return ff.train(task, folder=folder, checkpoint_every=0, trace_every=0, quiet=True, **settings).valid


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10)
    seeds = parser.parse_args().seeds
    torch.set_num_threads(1)
    print("| | accuracy | minimum | loss |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for name in CASES:
            runs = [train(name, seed=seed, folder=folder) for seed in range(seeds)]
            accuracies = [run["accuracy"] for run in runs]
            loss = statistics.median(run["loss"] for run in runs)
            print(f"| {name} | {statistics.median(accuracies):.3f} | {min(accuracies):.3f} | {loss:.3f} |", flush=True)


if __name__ == "__main__":
    main()
