"""How a launcher handles the signals it gets. The spawned tests start its processes."""

import signal
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.elastic.agent.server.api import WorkerState
from torch.distributed.elastic.multiprocessing import SignalException

from fourfold.launcher.local_job import Agent


def test_the_first_signal_stops_a_job_gracefully_and_a_later_one_kills_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now, ended = [100.0], []
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    group = SimpleNamespace(state=WorkerState.HEALTHY)
    agent: Any = SimpleNamespace(_stop_requested_at=None, cause=None, _kill_now=ended.append)
    agent.get_worker_group = lambda: group
    with pytest.raises(SignalException):
        Agent._on_signal(agent, signal.SIGTERM, None)
    now[0] = 100.5  # GNU timeout signals its child, and then its process group
    Agent._on_signal(agent, signal.SIGTERM, None)
    assert not ended
    Agent._on_signal(agent, signal.SIGINT, None)  # as soon as a person can press Ctrl-C again
    assert ended == [signal.SIGINT]
    now[0] = 102.0
    Agent._on_signal(agent, signal.SIGTERM, None)
    assert ended == [signal.SIGINT, signal.SIGTERM]
