"""Step options: the settings of a step that are not in the plan."""

from collections.abc import Mapping
from typing import Any, NamedTuple, TypedDict

from fourfold.plan.intervals import DRIFT_CHECK


class StepOptions(NamedTuple):
    """The keywords of `ff.parallelize`, which says what they mean."""

    clip: float | None = None
    seed: int = 0
    skip_nan: int = 0
    same_batches: str = "error"
    drift_check: int = DRIFT_CHECK
    tensor: Mapping[str, str] = {}

    def compared(self, *, shares_samples: bool) -> dict[str, Any]:
        """What must be the same on all ranks: the seed too where ranks share samples, and draw alike for them."""
        return {name: value for name, value in self._asdict().items() if name != "seed" or shares_samples}


class StepKeywords(TypedDict, total=False):
    """The fields of `StepOptions`, as keywords."""

    clip: float | None
    seed: int
    skip_nan: int
    same_batches: str
    drift_check: int
    tensor: Mapping[str, str]
