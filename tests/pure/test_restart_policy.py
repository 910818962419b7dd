"""Laws of restarts: whether a job restarts, and which ranks count as hanging."""

import dataclasses
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fourfold.checkpoint.store import CHECKPOINTS_DIR
from fourfold.environment.known_waits import KnownWait
from fourfold.feed.sharing.shared_reads import as_raised, tell
from fourfold.launcher import failure_report, hang_detector
from fourfold.launcher.failure_report import Cause
from fourfold.launcher.hang_detector import HeartbeatFile
from fourfold.launcher.restart_policy import RestartBudget, SupervisionPolicy
from fourfold.trainer.heartbeat import DONE, PAUSED, STARTING, STEPPING, Heartbeat, HeartbeatRecord
from fourfold.words.errors import READING, CheckpointError, PeerError, StoppedError, TrainingError, WorkerDiedError

KILLED = Cause("rank 1 of 2 was killed", 1, 1, signal=9)
FAILED = Cause("rank 1 of 2 failed", 1, 1)


def at(step: int, resumed: int = 0) -> list[HeartbeatRecord]:
    return [HeartbeatRecord(step, resumed, STEPPING, 0.0, 0.1)] * 2


def restart_decisions(deaths: list[tuple[int, int]], *, restarts: int = 3, of: Cause = KILLED) -> list[bool]:
    """Whether the job restarts after each death: (last step, step it had resumed from)."""
    budget = RestartBudget(SupervisionPolicy(max_restarts=restarts, has_heartbeat=True))
    return [budget.allows_restart(of, at(*death)) for death in deaths]


def test_any_number_of_restarts_with_progress_is_allowed() -> None:
    assert all(restart_decisions([(step, 0) for step in range(100)], restarts=1))


def test_a_newer_checkpoint_is_progress_even_if_the_last_step_is_not_higher() -> None:
    assert restart_decisions([(57, 50), (56, 55), (56, 55)], restarts=1) == [True, True, False]
    assert restart_decisions([(57, 50), (56, 50)], restarts=1) == [True, False]


def test_consecutive_restarts_without_progress_are_limited() -> None:
    assert restart_decisions([(5, 0), (5, 0), (5, 0), (5, 0)], restarts=3) == [True, True, True, False]
    assert restart_decisions([(5, 0), (5, 0), (6, 0), (6, 0), (6, 0)], restarts=2) == [True, True, True, True, False]
    assert restart_decisions([(5, 0)], restarts=0) == [False]


def test_before_the_first_step_a_killed_rank_is_restarted_and_a_failed_program_is_not() -> None:
    assert restart_decisions([(-1, -1)]) == [True]
    assert restart_decisions([(-1, -1)], of=FAILED) == [False]
    assert restart_decisions([(3, 0), (-1, -1)], of=FAILED) == [True, True]  # an earlier attempt has finished steps


def failures(*deaths: tuple[Exception, int], rank: int = 1) -> list[bool]:
    """Whether the job restarts after each error, with the step before it."""
    budget = RestartBudget(SupervisionPolicy(max_restarts=9, has_heartbeat=True))
    decisions = []
    for error, step in deaths:
        cause = failure_report.first_cause(
            {rank: failure_report.make_record(error, rank=rank)}, {}, ["rank 0", "rank 1"]
        )
        decisions.append(budget.allows_restart(cause, at(step)))
    return decisions


def test_the_same_error_twice_at_one_step_ends_the_job() -> None:
    assert failures((KeyError("a"), 5), (KeyError("a"), 5)) == [True, False]
    assert failures((KeyError("a"), 5), (KeyError("b"), 5), (ValueError("b"), 5)) == [True] * 3
    assert failures((KeyError("a"), 5), (KeyError("b"), 5), (KeyError("a"), 5)) == [True, True, False]
    assert failures((KeyError("a"), 5), (KeyError("a"), 6), (KeyError("a"), 6)) == [True, True, False]
    assert failures((KeyError("<a at 0x7f1>"), 5), (KeyError("<a at 0x7f2>"), 5)) == [True, False]
    assert failures(*[(PeerError("rank 0 died"), 5)] * 3) == [True] * 3  # no error of the program
    for one, other in (
        ("at 12:30:07.25, process 4711", "at 12:31:19.02, process 4893"),
        ("no file tmp7a3_x9k1/part", "no file tmpq0_1zz8b/part"),
        ("unexpected {'a', 'b', 'c'}", "unexpected {'c', 'a', 'b'}"),
        ("attempt 3 failed", "attempt 11 failed"),
    ):
        assert failures((ValueError(one), 5), (ValueError(other), 5)) == [True, False], one


def test_errors_of_other_samples_or_with_other_words_are_other_errors() -> None:
    def error(sample: int, text: str = "truncated after 512 bytes") -> Exception:
        error = ValueError(text)
        error.add_note(f"{READING}sample {sample} of Faces")
        return error

    assert failures((error(7), 5), (error(8), 5), (error(8), 5)) == [True, True, False]
    assert failures((error(7), 5), (error(7, "no such file"), 5)) == [True, True]


def test_an_error_that_all_ranks_raise_is_the_same_whichever_of_them_is_first() -> None:
    def failed(rank: int, timestamp: float, error: Exception | None = None) -> failure_report.FailureRecord:
        error = error or ValueError("no label")
        error.add_note(f"{READING}sample {rank} of Faces")  # each rank reads its own
        return dataclasses.replace(failure_report.make_record(error, rank=rank), timestamp=timestamp)

    def decisions(*attempts: tuple[failure_report.FailureRecord, ...]) -> list[bool]:
        budget = RestartBudget(SupervisionPolicy(max_restarts=9, has_heartbeat=True))
        causes = [failure_report.first_cause({r.rank: r for r in each}, {}, ["rank 0", "rank 1"]) for each in attempts]
        return [budget.allows_restart(cause, at(5)) for cause in causes]

    assert decisions((failed(0, 1.0), failed(1, 2.0)), (failed(0, 2.0), failed(1, 1.0))) == [True, False]
    assert decisions((failed(0, 1.0), failed(1, 2.0)), (failed(1, 1.0),)) == [True, False]
    assert decisions((failed(0, 1.0),), (failed(1, 1.0),), (failed(0, 1.0),)) == [True, True, False]
    asked = (failed(0, 2.0, StoppedError("asked to stop")),)  # as every other rank is after a failure
    first, other = (failed(1, 1.0, KeyError(text)) for text in "ab")
    assert decisions((first, *asked), (other, *asked)) == [True, True]


def test_the_step_of_an_error_is_the_same_where_an_attempt_begins_right_before_it() -> None:
    budget = RestartBudget(SupervisionPolicy(max_restarts=9, has_heartbeat=True))
    record = failure_report.make_record(KeyError("a"), rank=0)
    cause = failure_report.first_cause({0: record}, {}, ["rank 0"])
    assert [budget.allows_restart(cause, at(*each)) for each in ((6, 0), (-1, 6))] == [True, False]
    assert restart_decisions([(5, 0)] * 3, of=KILLED) == [True] * 3


def test_a_script_whose_steps_are_unknown_restarts_as_often_as_it_is_allowed() -> None:
    budget = RestartBudget(SupervisionPolicy(max_restarts=3))
    cause = failure_report.first_cause({0: failure_report.make_record(KeyError("a"), rank=0)}, {}, ["rank 0"])
    assert [budget.allows_restart(cause, at(-1, -1)) for _ in range(4)] == [True, True, True, False]


@pytest.mark.parametrize("deaths", [[(5, 0), (5, 0)], [(5, 0), (5, 4)], [(5, 0), (-1, 5)]])
def test_a_job_that_ends_with_the_same_error_says_so(tmp_path: Path, deaths: list[tuple[int, int]]) -> None:
    """Also where the second attempt had a newer checkpoint, so that its restart is not counted."""
    budget = RestartBudget(SupervisionPolicy(max_restarts=9, has_heartbeat=True, run_dir=tmp_path))
    cause = failure_report.first_cause({0: failure_report.make_record(KeyError("a"), rank=0)}, {}, ["rank 0"])
    assert [budget.allows_restart(cause, at(*each)) for each in deaths] == [True, False]
    text = budget.exhausted_text(cause)
    assert text.startswith("gave up after 1 restart: the same error came again after step 5\n  look at")
    assert "restarts=" not in text


def test_a_job_that_starts_over_though_it_had_done_steps_says_so(tmp_path: Path) -> None:
    policy = SupervisionPolicy(has_heartbeat=True, run_dir=tmp_path / "run")
    removed = f" from the first step: {policy.run_dir} was removed"
    assert [policy.starts_over_text(at(step)) for step in (-1, 0, 5)] == ["", "", removed]
    (tmp_path / "run").mkdir()
    assert policy.starts_over_text(at(-1, 5)) == removed.replace("was removed", "has no checkpoint")
    (tmp_path / "run" / CHECKPOINTS_DIR / "step-00000004").mkdir(parents=True)
    assert policy.starts_over_text(at(5)) == ""


def test_a_job_that_never_had_a_folder_names_no_file_in_it(tmp_path: Path) -> None:
    budget = RestartBudget(SupervisionPolicy(max_restarts=1, has_heartbeat=True, run_dir=tmp_path / "none"))
    assert [budget.allows_restart(KILLED, at(-1, -1)) for _ in range(2)] == [True, False]
    assert "look at   the error above\n" in budget.exhausted_text(KILLED)


@pytest.mark.parametrize("error", [CheckpointError("bad"), TrainingError("no gradient"), StoppedError("requested")])
def test_errors_that_would_recur_are_not_retried(error: Exception) -> None:
    cause = failure_report.first_cause({0: failure_report.make_record(error, rank=0)}, {0: 1}, ["rank 0 of 1"])
    assert restart_decisions([(9, 0)], of=cause) == [False]


def test_a_worker_that_is_killed_counts_as_a_killed_rank() -> None:
    """Before the first step too, and at the same step; on the ranks that it reads for it is an echo."""
    error = WorkerDiedError("a worker was killed")
    error.signal = 9
    records = {0: failure_report.make_record(as_raised(tell(error, 1)), rank=0)}
    assert records[0].is_echo
    records[1] = failure_report.make_record(error, rank=1)
    cause = failure_report.first_cause(records, {}, ["rank 0 of 2", "rank 1 of 2"])
    assert cause.rank == 1
    for deaths in ([(-1, -1)], [(5, 0)] * 4):
        assert restart_decisions(deaths, of=cause) == restart_decisions(deaths, of=KILLED)


def test_a_job_restarts_after_a_peer_error() -> None:
    cause = failure_report.first_cause(
        {0: failure_report.make_record(PeerError("rank 1 died"), rank=0)}, {0: 75}, ["rank 0 of 1"]
    )
    assert restart_decisions([(9, 0)], of=cause) == [True]


def test_a_requested_stop_is_not_reported_as_a_failure() -> None:
    cause = failure_report.first_cause(
        {1: failure_report.make_record(StoppedError("stopped after step 5"), rank=1)}, {1: 75}, ["rank 0", "rank 1"]
    )
    assert (cause.text, cause.exit_code, cause.is_stopped) == ("stopped after step 5", 75, True)


def test_the_hang_limit_follows_the_step_time_and_has_a_minimum() -> None:
    assert HeartbeatRecord(9, 0, STEPPING, 0.0, 0.1).limit_seconds(10.0) == 10.0
    assert HeartbeatRecord(9, 0, STEPPING, 0.0, 60.0).limit_seconds(10.0) == 300.0
    assert HeartbeatRecord(9, 0, PAUSED, 0.0, 1.0).limit_seconds(10.0) == 120.0
    assert HeartbeatRecord(9, 0, PAUSED, 0.0, 0.0).limit_seconds(10.0) == 600.0  # the first pause has no precedent
    assert HeartbeatRecord(-1, 0, STARTING, 0.0, 0.0).limit_seconds(10.0) == 600.0
    assert (
        HeartbeatRecord(9, 0, DONE, 0.0, 0.0).limit_seconds(10.0) == math.inf
    )  # the run generates its sample or writes its report


def test_only_ranks_beyond_their_limit_are_overdue() -> None:
    beats = [
        HeartbeatRecord(9, 0, STEPPING, 100.0, 0.1),
        HeartbeatRecord(9, 0, PAUSED, 50.0, 20.0),
        HeartbeatRecord(9, 0, STEPPING, 89.0, 0.1),
    ]
    assert hang_detector.Watch().overdue_ranks(beats, min_seconds=10.0, now=100.0) == [2]


def test_the_clock_stands_still_while_a_rank_waits_for_what_it_knows() -> None:
    def overdue(wait: KnownWait, now: float) -> list[int]:
        beats = [HeartbeatRecord(9, 0, STEPPING, 50.0, 0.1), HeartbeatRecord(9, 0, STEPPING, 50.0, 0.1, wait)]
        return hang_detector.Watch().overdue_ranks(beats, min_seconds=10.0, now=now)

    assert overdue(KnownWait(), 61.0) == [0, 1]
    assert overdue(KnownWait("http://host/x", 55.0), 900.0) == []
    assert overdue(KnownWait("", 0.0, 100.0), 109.0) == []  # it has ended
    assert overdue(KnownWait("", 0.0, 100.0), 111.0) == [0, 1]
    assert overdue(KnownWait("http://host/x", 55.0), 56.0 + hang_detector.MAX_WAIT_SECONDS + 10.0) == [0, 1]


def test_the_clock_goes_on_while_a_stopped_rank_waits_for_what_it_knows() -> None:
    beats = [HeartbeatRecord(9, 0, STEPPING, 50.0, 0.1, KnownWait("the disk of runs/first", 55.0))]
    rank = subprocess.Popen(["sleep", "60"])
    try:
        assert hang_detector.without_waits_of_stopped(beats, {0: rank.pid}) == beats
        rank.send_signal(signal.SIGSTOP)
        os.waitpid(rank.pid, os.WUNTRACED)
        heard = hang_detector.without_waits_of_stopped(beats, {0: rank.pid})
        assert hang_detector.Watch().overdue_ranks(heard, min_seconds=10.0, now=100.0) == [0]
    finally:
        rank.kill()
        rank.wait()


def test_the_clock_begins_anew_when_the_launcher_was_stopped() -> None:
    watch, beats = hang_detector.Watch(), [HeartbeatRecord(9, 0, STEPPING, 50.0, 0.1)]
    times = (50.5, 51.0, 99.0, *(99.0 + seconds for seconds in range(1, 12)))
    overdue = [bool(watch.overdue_ranks(beats, min_seconds=10.0, now=now)) for now in times]
    assert overdue == [False] * 13 + [True]


def test_of_a_rank_that_waits_for_its_batches_the_thread_that_reads_them_is_shown(tmp_path: Path) -> None:
    def read(names: str) -> str:
        return subprocess.run([sys.executable, "-c", STUCK, names], capture_output=True, text=True, check=True).stdout

    assert " in stuck" in hang_detector.stack_of(read("fourfold/feed/reading.py"))
    assert " in stuck" not in hang_detector.stack_of(read("fourfold/comm/ring.py"))


STUCK = """
import faulthandler, sys, threading
source = "import threading\\ndef call(function): function()"
namespace = {}
exec(compile(source, sys.argv[1], "exec"), namespace)
begun, end = threading.Event(), threading.Event()
def stuck():
    begun.set()
    end.wait()
threading.Thread(target=namespace["call"], args=[stuck]).start()
begun.wait()
threading.Thread(target=end.wait).start()  # reads nothing, and is dumped before the thread that does
def dump(): faulthandler.dump_traceback(sys.stdout)
namespace["call"](dump)
end.set()
"""


def test_a_launcher_reads_the_heartbeats_of_its_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 5.0, 6.0, 7.0, 8.0, 9.0])
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    heartbeats = HeartbeatFile(tmp_path, 2)
    heartbeats.reset()
    heartbeat = Heartbeat(heartbeats._words, 1)
    heartbeat.set_resumed_step(4)
    heartbeat.beat(5)
    assert heartbeats.read()[1] == HeartbeatRecord(5, 4, STEPPING, 5.0, 5.0)
    heartbeat.beat(6)
    heartbeat.beat(7)
    with heartbeat.pause():
        assert heartbeats.read()[1] == HeartbeatRecord(7, 4, PAUSED, 8.0, 0.0)
    assert heartbeats.read()[1] == HeartbeatRecord(7, 4, STEPPING, 9.0, 1.0)
    assert heartbeats.read()[0].step == -1
