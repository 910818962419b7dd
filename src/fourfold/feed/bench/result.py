"""Result: what an emulated training measured, as records and as JSON.

waits   how long accelerators waited for their batches, one number for each counted step of each accelerator
Law: the figures of an epoch are of one window: its steps without the first. Those of a run are of all its windows.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fourfold.feed.bench.disk import Ceiling, CheckpointTimes
from fourfold.feed.bench.ranks import EpochSteps
from fourfold.feed.bench.workload import Workload
from fourfold.plan.utilization import EXCLUDED_STEPS, Window, add_windows, all_ranks, epoch_window

WAIT_EDGES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)  # seconds; each bar begins where the one before ends
WINDOW_TEXT = (
    "from the end of an epoch's first step to the end of its last: utilization, samples, bytes and waits are of these "
    "steps"
)


@dataclass(frozen=True)
class Epoch:
    """One epoch. `first_wait`: for the batch of the step that is not counted; `cached`: see `ranks.EpochSteps`."""

    window: Window
    waits: tuple[float, ...]
    first_wait: float
    cached: float | None


@dataclass(frozen=True, kw_only=True)
class Result:
    """One emulated training.

    workload     as it was run; `full`: as DLIO has it
    scaled       what differs between the two, in words
    ceilings     of the disk, before and after the training
    origin       bytes a second that the storage was held to; None: not at all
    is_staged    whether the files were copied to this disk in the first epoch
    need         bytes a second that one accelerator reads at full utilization, of the records as they are in the files
    """

    workload: Workload
    accelerators: int
    scaled: tuple[str, ...]
    cache: str
    epochs: tuple[Epoch, ...]
    ceilings: tuple[Ceiling, ...]
    origin: float | None
    is_staged: bool
    need: float
    checkpoint: CheckpointTimes | None = None

    @property
    def total(self) -> Window:
        return add_windows(epoch.window for epoch in self.epochs)

    @property
    def label(self) -> str:
        """The workload, and whether it is staged."""
        return f"{self.workload.name}, staged" if self.is_staged else self.workload.name

    @property
    def utilization(self) -> float | None:
        """Of all epochs; where files are staged, of the last one, for which they have been copied."""
        return (self.epochs[-1].window if self.is_staged else self.total).utilization

    @property
    def passes(self) -> bool | None:
        """Whether the workload's threshold is met; None if it has none, or nothing was measured."""
        value, threshold = self.total.utilization, self.workload.threshold
        return None if value is None or threshold is None else value >= threshold

    @property
    def ceiling(self) -> float:
        """Bytes a second that this storage delivers: the mean of what was measured, and not more than its origin."""
        measured = sum(each.bytes_per_second for each in self.ceilings) / len(self.ceilings)
        return measured if self.origin is None else min(self.origin, measured)

    @property
    def fed_accelerators(self) -> int:
        """How many accelerators this storage can feed by its ceiling, at the threshold, or else at full utilization."""
        return math.floor(self.ceiling / (self.need * (self.workload.threshold or 1.0)))

    @property
    def waits(self) -> list[float]:
        return [wait for epoch in self.epochs for wait in epoch.waits]

    def to_json(self) -> dict[str, Any]:
        """Everything, as JSON values."""
        return {
            "workload": dataclasses.asdict(self.workload),
            "accelerators": self.accelerators,
            "scaled": list(self.scaled),
            "window": WINDOW_TEXT,
            "page_cache": self.cache,
            "epochs": [
                {**_window_json(epoch.window), "waits": waits_json(epoch.waits), "first_wait_seconds": epoch.first_wait}
                | {"cached": epoch.cached}
                for epoch in self.epochs
            ],
            "total": {**_window_json(self.total), "waits": waits_json(self.waits)},
            "threshold": self.workload.threshold,
            "passes": self.passes,
            "ceilings": [each._asdict() for each in self.ceilings],
            "origin": self.origin,
            "staged": self.is_staged,
            "need_bytes_per_second": self.need,
            "accelerators_that_can_be_fed": self.fed_accelerators,
            "checkpoint": None if self.checkpoint is None else self.checkpoint._asdict(),
        }


def _window_json(window: Window) -> dict[str, Any]:
    rates = {name: getattr(window, name) for name in ("utilization", "samples_per_second", "bytes_per_second")}
    return window._asdict() | rates


def make_epochs(by_rank: Sequence[Sequence[EpochSteps]]) -> tuple[Epoch, ...]:
    """The epochs of a training, of what each rank has measured."""
    epochs = []
    for ranks in zip(*by_rank, strict=True):
        window = all_ranks([epoch_window(each.steps) for each in ranks])
        waits = tuple(step.data_seconds for each in ranks for step in each.steps[EXCLUDED_STEPS:])
        first = max((each.steps[0].data_seconds for each in ranks if each.steps), default=0.0)
        epochs.append(Epoch(window, waits, first, ranks[0].cached))
    return tuple(epochs)


def histogram(waits: Sequence[float]) -> list[tuple[str, int]]:
    """How many waits were how long: (label, count)."""
    edges = (0.0, *WAIT_EDGES, math.inf)
    return [
        (_edge_text(low, high), sum(low <= wait < high for wait in waits)) for low, high in itertools.pairwise(edges)
    ]


def _edge_text(low: float, high: float) -> str:
    if low == 0.0:
        return f"below {_seconds(high)}"
    return f"above {_seconds(low)}" if high == math.inf else f"{_seconds(low)} to {_seconds(high)}"


def _seconds(seconds: float) -> str:
    return f"{seconds:g} s" if seconds >= 1 else f"{1000 * seconds:g} ms"


def percentile(values: Sequence[float], fraction: float) -> float:
    """The value below or at which this fraction of the values is; 0 of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, math.ceil(fraction * len(ordered)) - 1))] if ordered else 0.0


def waits_json(waits: Sequence[float]) -> dict[str, Any]:
    """The waits in short."""
    short = {f"p{percent}": percentile(waits, percent / 100) for percent in (50, 99, 100)}
    return {**short, "histogram": dict(histogram(waits))}
