"""Each name of torchelastic that our agent uses without documentation is there, and does what we rely on.

The ranks here are shells that end at once. `Watched` overrides what `launcher/local_job.py` overrides, and records.
"""

import os
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException

from fourfold.launcher import failure_report
from fourfold.launcher.forked_process import fork
from fourfold.launcher.local_job import (
    LOOPBACK,
    TORCH_SIGNALS_VARIABLE,
    AgentRendezvous,
    handled_signals,
    signal_handler,
)
from fourfold.launcher.rank_start import ranks_started_by

MAX_RESTARTS = 5


@pytest.fixture(autouse=True)
def _restore_handlers() -> Iterator[None]:
    with signal_handler(handled_signals(), signal.raise_signal):
        yield


class Watched(LocalElasticAgent):
    """Two ranks, each `sh -c script`.

    outcomes      by attempt: what `_monitor_workers` returns or raises when torch's own has seen the ranks end
    max_attempts  after so many, `_remaining_restarts` is set to 0; None: never
    """

    def __init__(
        self, folder: Path, script: str, *, outcomes: Mapping[int, Any] | None = None, max_attempts: int | None = None
    ) -> None:
        spec = WorkerSpec(
            role="rank",
            local_world_size=2,
            rdzv_handler=AgentRendezvous(run_id="ab"),
            entrypoint="sh",
            args=("-c", script),
            max_restarts=MAX_RESTARTS,
            monitor_interval=0.01,
            local_addr=LOOPBACK,
        )
        super().__init__(spec, logs_specs=DefaultLogsSpecs(log_dir=str(folder)))
        self.contexts: list[Any] = []
        self.process_groups: list[int] = []
        self.close_calls: list[tuple[Any, ...]] = []
        self._outcomes, self._max_attempts = outcomes or {}, max_attempts

    def _start_workers(self, worker_group: Any) -> dict[int, Any]:  # pyright: ignore[reportIncompatibleVariableOverride]
        started: Any = super()._start_workers(worker_group)  # pyright: ignore[reportCallIssue]
        context: Any = self._pcontext
        close = context.close

        def record_and_kill(death_sig: signal.Signals | None = None, timeout: int = 0) -> None:
            self.close_calls.append((death_sig, timeout))
            close(signal.SIGKILL, 5)

        context.close = record_and_kill
        self.contexts.append(context)
        self.process_groups += [os.getpgid(handler.proc.pid) for handler in context.subprocess_handlers.values()]
        return started

    def _monitor_workers(self, worker_group: Any) -> RunResult:  # pyright: ignore[reportIncompatibleVariableOverride]
        result: Any = super()._monitor_workers(worker_group)  # pyright: ignore[reportCallIssue]
        if result.state == WorkerState.HEALTHY:
            return result
        if len(self.contexts) == self._max_attempts:
            self._remaining_restarts = 0
        outcome = self._outcomes.get(len(self.contexts), result)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


def run(agent: Watched) -> RunResult:
    result: Any = agent.run()  # torch's decorator hides what `run` returns
    return result


def exit_codes(context: Any) -> dict[int, int | None]:
    return {rank: handler.proc.poll() for rank, handler in context.subprocess_handlers.items()}


def test_an_attempt_has_a_context_that_knows_the_process_and_the_error_file_of_each_rank(tmp_path):
    agent = Watched(tmp_path, 'printf $RANK > "$TORCHELASTIC_ERROR_FILE"')
    assert agent._pcontext is None  # before the first attempt
    run(agent)
    (context,) = agent.contexts
    assert context is agent._pcontext
    assert {rank: Path(path).read_text() for rank, path in context.error_files.items()} == {0: "0", 1: "1"}
    assert exit_codes(context) == {0: 0, 1: 0}


def test_an_agent_reads_the_record_that_a_rank_leaves(tmp_path):
    record = failure_report.make_record(ValueError("bad 3"), rank=1)
    failure_report.save_record(tmp_path / "record", record)
    script = f'test $RANK = 0 || {{ cp {tmp_path}/record "$TORCHELASTIC_ERROR_FILE"; exit 1; }}'
    failure = run(Watched(tmp_path, script, max_attempts=1)).failures[1]
    assert (failure.message, failure.timestamp) == ("bad 3", int(record.timestamp))


def test_every_rank_leads_a_process_group_of_its_own(tmp_path):
    agent = Watched(tmp_path, "exit 0")
    run(agent)
    (context,) = agent.contexts
    assert agent.process_groups == [handler.proc.pid for handler in context.subprocess_handlers.values()]


def test_an_agent_ends_the_other_ranks_by_the_close_of_the_context(tmp_path):
    agent = Watched(tmp_path, "test $RANK = 1 || exit 3; exec sleep 60", max_attempts=1)
    run(agent)
    # torch calls ours without arguments when a rank fails; ours calls torch's with a signal and seconds.
    assert agent.close_calls[0] == (None, 0)
    assert exit_codes(agent.contexts[0]) == {0: 3, 1: -signal.SIGKILL}


def test_an_agent_passes_the_signal_that_it_got_to_the_close_of_the_context(tmp_path):
    agent = Watched(tmp_path, "exit 0", outcomes={1: SignalException("as if by Ctrl-C", signal.SIGINT)})
    with pytest.raises(SignalException) as raised:
        run(agent)
    assert raised.value.sigval == agent.close_calls[-1][0] == signal.SIGINT


def test_an_agent_restarts_all_ranks_until_no_restart_remains(tmp_path):
    script = f'echo "$TORCHELASTIC_RUN_ID $TORCHELASTIC_RESTART_COUNT" >> {tmp_path}/attempts-$RANK; exit 3'
    agent = Watched(tmp_path, script, max_attempts=3)
    assert run(agent).is_failed()
    assert len(agent.contexts) == 3
    lines = [line for rank in range(2) for line in (tmp_path / f"attempts-{rank}").read_text().splitlines()]
    assert set(lines) == {"ab 0", "ab 1", "ab 2"}  # a rank may be killed before it writes


def test_ranks_that_have_succeeded_start_again_after_a_result_that_says_failed(tmp_path):
    failed = RunResult(state=WorkerState.FAILED)
    assert failed.is_failed()
    agent = Watched(tmp_path, "exit 0", outcomes={1: failed})
    result = run(agent)
    assert (result.state, result.is_failed(), len(agent.contexts)) == (WorkerState.SUCCEEDED, False, 2)


def test_an_agent_handles_the_signals_of_the_variable_and_no_others(tmp_path, monkeypatch):
    # Under nohup SIGHUP is to stay ignored.
    monkeypatch.setenv(TORCH_SIGNALS_VARIABLE, "SIGQUIT")
    before = {number: signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGQUIT)}
    run(Watched(tmp_path, "exit 0"))
    assert signal.getsignal(signal.SIGHUP) == before[signal.SIGHUP]
    assert signal.getsignal(signal.SIGQUIT) != before[signal.SIGQUIT]


def test_an_agent_starts_its_ranks_as_it_is_told(tmp_path):
    """A fork of this process gets the rank's variables and leads a group, as a spawned rank does."""

    def fork_writer(env: Mapping[str, str], local_rank_id: int, **_: Any) -> Any:
        def write() -> None:
            (tmp_path / env["RANK"]).write_text(env["WORLD_SIZE"])
            sys.exit(3 if local_rank_id else 0)

        return SimpleNamespace(proc=fork(write, new_session=True), close=lambda death_sig: None)

    agent = Watched(tmp_path, "exit 9", max_attempts=1)
    with ranks_started_by(fork_writer):
        run(agent)
    (context,) = agent.contexts
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["2", "2"]
    assert exit_codes(context)[1] == 3
    assert agent.process_groups == [handler.proc.pid for handler in context.subprocess_handlers.values()]
