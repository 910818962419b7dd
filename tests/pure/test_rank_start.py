"""Laws of starts: a rank runs its module as `python -m` does.

No rank outlives an interrupted start: neither the one that was being started nor those that were started before.
"""

import importlib
import os
import signal
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from torch.distributed.elastic.multiprocessing import api

from fourfold.launcher import worker
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


def test_a_module_that_the_launcher_has_imported_runs_as_main_without_a_warning(tmp_path, monkeypatch, recwarn):
    folder = tmp_path / "own_package"
    folder.mkdir()
    (folder / "__init__.py").write_text("names = []\n")
    (folder / "ranks.py").write_text("import own_package\nown_package.names.append(__name__)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "argv", [])
    importlib.import_module("own_package.ranks")
    worker._run_target(["-m", "own_package.ranks"])
    assert sys.modules["own_package"].names == ["own_package.ranks", "__main__"]
    assert not recwarn.list
