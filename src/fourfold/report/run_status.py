"""Run status: whether a run goes on, as its files and its lock show it.

quiet  since when the log has not grown
limit  how long a run may be quiet, as for the launcher's hang detection: a factor of its median step
Law: a run is called stopped only if no process here has its lock and its log is quiet for longer than the limit: the
process may be one of another host.
"""

import statistics
from typing import Literal, NamedTuple

from fourfold.report.run_record import RunRecord
from fourfold.trainer.heartbeat import FIRST_SECONDS, LIMIT_FACTOR, MAX_SAMPLES, PAUSE_SECONDS
from fourfold.trainer.progress import format_duration, format_seconds

State = Literal["waiting", "starting", "running", "quiet", "stalled", "stopped", "finished"]

MIN_LIMIT_SECONDS = 10.0  # as the default of hang_seconds
RECENT_STEPS = 20


class Status(NamedTuple):
    """What a run does; `remaining_seconds` is None unless it runs."""

    state: State
    text: str
    step: int = 0
    num_steps: int = 0
    remaining_seconds: float | None = None


def judge_status(record: RunRecord, *, is_locked: bool | None, quiet_seconds: float) -> Status:
    """The status of a run. `is_locked`: whether a process of this host trains it; None if the system does not say."""
    step, num_steps = (record.steps[-1]["step"] if record.steps else 0), record.last_step
    if record.finish_line is not None:
        return Status("finished", f"finished: {record.finish_line['finished']:,} steps", step, num_steps)
    limit = limit_seconds(record)
    quiet, state = format_duration(quiet_seconds), _state(record, is_locked, quiet_seconds, limit)
    typical = f"a step takes {format_seconds(_median_seconds(record))}" if record.steps else ""
    texts = {
        "starting": f"starting: no step yet, {quiet}",
        "running": "running",
        "quiet": f"no step for {quiet}, {typical}; an evaluation or a checkpoint may take this long",
        "stalled": f"stalled: nothing for {quiet}; {typical or 'no step has ended'}",
        "stopped": f"stopped: no process of this host trains it, and its log has not grown for {quiet}",
    }
    remaining = _remaining_seconds(record, num_steps - step) if state in ("running", "quiet") else None
    return Status(state, texts[state], step, num_steps, remaining)


def limit_seconds(record: RunRecord) -> float:
    """How long the log may be quiet until something else than a step takes the time."""
    if not record.steps:
        return FIRST_SECONDS
    return max(MIN_LIMIT_SECONDS, LIMIT_FACTOR * _median_seconds(record))


def _state(record: RunRecord, is_locked: bool | None, quiet: float, limit: float) -> State:
    if not is_locked and quiet > (limit if record.steps else MIN_LIMIT_SECONDS):
        return "stopped"
    if not record.steps:
        return "starting" if quiet <= limit else "stalled"
    return "running" if quiet <= limit else "quiet" if quiet <= max(limit, PAUSE_SECONDS) else "stalled"


def _median_seconds(record: RunRecord) -> float:
    return statistics.median(line["seconds"] for line in record.steps[-MAX_SAMPLES:])


def _remaining_seconds(record: RunRecord, num_steps: int) -> float:
    """The time of the steps that are left, with evaluations and saves in the share that they had so far."""
    recent = record.steps[-RECENT_STEPS:]
    mean = sum(line["seconds"] for line in recent) / max(len(recent), 1)
    in_steps = sum(line["seconds"] for line in record.steps)
    # Until the first checkpoint the log has no time but that of the steps.
    share = max(1.0, record.total_seconds / in_steps) if in_steps else 1.0
    return mean * share * max(num_steps, 0)
