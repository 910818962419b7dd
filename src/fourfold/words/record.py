"""Records that travel between floors: small, frozen, without behaviour."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Line:
    """What the progress line tells: the mean of the last steps.

    rate     units a second, over all ranks
    waiting  share of the time spent communicating and waiting, 0 to 1
    """

    step: int
    steps: int
    loss: float
    rate: float
    unit: str
    waiting: float
    seconds_left: float | None
