"""Local processes: N ranks on this host, kept by torch's own elastic agent.

command  what every rank runs: a script or `-m module`, with its arguments
window   seconds between asking a rank to end and killing it
cause    why the job ended, told once
Law: when `launch` returns, none of its processes is left.
"""

import contextlib
import logging
import os
import signal
import socket
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.elastic.agent.server.api import WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from fourfold.engines import cause
from fourfold.engines.machine import thread_variables

LOOPBACK = "127.0.0.1"
WINDOW_SECONDS = 3
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


@dataclass(frozen=True)
class Outcome:
    """How a job ended: the exit code, and the one thing to tell the user ("" where all went well)."""

    exit_code: int = 0
    text: str = ""


def launch(
    command: Sequence[str], *, num_processes: int, max_restarts: int = 0, window: int = WINDOW_SECONDS
) -> Outcome:
    """Run `command` on every one of `num_processes` ranks and wait for the end.

    command: `[script, *arguments]`, or `["-m", module, *arguments]`. Each rank gets its share of the cores, and
    writes to this process's standard streams. To be called in the main thread, for the signals' sake.
    """
    with (
        tempfile.TemporaryDirectory(prefix="fourfold-") as folder,
        _environment(thread_variables(num_processes)),
        _quiet(),
        _handlers_restored(),
    ):
        spec = WorkerSpec(
            role="rank",
            local_world_size=num_processes,
            rdzv_handler=OneHost(run=uuid.uuid4().hex),
            entrypoint=sys.executable,
            args=("-m", "fourfold.engines.worker", str(os.getpid()), *(_literal(word) for word in command)),
            max_restarts=max_restarts,
            local_addr=LOOPBACK,
        )
        agent: Any = _Agent(spec, logs=DefaultLogsSpecs(log_dir=folder), window=window)
        try:
            result = agent.run()
        except SignalException as stop:
            return Outcome(
                128 + stop.sigval, f"stopped by {stop.sigval.name}; all {num_processes} processes have ended"
            )
        except KeyboardInterrupt:  # Before the agent listened to signals, and so before any rank was there.
            return Outcome(128 + signal.SIGINT, "stopped by SIGINT")
        finally:
            agent.sweep()
        if not result.is_failed():
            return Outcome()
        found = cause.first(agent.records(), agent.exit_codes, num_processes=num_processes)
        return Outcome(found.exit_code, found.text)


class OneHost(RendezvousHandler):
    """A rendezvous of one agent: a store on the loopback device, a fresh one for every attempt.

    torch's dynamic rendezvous is not used: it pickles its state through a port open to the network, and hands a
    restarted job the store of the dead one, with the dead ranks' addresses in it.
    """

    use_agent_store = True  # type: ignore[assignment]

    def __init__(self, *, run: str) -> None:
        self._run = run
        self._store: TCPStore | None = None

    def next_rendezvous(self) -> RendezvousInfo:
        listener = socket.create_server((LOOPBACK, 0))
        port = listener.getsockname()[1]
        self._store = TCPStore(
            LOOPBACK,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=60),
            master_listen_fd=listener.detach(),
        )
        store = PrefixStore("agent", self._store)
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(LOOPBACK, port))

    def get_backend(self) -> str:
        return "one-host"

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None: ...

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run

    def shutdown(self) -> bool:
        return True


class _Agent(LocalElasticAgent):
    """The elastic agent, except that ranks are given `window` seconds to end, and that deaths are remembered.

    exit_codes  of the ranks that ended before the others were told to, in the last attempt
    """

    def __init__(self, spec: WorkerSpec, *, logs: DefaultLogsSpecs, window: int) -> None:
        super().__init__(spec, logs_specs=logs)
        self._window = window
        self._contexts: list[Any] = []
        self.exit_codes: dict[int, int] = {}

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:  # pyright: ignore[reportIncompatibleVariableOverride]
        started: Any = super()._start_workers(worker_group)  # pyright: ignore[reportCallIssue]
        context: Any = self._pcontext
        self._contexts.append(context)
        self.exit_codes = {}
        close = context.close

        # The agent itself would wait 30 s, whatever its settings say: a failing rank closes the context with defaults.
        def close_soon(death_sig: signal.Signals | None = None, timeout: int = 0) -> None:
            if not self.exit_codes:
                self.exit_codes = _ended(context)
            with _on_signals(lambda: _signal_all(context, signal.SIGKILL)):
                close(death_sig, self._window)

        context.close = close_soon
        return started

    def records(self) -> dict[int, cause.Record]:
        """What the ranks of the last attempt have written down."""
        found = {}
        for rank, path in self._contexts[-1].error_files.items():
            entry = cause.read(Path(path))
            if entry is not None:
                found[rank] = entry
        return found

    def sweep(self) -> None:
        """Kill what ranks that did not end well have left behind in their process groups."""
        for context in self._contexts:
            if any(handler.proc.poll() != 0 for handler in context.subprocess_handlers.values()):
                _signal_all(context, signal.SIGKILL)


def _ended(context: Any) -> dict[int, int]:
    codes = {rank: handler.proc.poll() for rank, handler in context.subprocess_handlers.items()}
    return {rank: code for rank, code in codes.items() if code is not None}


def _signal_all(context: Any, number: signal.Signals) -> None:
    """Send a signal to each rank's process group: the agent makes every rank the leader of its own."""
    for pid in context.pids().values():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, number)


def _literal(word: str) -> str:
    """The word, spelled so that the agent's `${local_rank}` macro leaves it as it is."""
    return word.replace("$", "$$")


@contextlib.contextmanager
def _on_signals(act: Callable[[], None]) -> Iterator[None]:
    """Within: a signal to end (a second Ctrl-C, say) does `act` and nothing else."""
    before = {number: signal.signal(number, lambda *_: act()) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _handlers_restored() -> Iterator[None]:
    """The agent replaces signal handlers and keeps them; afterwards they are as they were."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Within: variables added to the environment that ranks inherit."""
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values:
            os.environ.pop(name, None)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Within: no log lines of the agent's. What is worth telling is in the outcome."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
