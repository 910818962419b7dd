"""Restart: whether a job whose rank has failed is started again.

progress  a step that no attempt had finished before, or a newer checkpoint to begin with
budget    restarts in a row without progress
Law: what another attempt cannot mend is not attempted again: bad input, a run that was asked to stop, and an error
of the program's own before the job has finished a single step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fourfold.engines.cause import Cause
from fourfold.run.checkpoint.shelf import outlook
from fourfold.run.faults import FILE, Fault
from fourfold.run.pulse import Beat

WINDOW_SECONDS = 3


def _ignore(_: object) -> None: ...


@dataclass(frozen=True)
class Care:
    """How a job is looked after.

    restarts      the budget
    beats         ranks say which step they are at (`run.pulse`)
    hang_seconds  the least time without a step after which a rank is taken to hang; None: never
    window        seconds between asking a rank to end and killing it, after another has failed
    grace         seconds that ranks which train may go without a finished step, once they were asked to stop and save
    notice        hears at once of a fault after which the job goes on
    record        hears of every fault when it is over
    folder        the run's; None where it is not known what a script does
    """

    restarts: int = 0
    beats: bool = False
    hang_seconds: float | None = None
    window: int = WINDOW_SECONDS
    grace: float = WINDOW_SECONDS
    notice: Callable[[str], None] = _ignore
    record: Callable[[Fault], None] = _ignore
    folder: Path | None = None

    def outlook(self) -> str:
        """What the same command will do; "" where nobody knows."""
        return "" if self.folder is None else outlook(self.folder)


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
        if cause.is_final or never_began or self.used >= self._care.restarts:
            return False
        self.used += 1
        return True

    def spent(self, cause: Cause) -> str:
        """What is said where the budget is why the job is not started again; "" where it is not."""
        if cause.is_final or self.used == 0 or self.used < self._care.restarts:
            return ""
        gave_up = f"gave up after {self.used} restart{'s' * (self.used > 1)}"
        if self._care.folder is None:
            return gave_up
        return (
            f"{gave_up} in a row that came no further than step {max(self._step, 0)}\n"
            f"  look at   the error above; those before it are in {self._care.folder / FILE}\n"
            f"  try       to mend its cause, or restarts={10 * self._care.restarts} where the machine is to blame\n"
            f"  then      {self._care.outlook()}"
        )
