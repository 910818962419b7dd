"""Decision: which plan is the answer, beside the plans that it was compared with.

baseline  a plan that anyone would try: data parallelism at zero 0 to 3, tp within a host, Megatron's layout
front     the plans of which none is both faster and smaller
Law: the first of the ranked plans takes no longer than any baseline that fits, except by the error of the prediction.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from fourfold.plan.plan import Plan
from fourfold.plan.predict.prediction import MemoryParts, Prediction
from fourfold.words.errors import Problem


@dataclass(frozen=True)
class Refused:
    """A plan that cannot be the answer.

    problems  why it is not legal here; empty for a plan that only does not fit
    memory    of the place that holds most, if it does not fit
    limit_bytes  what a device has
    nearest   fields of the plan, and the values of the nearest change with which it would fit
    """

    plan: Plan
    problems: tuple[Problem, ...] = ()
    memory: MemoryParts | None = None
    limit_bytes: float = 0.0
    nearest: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Decision:
    """The plans that fit, best first, and what they were compared with.

    ranked    simulated; plans that are equal within the error are in order of simplicity
    baselines by name
    refused   of those that were looked at: the baselines that are not possible, and the fastest that do not fit
    error     the relative error of a prediction: plans closer than that are equal
    num_considered  all plans that were enumerated
    """

    ranked: tuple[Prediction, ...]
    baselines: Mapping[str, Prediction | Refused]
    refused: tuple[Refused, ...]
    front: tuple[Prediction, ...]
    error: float
    num_considered: int

    @property
    def best(self) -> Prediction:
        return self.ranked[0]

    @property
    def num_equal(self) -> int:
        """How many of the ranked plans, from the first on, are equal to the fastest within the error."""
        limit = min(each.seconds for each in self.ranked) * (1 + self.error)
        equal = 0
        for each in self.ranked:
            if each.seconds > limit:
                break
            equal += 1
        return equal
