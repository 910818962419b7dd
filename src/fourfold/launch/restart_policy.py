"""Restart: whether a job whose rank has failed is started again.

progress  a step that no attempt had finished before, or a newer checkpoint to begin with
budget    restarts in a row without progress
Law: what another attempt cannot mend is not attempted again: bad input, a run that was asked to stop, and an error
of the program's own before the job has finished a single step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fourfold.checkpoint.store import resume_hint
from fourfold.launch.failure_report import Cause
from fourfold.trainer.fault_log import FAULTS_FILE, Fault
from fourfold.trainer.heartbeat import HeartbeatRecord

SHUTDOWN_SECONDS = 3


def _noop(_: object) -> None: ...


@dataclass(frozen=True)
class SupervisionPolicy:
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

    max_restarts: int = 0
    has_heartbeat: bool = False
    hang_seconds: float | None = None
    shutdown_seconds: int = SHUTDOWN_SECONDS
    save_seconds: float = SHUTDOWN_SECONDS
    notify: Callable[[str], None] = _noop
    record_fault: Callable[[Fault], None] = _noop
    run_dir: Path | None = None

    def resume_hint(self) -> str:
        """What the same command will do; "" where nobody knows."""
        return "" if self.run_dir is None else resume_hint(self.run_dir)


class RestartBudget:
    """What is left of the restarts without progress."""

    def __init__(self, policy: SupervisionPolicy) -> None:
        self._policy = policy
        self.num_used = 0
        self._last_step = self._resumed_step = -1

    def allows_restart(self, cause: Cause, heartbeats: Sequence[HeartbeatRecord]) -> bool:
        """Whether the job is started again after this attempt."""
        step, resumed = max(beat.step for beat in heartbeats), max(beat.resumed_step for beat in heartbeats)
        if step > self._last_step or resumed > self._resumed_step >= 0:
            self.num_used = 0
        self._last_step, self._resumed_step = max(step, self._last_step), max(resumed, self._resumed_step)
        never_began = self._policy.has_heartbeat and self._last_step < 0 and cause.signal is None
        if cause.is_final or never_began or self.num_used >= self._policy.max_restarts:
            return False
        self.num_used += 1
        return True

    def exhausted_text(self, cause: Cause) -> str:
        """What is said where the budget is why the job is not started again; "" where it is not."""
        if cause.is_final or self.num_used == 0 or self.num_used < self._policy.max_restarts:
            return ""
        gave_up = f"gave up after {self.num_used} restart{'s' * (self.num_used > 1)}"
        if self._policy.run_dir is None:
            return gave_up
        return (
            f"{gave_up} in a row that came no further than step {max(self._last_step, 0)}\n"
            f"  look at   the error above; those before it are in {self._policy.run_dir / FAULTS_FILE}\n"
            f"  try       to mend its cause, or restarts={10 * self._policy.max_restarts} "
            f"where the machine is to blame\n"
            f"  then      {self._policy.resume_hint()}"
        )
