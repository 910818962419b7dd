"""Callbacks: what a run calls as it goes on, what it hands over, and how a callback asks it to stop.

hook   a method of a callback, called after something has happened: on_start, on_step, on_evaluate, on_checkpoint,
       on_fault, on_end
event  what a hook is given: a frozen record of what has happened
Law: hooks are called on rank 0 only, one at a time, in the order of what has happened.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

EndStatus = Literal["finished", "stopped", "terminated", "failed"]


@dataclass(frozen=True, kw_only=True)
class StartEvent:
    """The run, as it stands when its first step is about to begin.

    folder    the run's folder, as an absolute path; a callback may write files of its own there
    name      the folder's name
    task      the task as it was named: `lm`, `FILE.py:name`, or "run"
    steps     how many steps the run has in all
    step      the step after which it resumes; 0: it begins
    settings  of the run, as in settings.json; under `task_arguments` the arguments of the task
    plan      every field of the plan
    """

    folder: Path
    name: str
    task: str
    num_parameters: int
    num_ranks: int
    steps: int
    batch_size: int
    step: int
    settings: Mapping[str, Any]
    plan: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class StepEvent:
    """One optimizer step. Loss, samples and tokens are those of the global batch.

    step       its number; the first is 1
    grad_norm  before clipping; None where nothing measures it
    lr         the learning rate of the first parameter group
    tokens     None if the inputs show none
    seconds, waiting_seconds   its duration on rank 0, and the part of it that rank 0 spent waiting for communication
    units_per_second   over all ranks, the mean of the last steps
    unit       what they are: the task's unit, or "samples" where nothing else can be counted
    data_seconds   how long rank 0 waited for the step's batch; not part of `seconds`
    skipped    whether `skip_nan` skipped it, because its loss or gradient was not finite
    """

    step: int
    loss: float
    grad_norm: float | None
    lr: float
    samples: int
    tokens: int | None
    seconds: float
    waiting_seconds: float
    units_per_second: float
    unit: str
    skipped: bool
    data_seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class EvaluateEvent:
    """The validation after `step`: "loss", the task's own measures, and with `ema` "ema loss" and so on.

    is_best  whether no earlier step had a better value of `best_metric`
    """

    step: int
    metrics: Mapping[str, float]
    is_best: bool


@dataclass(frozen=True, kw_only=True)
class CheckpointEvent:
    """A checkpoint that is complete and on the disk. Training may be some steps further by now.

    metrics  the validation measured at `step`; empty if there was none
    """

    step: int
    path: Path
    metrics: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class FaultEvent:
    """Something that went wrong, as faults.jsonl lists it.

    step  the last finished step, or the skipped one; -1 before the first
    kind  "skipped step", "callback failed", "terminated", "lost rank", or "failed" for an error that ends the run
    rank  where, if that is one rank
    """

    step: int
    kind: str
    text: str
    rank: int | None = None


@dataclass(frozen=True, kw_only=True)
class EndEvent:
    """How a run ended.

    status   finished    all steps are done
             stopped     a callback asked for it; the run counts as finished
             terminated  by SIGTERM or Ctrl-C; the same command resumes it
             failed      an error
    text     why; "" if all steps are done
    step     the last finished step; -1: none
    loss, metrics, seconds, units_per_second, sample   as in the result of `ff.train`; None and empty if the run was
             terminated or failed
    """

    status: EndStatus
    text: str
    step: int
    loss: float | None = None
    metrics: Mapping[str, float]
    seconds: float | None = None
    units_per_second: float | None = None
    sample: str | None = None


class Callback:
    """The base class of callbacks: override the hooks that you need; the others do nothing.

    Every rank makes its own object, so a constructor has no effect beyond it: files and connections are opened in
    `on_start`. All ranks wait while a hook runs. An exception in a hook does not end the run: it is reported, with the
    callback and the hook, and this callback is not called again.
    """

    stop_reason: str | None = None
    """Why the run is to stop; None if it is not."""

    required_metrics: tuple[str, ...] = ()
    """Measures that it needs from every evaluation. A run without them is refused before its first step."""

    @property
    def name(self) -> str:
        """What messages call it."""
        return type(self).__name__

    def request_stop(self, reason: str) -> None:
        """Stop the run, as if it had no more steps: all ranks stop after the same step, evaluate and save.

        From `on_evaluate`, and from `on_start` of a run that resumes, they stop at this step; from other hooks after
        the next one. `reason` is printed and logged.
        """
        self.stop_reason = reason

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of this callback: JSON values."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the state from the checkpoint that the run resumes from. Called before `on_start`."""

    def on_start(self, event: StartEvent) -> None:
        """The first step is about to begin, of a new run or of one that resumes after `event.step`."""

    def on_step(self, event: StepEvent) -> None:
        """A step is done."""

    def on_evaluate(self, event: EvaluateEvent) -> None:
        """An evaluation is done."""

    def on_checkpoint(self, event: CheckpointEvent) -> None:
        """A checkpoint is on the disk."""

    def on_fault(self, event: FaultEvent) -> None:
        """Something went wrong."""

    def on_end(self, event: EndEvent) -> None:
        """The run has ended, in whatever way, unless its process was killed."""
