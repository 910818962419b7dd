"""No rank outlives an interrupted start: neither the one that was being started nor those that were started before."""

import os
import signal
import threading
import time
from types import SimpleNamespace

import pytest
from torch.distributed.elastic.multiprocessing import api

from fourfold.launcher.forked_process import fork
from fourfold.launcher.rank_start import ranks_started_by


class StoppedError(Exception):
    """What the handler of the test raises."""


def _raise(*_: object) -> None:
    raise StoppedError


def test_a_copy_is_killed_if_a_signal_ends_the_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    copies, os_fork = list[int](), os.fork

    def fork_and_signal() -> int:
        if pid := os_fork():
            copies.append(pid)
            signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
        return pid

    before = signal.signal(signal.SIGUSR1, _raise)
    monkeypatch.setattr(os, "fork", fork_and_signal)
    try:
        with pytest.raises(StoppedError):
            fork(lambda: time.sleep(60))
    finally:
        signal.signal(signal.SIGUSR1, before)
    with pytest.raises(ChildProcessError):
        os.waitpid(copies[0], os.WNOHANG)


def test_ranks_that_the_agent_does_not_know_are_killed() -> None:
    copy = fork(lambda: time.sleep(60))
    with ranks_started_by(lambda: SimpleNamespace(proc=copy)):
        api.get_subprocess_handler()  # pyright: ignore[reportPrivateImportUsage, reportCallIssue]
    assert copy.returncode == -signal.SIGKILL
