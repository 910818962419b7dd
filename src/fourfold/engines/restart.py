"""Restart: whether a job whose rank has failed is started again.

progress  a step that no attempt had finished before, or a newer checkpoint to begin with
budget    restarts in a row without progress
Law: what another attempt cannot mend is not attempted again: bad input, a run that was asked to stop, and an error
of the program's own before the job has finished a single step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fourfold.engines.cause import Cause
from fourfold.run.faults import Fault
from fourfold.run.pulse import Beat

WINDOW_SECONDS = 3
GRACE_SECONDS = 25  # below the 30 s that Slurm and Kubernetes leave between SIGTERM and SIGKILL


def _ignore(_: object) -> None: ...


@dataclass(frozen=True)
class Care:
    """How a job is looked after.

    restarts      the budget
    beats         ranks say which step they are at (`run.pulse`)
    hang_seconds  the least time without a step after which a rank is taken to hang; None: never
    window        seconds between asking a rank to end and killing it, after another has failed
    grace         the same after a signal to the whole job, and for ranks that save before they end
    notice        hears at once of a fault after which the job goes on
    record        hears of every fault when it is over
    """

    restarts: int = 0
    beats: bool = False
    hang_seconds: float | None = None
    window: int = WINDOW_SECONDS
    grace: int = WINDOW_SECONDS
    notice: Callable[[str], None] = _ignore
    record: Callable[[Fault], None] = _ignore


class Budget:
    """What is left of the restarts without progress."""

    def __init__(self, care: Care) -> None:
        self._care = care
        self.used = 0
        self._step = self._resumed = -1

    def allows(self, cause: Cause, beats: Sequence[Beat]) -> bool:
        """Whether the job is started again after this attempt."""
        step, resumed = max(beat.step for beat in beats), max(beat.resumed for beat in beats)
        if step > self._step or resumed > self._resumed >= 0:
            self.used = 0
        self._step, self._resumed = max(step, self._step), max(resumed, self._resumed)
        never_began = self._care.beats and self._step < 0 and cause.signal is None
        if cause.final or never_began or self.used >= self._care.restarts:
            return False
        self.used += 1
        return True
