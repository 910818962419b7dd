"""Records that travel between floors: small, frozen, without behaviour."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ProgressLine:
    """What the progress line tells: the mean of the last steps.

    rate     units a second, over all ranks
    waiting  share of the time spent communicating and waiting, 0 to 1
    """

    step: int
    num_steps: int
    loss: float
    units_per_second: float
    unit: str
    waiting_fraction: float
    remaining_seconds: float | None
