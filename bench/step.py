"""Step: the overhead of a step: a TrainStep of one process compared with the same training in plain torch.

plain     a plain loop: zero_grad, forward, mean loss, backward, clip if enabled, AdamW.step, item
mean      a TrainStep whose loss is torch's mean of a batch, observed for its true count
each      a TrainStep whose loss gives a value for each sample
clip      the gradient norm is clipped at 1, in all of them
CPU       processor time of all threads of the process, which depends less on other processes
fast      the first decile of the steps' times: on a busy machine, closest to an idle one
Law: all train the same model on the same batches, take turns, and each step is timed by itself.

    PYTHONPATH=src:. OMP_NUM_THREADS=1 python -m bench.step [STEPS]
"""

import copy
import functools
import sys
import time
from collections.abc import Callable
from statistics import median, quantiles
from typing import Any, NamedTuple

import torch
from torch import nn

import fourfold as ff
from bench.measurement import describe_machine, format_table

WIDTH, LAYERS, CLASSES, BATCH = 64, 6, 10, 32
WARMUP, NUM_STEPS, CLIP = 50, 1000, 1.0
ADAMW = functools.partial(torch.optim.AdamW, lr=1e-4, fused=True)
Batch = tuple[torch.Tensor, torch.Tensor]
Step = Callable[[Batch], float]
MEAN = nn.functional.cross_entropy
PER_SAMPLE = functools.partial(nn.functional.cross_entropy, reduction="none")


def mlp() -> nn.Module:
    hidden = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(WIDTH, CLASSES))


def torch_step(model: nn.Module, clip: float | None) -> Step:
    optimizer = ADAMW(model.parameters())

    def step(batch: Batch) -> float:
        inputs, targets = batch
        optimizer.zero_grad()
        loss = MEAN(model(inputs), targets)
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        return loss.item()

    return step


def fourfold_step(model: nn.Module, clip: float | None, loss: Any) -> Step:
    step = ff.parallelize(model, loss, ADAMW, ff.Plan(), clip=clip, same_batches="allow")
    return lambda batch: step(batch).loss


def main() -> None:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else NUM_STEPS
    print(describe_machine())
    rows = [
        ("", "step, µs", "CPU, µs", "CPU / plain", "middle half", "fast tenth, CPU, µs", "more than plain", "last loss")
    ]
    start = mlp()
    batches = [(torch.randn(BATCH, WIDTH), torch.randint(0, CLASSES, (BATCH,))) for _ in range(8)]
    for clip in (None, CLIP):
        turns = {
            "plain": torch_step(copy.deepcopy(start), clip),
            "mean": fourfold_step(copy.deepcopy(start), clip, MEAN),
            "each": fourfold_step(copy.deepcopy(start), clip, PER_SAMPLE),
        }
        timings = time_in_turns(turns, [batches[number % len(batches)] for number in range(WARMUP + steps)])
        rows += [format_row(name, timings, "" if clip is None else ", clip") for name in turns]
    print(format_table(rows))


class StepTiming(NamedTuple):
    seconds: float
    cpu_seconds: float
    loss: float


def time_in_turns(turns: dict[str, Step], batches: list[Batch]) -> dict[str, list[StepTiming]]:
    """The timing of every step of every configuration, without the first WARMUP."""
    timings: dict[str, list[StepTiming]] = {name: [] for name in turns}
    for number, batch in enumerate(batches):
        for name in turns if number % 2 else reversed(turns):
            begin, cpu = time.perf_counter(), time.process_time()
            loss = turns[name](batch)
            timings[name].append(StepTiming(time.perf_counter() - begin, time.process_time() - cpu, loss))
    return {name: each[WARMUP:] for name, each in timings.items()}


def format_row(name: str, timings: dict[str, list[StepTiming]], suffix: str) -> tuple[str, ...]:
    pairs = [(one.cpu_seconds, plain.cpu_seconds) for one, plain in zip(timings[name], timings["plain"], strict=True)]
    ratios = [one / plain for one, plain in pairs]
    low, _, high = quantiles(ratios, n=4)
    fast, plain_fast = (quantiles(column, n=10)[0] for column in zip(*pairs, strict=True))
    return (
        f"{name}{suffix}",
        f"{median(each.seconds for each in timings[name]) * 1e6:.0f}",
        f"{median(one for one, _ in pairs) * 1e6:.0f}",
        f"{median(ratios):.3f}",
        f"{low:.2f}–{high:.2f}",
        f"{fast * 1e6:.0f}",
        f"{(fast - plain_fast) * 1e6:.0f}",
        f"{timings[name][-1].loss:.6f}",
    )


if __name__ == "__main__":
    main()
