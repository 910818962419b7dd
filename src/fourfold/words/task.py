"""Task: what is learned. Plain single-device PyTorch behind factories.

model, loss, data, optimizer, evaluate   factories and functions; nothing is built before the plan is known good
Law: a task knows no ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch


class Source(Protocol):
    """Numbered samples without a batch dim: `source[i]` is (inputs, targets), or a dict of a model's inputs."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True, kw_only=True)
class Data:
    """The samples to train on, and those to evaluate on."""

    train: Source
    valid: Source | None = None


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is learned.

    model      makes the module
    loss       (outputs, targets) -> unreduced values, or a pair (sum, count), or a scalar; None: the model's own loss,
               of samples that are dicts of its inputs, the labels among them
    data       opens the sources
    optimizer  (parameters) -> torch optimizer
    evaluate   (outputs, targets) -> name -> (sum, count), added up over batches and ranks; with loss = None the
               targets are the dict of inputs
    sample     (model) -> a text to print when training has ended
    schedule   (step, steps) -> factor of the learning rate
    unit       what throughput counts: the elements of the targets ("tokens", "bytes") or "samples"
    tuned_for  the global batch size that the optimizer's rate was tuned for; None: batch_size
    """

    model: Callable[[], torch.nn.Module]
    loss: Callable[[Any, Any], Any] | None
    data: Callable[[], Data]
    optimizer: Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]
    evaluate: Callable[[Any, Any], dict[str, tuple[Any, Any]]] | None = None
    sample: Callable[[torch.nn.Module], str] | None = None
    schedule: Callable[[int, int], float] | None = None
    unit: str = "samples"
    steps: int = 1000
    batch_size: int = 32  # global
    clip: float | None = None
    tuned_for: int | None = None
