"""Progress: how far a decision is. The planner writes it; who waits for the answer reads it, from another thread.

best  the fastest plan so far that fits and has what the ask pins, as estimated or simulated
Law: nothing here changes the answer.
"""

from dataclasses import dataclass

from fourfold.planner.predict.prediction import Prediction


@dataclass
class Progress:
    """doing: for people; empty: nothing is to be shown. `total`: steps of it; 0: their number is not known."""

    doing: str = ""
    done: int = 0
    total: int = 0
    best: Prediction | None = None

    def begin(self, doing: str, total: int = 0) -> None:
        self.doing, self.done, self.total = doing, 0, total

    def offer(self, found: Prediction) -> None:
        """A plan that may be the best so far."""
        if self.best is None or found.seconds < self.best.seconds:
            self.best = found
