"""Pricing: what a search asks about a plan.

estimate   a closed form, for the many plans of a search
simulate   the program of one rank of each kind, for the few best
floor      seconds that no step of a plan's group can be shorter than: the mean of what its places compute
Law: an estimate and a simulation have the same prices, so one is the other up to an error that a search measures.
"""

from collections.abc import Sequence
from typing import Protocol

from fourfold.plan.plan import Plan
from fourfold.plan.predict.prediction import Prediction, StepTerms
from fourfold.words.errors import Problem


class Pricing(Protocol):
    """What plans take on a machine. Everything but `problems` raises PlanError for a plan that the model refuses."""

    def on_devices(self, num_devices: int) -> "Pricing":
        """The same machine with so many devices. Raises PlanError if it cannot have as many."""
        ...

    def floor(self, plan: Plan) -> float:
        """Whatever the schedule, zero, shard and update of the plan are."""
        ...

    def problems(self, plan: Plan) -> list[Problem]:
        """Why the plan cannot be carried out."""
        ...

    def stage_blocks(self, plan: Plan) -> Sequence[range]:
        """By stage: the blocks that it computes."""
        ...

    def balance(self, plan: Plan) -> float:
        """What the places of the pipeline compute in the mean, over what the busiest one computes."""
        ...

    def divisions(self, plan: Plan, limit_bytes: float) -> list[str]:
        """Values of `stages` that are better for the plan than its own, if it has several stages."""
        ...

    def terms(self, plan: Plan) -> StepTerms:
        """Of its estimate: what a rank holds takes longer to find out."""
        ...

    def estimate(self, plan: Plan) -> Prediction: ...

    def simulate(self, plan: Plan) -> Prediction: ...

    def slowdown(self) -> float:
        """By what computing is slower while a rank communicates: an estimate may contain it, a floor does not."""
        ...
