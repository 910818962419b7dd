"""What the tasks that learn to predict the next token of a text have in common, whatever their model.

rates      learning rate, warm-up, weight decay, clipping and temperature
sources    the samples of a text: rows of tokens
Law: the learning rate depends on the step and the number of steps alone.

B batch · L sequence length · V vocabulary
"""

import math
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fourfold.feed.source import TokenRow, TokenSource, corpus_problem
from fourfold.words.errors import DataError, Problem

MIN_LR_FACTOR = 0.02  # at the last step
TUNED_BATCH_SIZE = 16  # samples; the default learning rates were tuned with it


def count_problems(**counts: int) -> Iterable[Problem]:
    """What is wrong with sizes that must be positive."""
    yield from (Problem(f"{name} = {count}", "1 or more") for name, count in counts.items() if count < 1)


def rate_problems(*, clip: float | None, **rates: float) -> Iterable[Problem]:
    """What is wrong with lr, warmup, weight_decay, clip and temperature."""
    positive = {"lr": rates["lr"], "temperature": rates["temperature"], "clip": 1.0 if clip is None else clip}
    yield from (Problem(f"{name} = {rate}", "more than 0") for name, rate in positive.items() if not rate > 0)
    # An infinite clip is allowed: it measures the norm and clips nothing.
    finite = {"lr": rates["lr"], "temperature": rates["temperature"], "weight_decay": rates["weight_decay"]}
    yield from (Problem(f"{name} = {rate}", "a finite number") for name, rate in finite.items() if rate == math.inf)
    if not 0 <= rates["warmup"] < 1:
        yield Problem(f"warmup = {rates['warmup']}", "a fraction of the steps: 0 or more, less than 1", "warmup=0.05")
    if not rates["weight_decay"] >= 0:
        yield Problem(f"weight_decay = {rates['weight_decay']}", "0 or more")


def make_sources(
    train: TokenRow, valid: TokenRow, path: str | None, *, length: int, valid_tokens: int, unit: str = "bytes"
) -> tuple[TokenSource, TokenSource]:
    """The samples to train on and for validation, of the text at `path`. Raises DataError if it is too short."""
    found = (
        corpus_problem(train, length=length, name="the text to train on", unit=unit),
        corpus_problem(valid, length=length, name="the text for validation", unit=unit),
    )
    if problems := [problem for problem in found if problem]:
        raise DataError(problems, where=f"data={path}" if path else "the standard library")
    num_samples = max(1, valid_tokens // length)
    return TokenSource(train, length=length), TokenSource(valid, length=length, num_samples=num_samples)


def optimizer(parameters: Iterable[nn.Parameter], *, lr: float, weight_decay: float) -> torch.optim.AdamW:
    """AdamW with weight decay for matrices, without for the gains of norms."""
    every = list(parameters)
    groups = [
        {"params": [p for p in every if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in every if p.ndim <= 1], "weight_decay": 0.0},
    ]
    fused = all(p.device.type in ("cpu", "cuda") for p in every)
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=lr, betas=(0.9, 0.98), fused=fused)


def schedule(step: int, steps: int, *, warmup: float) -> float:
    """The learning rate's factor at `step` of 0 .. steps - 1: linear warm-up, then a cosine down to almost nothing."""
    num_warm = max(1, round(warmup * steps))
    if step < num_warm:
        return (step + 1) / num_warm
    done = (step - num_warm) / max(1, steps - num_warm)
    return MIN_LR_FACTOR + (1 - MIN_LR_FACTOR) * 0.5 * (1 + math.cos(math.pi * done))


@torch.no_grad()
def continue_tokens(
    model: nn.Module,
    logits: Callable[[Tensor, Tensor], Tensor],
    tokens: list[int],
    temperature: float,
    *,
    length: int,
    num_tokens: int,
    seed: int,
) -> list[int]:
    """The tokens and `num_tokens` more, each drawn from the last of logits(tokens [1, l], positions [1, l]).

    length: the most tokens that the model is given at once
    """
    device = next(model.parameters()).device
    # A generator of its own on the CPU: the same text on every device, and other draws are not disturbed.
    generator = torch.Generator().manual_seed(seed)
    training = model.training
    model.eval()
    for _ in range(num_tokens):
        window = torch.tensor([tokens[-length:]], device=device)
        last = logits(window, torch.arange(window.shape[1], device=device)[None])[0, -1]
        chances = F.softmax(last.float().cpu() / temperature, dim=-1)
        tokens = [*tokens, int(torch.multinomial(chances, 1, generator=generator))]
    model.train(training)
    return tokens


def bytes_text(tokens: Iterable[int]) -> str:
    """The text of these bytes; those that are not printable show as `·`."""
    return printable(bytes(tokens).decode(errors="replace"))


def printable(text: str) -> str:
    """The text with `·` for each character that a terminal might obey."""
    return "".join(c if c.isprintable() or c in "\n\t" else "·" for c in text)
