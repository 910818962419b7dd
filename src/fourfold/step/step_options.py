"""Step options: what a step is told besides the plan."""

from typing import NamedTuple

from fourfold.plan.intervals import DRIFT_CHECK


class StepOptions(NamedTuple):
    """The keywords of `ff.parallelize`, which says what they mean."""

    clip: float | None = None
    seed: int = 0
    skip_nan: int = 0
    same_batches: str = "refuse"
    drift_check: int = DRIFT_CHECK
