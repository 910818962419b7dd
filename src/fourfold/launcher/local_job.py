"""Local job: N ranks on this host, supervised by torch's elastic agent.

command  what every rank runs: a script or `-m module`, with its arguments
policy   what to do when a rank fails (`launcher/restart_policy.py`)
cause    why the job ended, reported once (`launcher/failure_report.py`)
Law: when `launch` returns, none of its processes is left.
"""

import contextlib
import logging
import os
import signal
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing import SignalException

from fourfold.environment.rendezvous import STORE_VARIABLE
from fourfold.environment.temporary_folder import temporary_folder
from fourfold.launcher import hang_detector
from fourfold.launcher.agent import TORCH_SIGNALS_VARIABLE, UNLIMITED_RESTARTS, Agent
from fourfold.launcher.heartbeat_file import HeartbeatFile
from fourfold.launcher.local_rendezvous import LOOPBACK, AgentRendezvous
from fourfold.launcher.process_defaults import launch_variables
from fourfold.launcher.rank_start import WORKER_MODULE, RankStarter, ranks_started_by, spawn_rank
from fourfold.launcher.restart_policy import SupervisionPolicy
from fourfold.launcher.signals import handled_signals, signal_handler
from fourfold.trainer.heartbeat import HEARTBEAT_VARIABLE
from fourfold.words.errors import REQUEUE_EXIT_CODE

MONITOR_SECONDS = 0.05


@dataclass(frozen=True)
class JobResult:
    """How a job ended: its exit code, and the text for the user ("" if all went well)."""

    exit_code: int = 0
    text: str = ""


def launch(
    command: Sequence[str],
    *,
    num_processes: int,
    policy: SupervisionPolicy | None = None,
    start_rank: RankStarter = spawn_rank,
) -> JobResult:
    """Run `command` on every one of `num_processes` ranks and wait for the end.

    command: `[script, *arguments]`, or `["-m", module, *arguments]`. The ranks divide the cores among themselves and
    write to this process's standard streams. Call it in the main thread, which alone may handle signals.
    """
    policy = policy or SupervisionPolicy()
    try:
        # torch's agent replaces these handlers when it starts the ranks, and does not put them back.
        with signal_handler(handled_signals(), _raise_signal):
            return _launch(command, num_processes, policy, start_rank)
    except SignalException as stop:  # while there was no rank
        return _stopped_result(policy, num_processes, stop.sigval, has_ranks=False)


def _raise_signal(number: signal.Signals) -> NoReturn:
    raise SignalException(f"the launcher got {number.name}", number)


def _launch(
    command: Sequence[str], num_processes: int, policy: SupervisionPolicy, start_rank: RankStarter
) -> JobResult:
    with (
        temporary_folder() as folder,
        _extended_environment(launch_variables(num_processes)),
        _silence_logging(),
    ):
        run_id = uuid.uuid4().hex
        heartbeats = HeartbeatFile(folder, num_processes)
        spec = WorkerSpec(
            role="rank",
            local_world_size=num_processes,
            rdzv_handler=AgentRendezvous(run_id=run_id),
            entrypoint=sys.executable,
            args=("-m", WORKER_MODULE, str(os.getpid()), *(_escape_macro(word) for word in command)),
            max_restarts=UNLIMITED_RESTARTS,
            monitor_interval=MONITOR_SECONDS,
            local_addr=LOOPBACK,
        )
        variables = {hang_detector.STACKS_VARIABLE: str(folder)} if policy.hang_seconds is not None else {}
        variables[TORCH_SIGNALS_VARIABLE] = ",".join(number.name for number in handled_signals())
        with _extended_environment(
            {
                HEARTBEAT_VARIABLE: str(heartbeats.path),
                STORE_VARIABLE: str(folder / f"store-{run_id}"),
                **variables,
            }
        ):
            agent = Agent(spec, folder=folder, heartbeats=heartbeats, policy=policy)
            with ranks_started_by(start_rank):
                return _run_agent(agent)


def _run_agent(agent: Agent) -> JobResult:
    try:
        agent.run()
    except SignalException as stop:
        return _stopped_job_result(agent, stop.sigval)
    finally:
        agent.clean_up()
    cause = agent.cause
    return JobResult() if cause is None else JobResult(cause.exit_code, cause.text)


def _stopped_job_result(agent: Agent, number: signal.Signals) -> JobResult:
    """The result of a job that a signal has ended. If its ranks saved a checkpoint, their records say so."""
    cause = agent.find_cause()
    if cause is not None and cause.is_stopped:
        return JobResult(cause.exit_code, cause.text)
    codes = agent.exit_codes().values()
    if codes and not any(codes):
        return JobResult()
    return _stopped_result(agent.policy, agent.num_ranks, number, has_ranks=bool(codes))


def _stopped_result(policy: SupervisionPolicy, num_ranks: int, number: signal.Signals, *, has_ranks: bool) -> JobResult:
    hint = policy.resume_hint()
    text = f"stopped by {number.name}; all {num_ranks} processes have ended{f'; {hint}' if hint else ''}"
    # A script that has begun chooses its own answer to SIGTERM, and without one has Python's code.
    is_requeued = number == signal.SIGTERM and (policy.has_heartbeat or not has_ranks)
    return JobResult(REQUEUE_EXIT_CODE if is_requeued else 128 + number, text)


def _escape_macro(word: str) -> str:
    """The word, escaped so that the agent does not expand `${local_rank}` in it."""
    return word.replace("$", "$$")


@contextlib.contextmanager
def _extended_environment(values: Mapping[str, str]) -> Iterator[None]:
    """Within: these variables are in the environment, which the ranks inherit."""
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values:
            os.environ.pop(name, None)


@contextlib.contextmanager
def _silence_logging() -> Iterator[None]:
    """Within: torch's agent logs nothing. The job's result says what the user needs to know."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
