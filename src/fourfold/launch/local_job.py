"""Local processes: N ranks on this host, kept by torch's own elastic agent.

command  what every rank runs: a script or `-m module`, with its arguments
care     what is done when a rank fails (`engines.restart`)
cause    why the job ended, told once
Law: when `launch` returns, none of its processes is left.
"""

import contextlib
import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing import SignalException

from fourfold.environment.rendezvous import STORE_VARIABLE
from fourfold.launch import hang_detector
from fourfold.launch.agent import TORCH_SIGNALS_VARIABLE, UNLIMITED_RESTARTS, Agent
from fourfold.launch.local_rendezvous import LOOPBACK, AgentRendezvous
from fourfold.launch.process_defaults import loopback_variables, malloc_variables, thread_variables
from fourfold.launch.restart_policy import SupervisionPolicy
from fourfold.launch.signals import handled_signals, restored_handlers
from fourfold.trainer import heartbeat
from fourfold.words.errors import REQUEUE_EXIT_CODE

MONITOR_SECONDS = 0.05


@dataclass(frozen=True)
class JobResult:
    """How a job ended: the exit code, and the one thing to tell the user ("" where all went well)."""

    exit_code: int = 0
    text: str = ""


def launch(command: Sequence[str], *, num_processes: int, policy: SupervisionPolicy | None = None) -> JobResult:
    """Run `command` on every one of `num_processes` ranks and wait for the end.

    command: `[script, *arguments]`, or `["-m", module, *arguments]`. Each rank gets its share of the cores, and
    writes to this process's standard streams. To be called in the main thread, for the signals' sake.
    """
    policy = policy or SupervisionPolicy()
    with (
        tempfile.TemporaryDirectory(prefix="fourfold-") as name,
        _extended_environment({**thread_variables(num_processes), **malloc_variables(), **loopback_variables()}),
        _silence_logging(),
        restored_handlers(),
    ):
        folder, run = Path(name), uuid.uuid4().hex
        pulses = heartbeat.HeartbeatFile(folder, num_processes)
        spec = WorkerSpec(
            role="rank",
            local_world_size=num_processes,
            rdzv_handler=AgentRendezvous(run_id=run),
            entrypoint=sys.executable,
            args=("-m", "fourfold.launch.worker", str(os.getpid()), *(_escape_macro(word) for word in command)),
            max_restarts=UNLIMITED_RESTARTS,
            monitor_interval=MONITOR_SECONDS,
            local_addr=LOOPBACK,
        )
        listening = {hang_detector.STACKS_VARIABLE: name} if policy.hang_seconds is not None else {}
        listening[TORCH_SIGNALS_VARIABLE] = ",".join(number.name for number in handled_signals())
        with _extended_environment(
            {heartbeat.HEARTBEAT_VARIABLE: str(pulses.path), STORE_VARIABLE: str(folder / f"store-{run}"), **listening}
        ):
            return _run_agent(Agent(spec, folder=folder, heartbeats=pulses, policy=policy))


def _run_agent(agent: Agent) -> JobResult:
    try:
        agent.run()
    except SignalException as stop:
        return _stopped_result(agent, stop.sigval)
    except KeyboardInterrupt:  # Before the agent listened to signals, and so before any rank was there.
        return JobResult(128 + signal.SIGINT, "stopped by SIGINT")
    finally:
        agent.clean_up()
    cause = agent.cause
    return JobResult() if cause is None else JobResult(cause.exit_code, cause.text)


def _stopped_result(agent: Agent, number: signal.Signals) -> JobResult:
    """The job was asked to end. Ranks that save before they do have said so."""
    found = agent.find_cause()
    if found is not None and found.is_stopped:
        return JobResult(found.exit_code, found.text)
    codes = agent.exit_codes().values()
    if codes and not any(codes):
        return JobResult()
    outlook = agent.policy.resume_hint()
    text = f"stopped by {number.name}; all {agent.num_ranks} processes have ended{f'; {outlook}' if outlook else ''}"
    asks_again = agent.policy.has_heartbeat and number == signal.SIGTERM
    return JobResult(REQUEUE_EXIT_CODE if asks_again else 128 + number, text)


def _escape_macro(word: str) -> str:
    """The word, spelled so that the agent's `${local_rank}` macro leaves it as it is."""
    return word.replace("$", "$$")


@contextlib.contextmanager
def _extended_environment(values: Mapping[str, str]) -> Iterator[None]:
    """Within: variables added to the environment that ranks inherit."""
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values:
            os.environ.pop(name, None)


@contextlib.contextmanager
def _silence_logging() -> Iterator[None]:
    """Within: no log lines of the agent's. What is worth telling is in the outcome."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
