"""Small runs with callbacks: a task that can break off, and a callback that records what it is given."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fourfold as ff
from fourfold.feed.source import TensorSource


class BrokenOffError(Exception):
    """The process has been killed, as far as a test in one process can tell."""


class BreakingSource:
    """Samples; the one of number `breaks_at`, counted over the run, ends it."""

    def __init__(self, breaks_at: int | None) -> None:
        generator = torch.Generator().manual_seed(0)
        self._inputs = torch.randn(32, 4, generator=generator)
        self._breaks_at, self._num_read = breaks_at, 0

    def __len__(self) -> int:
        return len(self._inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self._num_read += 1
        if self._num_read == self._breaks_at:
            raise BrokenOffError
        return self._inputs[index], self._inputs[index, :2].sum(0, keepdim=True)


def make_task(*, breaks_at: int | None = None, scores: Iterator[float] | None = None, valid: bool = True) -> ff.Task:
    """A linear regression. `scores`: what the validation measures as "score", one after the other."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(8, 4, generator=generator)
    valid_source = TensorSource(inputs, inputs[:, :2].sum(1, keepdim=True))

    def evaluate(outputs: Any, targets: Any) -> dict[str, tuple[Any, Any]]:
        assert scores is not None
        return {"score": (next(scores), 1)}

    return ff.Task(
        model=lambda: nn.Linear(4, 1),
        loss=lambda outputs, targets: (outputs - targets).square(),
        data=lambda: ff.Data(train=BreakingSource(breaks_at), valid=valid_source if valid else None),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05),
        evaluate=None if scores is None else evaluate,
        batch_size=8,
    )


OPTIONS: dict[str, Any] = {"trace_every": 0, "quiet": True, "evaluate_every": 2, "checkpoint_every": 4, "name": "run"}


def train(task: ff.Task, folder: Path, *callbacks: ff.Callback, **options: Any) -> Any:
    """A run of a task in `folder`/run, with validation every 2 steps and a checkpoint every 4."""
    return ff.train(task, callbacks=callbacks, folder=str(folder), **{**OPTIONS, **options})


def train_in_two(folder: Path, make_callbacks: Any, *, steps: int = 8, breaks_after: int = 6) -> None:
    """The same run, broken off after a step that is past its last checkpoint, and started again."""
    # The feed reads ahead: the broken sample is one of the step that is never finished.
    try:
        train(make_task(breaks_at=8 * breaks_after + 1), folder, *make_callbacks(), steps=steps)
    except BrokenOffError:
        train(make_task(), folder, *make_callbacks(), steps=steps)
        return
    raise AssertionError("it did not break off")


class Recorder(ff.Callback):
    """Keeps every event, with the hook's name."""

    def __init__(self) -> None:
        self.events: list[tuple[str, Any]] = []

    def on_start(self, event: Any) -> None:
        self.events.append(("start", event))

    def on_step(self, event: Any) -> None:
        self.events.append(("step", event))

    def on_evaluate(self, event: Any) -> None:
        self.events.append(("evaluate", event))

    def on_checkpoint(self, event: Any) -> None:
        assert (event.path / "manifest.json").exists()
        self.events.append(("checkpoint", event))

    def on_fault(self, event: Any) -> None:
        self.events.append(("fault", event))

    def on_end(self, event: Any) -> None:
        self.events.append(("end", event))

    def named(self, *hooks: str) -> list[tuple[str, int]]:
        """The hooks and steps of these events, in order."""
        return [(hook, event.step) for hook, event in self.events if hook in hooks]


class Stopping(Recorder):
    """Asks for a stop in a hook, at a step."""

    def __init__(self, hook: str, step: int) -> None:
        super().__init__()
        self._hook, self._step = hook, step

    def _stop(self, hook: str, event: Any) -> None:
        if (hook, event.step) == (self._hook, self._step):
            self.request_stop("enough")

    def on_start(self, event: Any) -> None:
        super().on_start(event)
        self._stop("start", event)

    def on_step(self, event: Any) -> None:
        super().on_step(event)
        self._stop("step", event)

    def on_evaluate(self, event: Any) -> None:
        super().on_evaluate(event)
        self._stop("evaluate", event)
