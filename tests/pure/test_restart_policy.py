"""Whether a job is started again, and who held it up."""

import math
from pathlib import Path

import pytest

from fourfold.launch import failure_report, hang_detector
from fourfold.launch.failure_report import Cause
from fourfold.launch.heartbeat_file import HeartbeatFile
from fourfold.launch.restart_policy import RestartBudget, SupervisionPolicy
from fourfold.trainer.heartbeat import DONE, PAUSED, STARTING, STEPPING, Heartbeat, HeartbeatRecord
from fourfold.words.errors import CheckpointError, PeerError, StoppedError, TrainingError

KILLED = Cause("rank 1 of 2 was killed", 1, 1, signal=9)
FAILED = Cause("rank 1 of 2 failed", 1, 1)


def at(step: int, resumed: int = 0) -> list[HeartbeatRecord]:
    return [HeartbeatRecord(step, resumed, STEPPING, 0.0, 0.1)] * 2


def judged(deaths: list[tuple[int, int]], *, restarts: int = 3, of: Cause = KILLED) -> list[bool]:
    """Whether the job goes on after each of some deaths: (last step, step it had gone on from)."""
    budget = RestartBudget(SupervisionPolicy(max_restarts=restarts, has_heartbeat=True))
    return [budget.allows_restart(of, at(*death)) for death in deaths]


def test_any_number_of_restarts_with_progress_is_allowed() -> None:
    assert all(judged([(step, 0) for step in range(100)], restarts=1))


def test_a_newer_checkpoint_is_progress_even_where_the_step_is_not() -> None:
    assert judged([(57, 50), (56, 55), (56, 55)], restarts=1) == [True, True, False]
    assert judged([(57, 50), (56, 50)], restarts=1) == [True, False]


def test_restarts_without_progress_are_counted_in_a_row() -> None:
    assert judged([(5, 0), (5, 0), (5, 0), (5, 0)], restarts=3) == [True, True, True, False]
    assert judged([(5, 0), (5, 0), (6, 0), (6, 0), (6, 0)], restarts=2) == [True, True, True, True, False]
    assert judged([(5, 0)], restarts=0) == [False]


def test_a_rank_killed_before_the_first_step_is_started_again_a_program_that_fails_there_is_not() -> None:
    assert judged([(-1, -1)]) == [True]
    assert judged([(-1, -1)], of=FAILED) == [False]
    assert judged([(3, 0), (-1, -1)], of=FAILED) == [True, True]  # it has worked before


@pytest.mark.parametrize("error", [CheckpointError("bad"), TrainingError("no gradient"), StoppedError("asked")])
def test_what_another_attempt_cannot_mend_is_not_attempted(error: Exception) -> None:
    found = failure_report.first_cause({0: failure_report.make_record(error, rank=0)}, {0: 1}, ["rank 0 of 1"])
    assert judged([(9, 0)], of=found) == [False]


def test_a_peer_that_has_gone_is_a_reason_to_try_again() -> None:
    found = failure_report.first_cause(
        {0: failure_report.make_record(PeerError("rank 1 died"), rank=0)}, {0: 75}, ["rank 0 of 1"]
    )
    assert judged([(9, 0)], of=found) == [True]


def test_a_job_that_was_asked_to_stop_says_so_and_not_that_a_rank_failed() -> None:
    found = failure_report.first_cause(
        {1: failure_report.make_record(StoppedError("stopped after step 5"), rank=1)}, {1: 75}, ["rank 0", "rank 1"]
    )
    assert (found.text, found.exit_code, found.is_stopped) == ("stopped after step 5", 75, True)


def test_a_limit_is_learned_from_the_steps_and_never_below_the_least() -> None:
    assert HeartbeatRecord(9, 0, STEPPING, 0.0, 0.1).limit_seconds(10.0) == 10.0
    assert HeartbeatRecord(9, 0, STEPPING, 0.0, 60.0).limit_seconds(10.0) == 300.0
    assert HeartbeatRecord(9, 0, PAUSED, 0.0, 1.0).limit_seconds(10.0) == 120.0
    assert HeartbeatRecord(9, 0, PAUSED, 0.0, 0.0).limit_seconds(10.0) == 600.0  # the first of its kind
    assert HeartbeatRecord(-1, 0, STARTING, 0.0, 0.0).limit_seconds(10.0) == 600.0
    assert HeartbeatRecord(9, 0, DONE, 0.0, 0.0).limit_seconds(10.0) == math.inf  # a sample, a page


def test_only_ranks_beyond_their_limit_are_late() -> None:
    beats = [
        HeartbeatRecord(9, 0, STEPPING, 100.0, 0.1),
        HeartbeatRecord(9, 0, PAUSED, 50.0, 20.0),
        HeartbeatRecord(9, 0, STEPPING, 89.0, 0.1),
    ]
    assert hang_detector.overdue_ranks(beats, min_seconds=10.0, now=100.0) == [2]


def test_a_launcher_reads_what_its_ranks_have_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 5.0, 6.0, 7.0, 8.0, 9.0])
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    pulses = HeartbeatFile(tmp_path, 2)
    pulses.reset()
    mine = Heartbeat(pulses._words, 1)
    mine.set_resumed_step(4)
    mine.beat(5)
    assert pulses.read()[1] == HeartbeatRecord(5, 4, STEPPING, 5.0, 5.0)
    mine.beat(6)
    mine.beat(7)
    with mine.pause():
        assert pulses.read()[1] == HeartbeatRecord(7, 4, PAUSED, 8.0, 0.0)
    assert pulses.read()[1] == HeartbeatRecord(7, 4, STEPPING, 9.0, 1.0)
    assert pulses.read()[0].step == -1
