"""Restart policy: whether a job starts again after one of its ranks has failed.

progress  a step that no earlier attempt had finished, or a newer checkpoint to resume from
budget    how many restarts in a row may come without progress
Law: a job does not start again where another attempt would fail too: after bad input, after a request to stop, after
an error of the program before the job has finished a single step, and after the same error twice at one step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fourfold.checkpoint.store import CheckpointStore
from fourfold.launcher.failure_report import Cause
from fourfold.trainer.fault_log import FAULTS_FILE, Fault
from fourfold.trainer.heartbeat import HeartbeatRecord
from fourfold.trainer.run_identity import resume_hint
from fourfold.words.noop import noop

SHUTDOWN_SECONDS = 3


@dataclass(frozen=True)
class SupervisionPolicy:
    """How a job is supervised.

    max_restarts      the budget
    has_heartbeat     the ranks write which step they are at (`trainer/heartbeat.py`)
    hang_seconds      the least time without a step after which a rank counts as hanging; None: never
    shutdown_seconds  seconds between asking a rank to end and killing it, after another rank has failed
    save_seconds      seconds for the current step and a checkpoint, after ranks that train were asked to stop; the
                      command line sets it (`stop_seconds()`)
    notify            called at once with the text of a fault after which the job goes on
    record_fault      called with every fault, once it is known how long recovery took
    run_dir           the run's folder; None for a script, whose folder is unknown
    """

    max_restarts: int = 0
    has_heartbeat: bool = False
    hang_seconds: float | None = None
    shutdown_seconds: int = SHUTDOWN_SECONDS
    save_seconds: float = SHUTDOWN_SECONDS
    notify: Callable[[str], None] = noop
    record_fault: Callable[[Fault], None] = noop
    run_dir: Path | None = None

    def resume_hint(self) -> str:
        """What the same command will do; "" if unknown."""
        return "" if self.run_dir is None else resume_hint(self.run_dir)

    def starts_over_text(self, heartbeats: Sequence[HeartbeatRecord]) -> str:
        """What to say of a job that starts again where it had done steps and nothing is saved; otherwise ""."""
        if (
            self.run_dir is None
            or max(beat.done_step for beat in heartbeats) < 1
            or CheckpointStore(self.run_dir).steps()
        ):
            return ""
        return f" from the first step: {self.run_dir} {'has no checkpoint' if self.run_dir.exists() else 'was removed'}"


class RestartBudget:
    """Counts restarts without progress."""

    def __init__(self, policy: SupervisionPolicy) -> None:
        self._policy = policy
        self.num_used = 0
        self._last_step = self._resumed_step = -1
        self._failures = set[tuple[str, int]]()
        """The errors of the program in all attempts, each with the last step that was done before it."""
        self._is_repeated = False
        """Whether an error of the last attempt had come in an earlier one."""

    def allows_restart(self, cause: Cause, heartbeats: Sequence[HeartbeatRecord]) -> bool:
        """Whether the job starts again after this attempt. Counts the restart if it does."""
        step, resumed = max(beat.step for beat in heartbeats), max(beat.resumed_step for beat in heartbeats)
        if step > self._last_step or resumed > self._resumed_step >= 0:
            self.num_used = 0
        self._last_step, self._resumed_step = max(step, self._last_step), max(resumed, self._resumed_step)
        has_no_step = self._policy.has_heartbeat and self._last_step < 0 and cause.signal is None
        failures = set[tuple[str, int]]()
        if self._policy.has_heartbeat:
            failures = {(error, heartbeats[rank].done_step) for rank, error in cause.errors.items()}
        self._is_repeated = not failures.isdisjoint(self._failures)
        self._failures |= failures
        if cause.is_final or has_no_step or self._is_repeated or self.num_used >= self._policy.max_restarts:
            return False
        self.num_used += 1
        return True

    def exhausted_text(self, cause: Cause) -> str:
        """What to report if the job does not start again after restarts; otherwise ""."""
        # The restart after which the same error came may not be counted: it had a newer checkpoint to resume from.
        num_used = max(self.num_used, int(self._is_repeated))
        is_used_up = self.num_used >= self._policy.max_restarts
        if cause.is_final or num_used == 0 or not (is_used_up or self._is_repeated):
            return ""
        gave_up = f"gave up after {num_used} restart{'s' * (num_used > 1)}"
        if self._policy.run_dir is None:
            return gave_up
        if is_used_up:
            gave_up += f" in a row without getting past step {max(self._last_step, 0)}"
            attempt = f", or restarts={10 * self._policy.max_restarts} if the machine is to blame"
        else:
            gave_up, attempt = f"{gave_up}: the same error came again after step {max(self._last_step, 0)}", ""
        run_dir = self._policy.run_dir  # it is there from a rank's start on
        earlier = f"; earlier ones are in {run_dir / FAULTS_FILE}" if run_dir.exists() else ""
        return (
            f"{gave_up}\n"
            f"  look at   the error above{earlier}\n"
            f"  try       to fix its cause{attempt}\n"
            f"  then      {self._policy.resume_hint()}"
        )
