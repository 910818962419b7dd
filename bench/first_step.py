"""First step: how long the checks of the first batch take, beside the build and later steps.

    torchrun --nproc-per-node 2 -m bench.first_step [--models mlp gpt lm]

checks  `step.dry_run(batch, training=True)`, which the first step makes where nobody has made it before
Law: the aim is one second or two later steps, whichever is more.
"""

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.measurement import describe_machine, format_table
from bench.models import GPT, MLP, draw_bytes, draw_vectors
from fourfold.plan.plan import Plan
from fourfold.step.parallelize import parallelize
from fourfold.tasks import lm

NUM_STEPS = 5


def mean_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def draw_lm(num_samples: int, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    tokens, targets = draw_bytes(num_samples, generator)
    return {"tokens": tokens, "positions": torch.arange(tokens.shape[1]).expand_as(tokens)}, targets


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Any], int]] = {
    "mlp": (MLP, draw_vectors, 32),
    "gpt": (functools.partial(GPT, width=832, num_layers=7), draw_bytes, 4),
    "lm": (functools.partial(lm.LanguageModel, width=128, layers=4, heads=4, kv_heads=4), draw_lm, 8),
}
"""The model, its data, and samples of a rank."""


def seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def measure(name: str) -> tuple[str, ...]:
    make, draw, samples = MODELS[name]
    torch.manual_seed(0)
    model, optimizer = make(), functools.partial(torch.optim.AdamW, lr=1e-4)
    begin = time.perf_counter()
    step = parallelize(model, mean_loss, optimizer, Plan(dp=2))
    build = time.perf_counter() - begin
    batch = draw(samples, torch.Generator().manual_seed(step.rank))
    checks = seconds(lambda: step.dry_run(batch, training=True))
    first, *later = (seconds(lambda: step(batch)) for _ in range(NUM_STEPS))
    usual = statistics.median(later)
    count = sum(p.numel() for p in model.parameters()) / 1e6
    return (name, f"{count:.1f} M", *(f"{each:.2f}" for each in (build, checks, first, usual, max(1.0, 2 * usual))))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    chosen = parser.parse_args().models
    torch.set_num_threads(1)
    titles = ("model", "size", "build s", "checks s", "first step s", "later steps s", "aim for checks s")
    rows = [titles, *map(measure, chosen)]
    if torch.distributed.get_rank() == 0:
        print(describe_machine(), format_table(rows), sep="\n")


if __name__ == "__main__":
    main()
