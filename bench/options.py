"""Options: the time a step takes to read its optimizer's options (AdamW), and to fingerprint a call text with them.

unchanged  the options are those of the step before
schedule   every group has a new learning rate in each step; the time of the schedule itself is not counted
OTHER      another version of `optim/option_tracker.py`: the two take turns; ratios are of consecutive readings
Law: each reading is timed by itself, in turn, so that load affects both versions equally.

    PYTHONPATH=src:. python bench/options.py [OTHER]
"""

import importlib.util
import sys
import time
import timeit
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any

import torch

from bench.measurement import describe_machine
from fourfold.comm.reduce import scalars
from fourfold.optim import option_tracker

NUM_READINGS, WARMUP = 3000, 200
NUM_REPEATS = 5000
CALL_TEXT = "step 1000, positions 2000 to 2002 of epoch 0, seed 0"


def import_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("other_options", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def time_readings(optimizer: torch.optim.Optimizer, modules: list[ModuleType], *, schedule: bool) -> list[list[float]]:
    """Microseconds of each reading, by module."""
    readers: list[Any] = [module.OptionTracker(optimizer) for module in modules]
    readings: list[list[float]] = [[] for _ in modules]
    rate = 1e-3
    for number in range(WARMUP + NUM_READINGS):
        rate *= 0.9999
        for index, group in enumerate(optimizer.param_groups if schedule else ()):
            group["lr"] = rate / (1 + index)
        for turn in range(len(readers)):
            which = (number + turn) % len(readers)
            begin = time.perf_counter()
            readers[which].text()
            readings[which].append((time.perf_counter() - begin) * 1e6)
    return [each[WARMUP:] for each in readings]


def microseconds(call: Any) -> float:
    return min(timeit.repeat(call, number=NUM_REPEATS, repeat=5)) / NUM_REPEATS * 1e6


def main() -> None:
    modules = [option_tracker, *map(import_file, map(Path, sys.argv[1:2]))]
    print(describe_machine())
    for num_groups in (1, 2, 12, 48):
        weights = [torch.nn.Parameter(torch.zeros(2)) for _ in range(num_groups)]
        optimizer = torch.optim.AdamW([{"params": [weight]} for weight in weights], lr=1e-3)
        texts = []
        for name, schedule in (("unchanged", False), ("schedule", True)):
            installed, *others = time_readings(optimizer, modules, schedule=schedule)
            texts.append(f"{name} {median(installed):.1f} µs")
            for other in others:
                ratio = median(one / two for one, two in zip(installed, other, strict=True))
                texts.append(f"other {median(other):.1f} µs, ratio {ratio:.2f}")
        text = scalars.with_options(CALL_TEXT, option_tracker.OptionTracker(optimizer).text())
        call = microseconds(lambda text=text: scalars.fingerprint(text)) - microseconds(
            lambda: scalars.fingerprint(CALL_TEXT)
        )
        board = microseconds(lambda text=text: scalars.encode_call(text)) - microseconds(
            lambda: scalars.encode_call(CALL_TEXT)
        )
        print(f"{num_groups:3} groups: {'; '.join(texts)}; the longer call: tag {call:+.1f} µs, board {board:+.1f} µs")


if __name__ == "__main__":
    main()
