"""Local job: N ranks on this host, supervised by torch's elastic agent, with our own decision after a fault.

command  what every rank runs: a script or `-m module`, with its arguments
policy   what to do when a rank fails (`launcher/restart_policy.py`)
attempt  the time from one start of all ranks to the next
record   the file in which a rank writes how it ended (`failure_report.FailureRecord`)
cause    why the job ended, reported once (`launcher/failure_report.py`)
Law: however an attempt ends, none of its processes is left when the next begins, nor when `launch` returns. Every
signal handler that is replaced here is restored when its `with` block ends.

agent's store  in the launcher's memory, which no other process reads
ranks' store   a file in the launcher's private folder, a new one for every attempt (`environment/rendezvous.py`)
Law: only this user can reach either store, and no attempt reads what an earlier one has written.
"""

import contextlib
import dataclasses
import logging
import os
import signal
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import msgspec
from torch.distributed import HashStore, PrefixStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from fourfold.environment.rendezvous import STORE_VARIABLE
from fourfold.environment.temporary_folder import temporary_folder
from fourfold.launcher import failure_report, hang_detector
from fourfold.launcher.failure_report import Cause
from fourfold.launcher.hang_detector import HeartbeatFile
from fourfold.launcher.process_defaults import launch_variables
from fourfold.launcher.rank_start import WORKER_MODULE, RankStarter, ranks_started_by, spawn_rank
from fourfold.launcher.restart_policy import RestartBudget, SupervisionPolicy
from fourfold.trainer.fault_log import Fault
from fourfold.trainer.heartbeat import DONE, HEARTBEAT_VARIABLE, STARTING
from fourfold.trainer.stop_signal import REPEAT_SECONDS, SAVING_TEXT
from fourfold.words.errors import INTERRUPT_EXIT_CODE, REQUEUE_EXIT_CODE

# ---- signals to a launcher -------------------------------------------------------------------------------------------


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def handled_signals() -> list[signal.Signals]:
    """The signals that end a job: all but those that the caller has set to be ignored.

    `nohup` ignores SIGHUP; a shell without job control ignores SIGINT and SIGQUIT in its background jobs.
    """
    return [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]


@contextlib.contextmanager
def signal_handler(signals: Iterable[signal.Signals], new_handler: Callable[[signal.Signals], None]) -> Iterator[None]:
    """Within: each of these signals calls `new_handler` and does nothing else."""
    before = {number: signal.signal(number, lambda got, _: new_handler(signal.Signals(got))) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# ---- the agent -------------------------------------------------------------------------------------------------------


UNLIMITED_RESTARTS = 10**9  # for torch's agent; `RestartBudget` does the counting
TORCH_SIGNALS_VARIABLE = "TORCHELASTIC_SIGNALS_TO_HANDLE"  # torch's agent installs its own handlers for these
STOP_TEXTS = {REQUEUE_EXIT_CODE: "it was asked to stop (SIGTERM)", INTERRUPT_EXIT_CODE: "it was asked to stop (SIGINT)"}
POLL_SECONDS = 0.02
STACK_PRINT_SECONDS = 1.0  # a rank that ends itself at the end of its grace period first prints its stack


class Agent(LocalElasticAgent):
    """The ranks of one host. `run` returns when they have ended and are not started again.

    cause  why they ended; None if all went well
    """

    def __init__(self, spec: WorkerSpec, *, folder: Path, heartbeats: HeartbeatFile, policy: SupervisionPolicy) -> None:
        super().__init__(spec, logs_specs=DefaultLogsSpecs(log_dir=str(folder)))
        self.num_ranks, self.policy = spec.local_world_size, policy
        self.cause: Cause | None = None
        self._folder, self._heartbeats, self._budget = folder, heartbeats, RestartBudget(policy)
        self._host = socket.gethostname()
        self._early_exit_codes: dict[int, int] = {}
        """Exit codes of the ranks that ended before this launcher signalled the others to end."""
        self._handled_signals = handled_signals()
        self._watch = hang_detector.Watch()
        self._first_exit_at: float | None = None
        """When a rank was first seen to have ended early (`_early_exits`), on the monotonic clock."""
        self.late_signal: signal.Signals | None = None
        """A signal that came while this launcher was ending the ranks, or when they had ended or were about to."""
        self._stop_requested_at: float | None = None
        """When this launcher was first asked to stop, on the monotonic clock."""
        self._pending_faults: list[tuple[Fault, float]] = []
        """Faults after which no step has ended yet, each with its time on the monotonic clock."""

    # ---- an attempt

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:  # pyright: ignore[reportIncompatibleVariableOverride]
        self._raise_late_signal()
        self._kill_orphans()
        self._early_exit_codes, self._watch.hang, self._first_exit_at = {}, None, None
        self._heartbeats.reset()
        started: Any = super()._start_workers(worker_group)  # pyright: ignore[reportCallIssue]
        context: Any = self._pcontext
        close = context.close

        # When a rank fails, torch's agent closes the context with default arguments and so waits 30 s, whatever its
        # settings say.
        def close_after_save(death_sig: signal.Signals | None = None, timeout: int = 0) -> None:
            if self._stop_requested_at is None:
                failure_report.wait_for_first_failure(self.exit_codes, self._records)
            self._save_exit_codes()
            with (
                contextlib.nullcontext()
                if self._stop_requested_at is not None
                else signal_handler(self._handled_signals, self._kill_now)
            ):
                close(self._wait_for_save(death_sig), self.policy.shutdown_seconds)

        context.close = close_after_save
        for number in self._handled_signals:  # replaces torch's handlers, which treat every signal as the first
            signal.signal(number, self._on_signal)
        return started

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """The first signal to this launcher ends the job in order, a later one at once."""
        got, now = signal.Signals(number), time.monotonic()
        if self.get_worker_group().state == WorkerState.SUCCEEDED or self.cause is not None:
            self.late_signal = got
            return
        if self._stop_requested_at is None:
            self._stop_requested_at = now
            raise SignalException(f"the launcher got {got.name}", got)
        if now - self._stop_requested_at > REPEAT_SECONDS.get(got, 0.0):
            self._kill_now(got)

    def _kill_now(self, number: signal.Signals) -> None:
        """Handle a signal that comes while this launcher ends the ranks, such as a second Ctrl-C: kill them."""
        self.late_signal = number
        self._signal_all(signal.SIGKILL)

    def _wait_for_save(self, number: signal.Signals | None) -> signal.Signals | None:
        """Let ranks that train save a checkpoint and end; returns the signal for those that are still there."""
        begin = time.monotonic()
        if self._stop_requested_at is None:
            cause = self.find_cause()
            if cause is not None and cause.is_stopped:  # All ranks have agreed to end, and are about to.
                self._wait_for_exit(lambda: begin + self.policy.shutdown_seconds)
            return number
        if number == signal.SIGINT and self._is_starting():
            return signal.SIGKILL  # a SIGINT in the middle of its imports would make Python print a traceback
        if self.policy.has_heartbeat and all(beat.phase == DONE for beat in self._heartbeats.read()):
            # All ranks have trained, and are about to end.
            self._wait_for_exit(lambda: begin + self.policy.shutdown_seconds)
        if number is None or number not in REPEAT_SECONDS or not self._is_training():
            return number
        if number == signal.SIGINT:
            self.policy.notify(f"SIGINT: {SAVING_TEXT}")
        self._signal_all(number, self._live_pids())
        self._wait_for_exit(lambda: max(begin, self._last_progress()) + self.policy.save_seconds + STACK_PRINT_SECONDS)
        return signal.SIGKILL

    def _wait_for_exit(self, deadline: Callable[[], float]) -> None:
        """Wait until all ranks have ended or the deadline has passed. The deadline is read again at every poll."""
        while self._live_pids() and time.monotonic() < deadline():
            time.sleep(POLL_SECONDS)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:  # pyright: ignore[reportIncompatibleVariableOverride]
        self._check_hang()
        self._kill_waiting_ranks(self._early_exits())
        result: Any = super()._monitor_workers(worker_group)  # pyright: ignore[reportCallIssue]
        self._record_recovered()
        if result.state == WorkerState.SUCCEEDED and self._early_exits():
            result = RunResult(state=WorkerState.FAILED)
        if result.is_failed():
            self._raise_late_signal()
            self._decide_restart()
        return result

    def _raise_late_signal(self) -> None:
        """Obey a signal that came while this launcher ended the ranks: nothing is started after it."""
        if self.late_signal is not None:
            raise SignalException(f"{self.late_signal.name} came while ranks were ended", self.late_signal)

    def _check_hang(self) -> None:
        if self.policy.hang_seconds is None or self._watch.hang is not None or self._first_exit_at is not None:
            return
        pids = self._live_pids()
        beats = hang_detector.without_waits_of_stopped(self._heartbeats.read(), pids)
        overdue = self._watch.overdue_ranks(beats, min_seconds=self.policy.hang_seconds, now=time.monotonic())
        if alive := [rank for rank in overdue if rank in pids]:
            self._watch.hang = hang_detector.kill_culprits(alive, beats, pids, self._folder)

    def _early_exits(self) -> list[int]:
        """Ranks that ended with exit code 0 before their run was done."""
        if not self.policy.has_heartbeat:
            return []  # a script ends when it likes
        beats = self._heartbeats.read()
        return [rank for rank, code in self.exit_codes().items() if code == 0 and beats[rank].phase != DONE]

    def _kill_waiting_ranks(self, early_exits: Sequence[int]) -> None:
        """End the ranks that still wait for ranks that exited early, unless they end by themselves in time."""
        if not early_exits or len(early_exits) == self.num_ranks:
            return
        now = time.monotonic()
        self._first_exit_at = self._first_exit_at or now
        if now - self._first_exit_at > self.policy.shutdown_seconds:
            self._save_exit_codes()
            self._signal_all(signal.SIGKILL)

    def _save_exit_codes(self) -> None:
        """Remember the exit codes of the ranks that have ended by themselves, before the others are signalled to."""
        if not self._early_exit_codes:
            self._early_exit_codes = {rank: code for rank, code in self.exit_codes().items() if code is not None}

    def _is_starting(self) -> bool:
        return self.policy.has_heartbeat and all(beat.resumed_step < 0 for beat in self._heartbeats.read())

    def _is_training(self) -> bool:
        """Whether any rank is inside `train`, which answers a request to stop with a checkpoint."""
        return any(beat.resumed_step >= 0 and beat.phase != DONE for beat in self._heartbeats.read())

    def _last_progress(self) -> float:
        """When a rank that still runs last entered a new phase, on the monotonic clock."""
        beats = self._heartbeats.read()
        return max((beats[rank].phase_start for rank in self._live_pids()), default=0.0)

    # ---- after a fault

    def _decide_restart(self) -> None:
        """Decide whether the ranks start again; report the fault and record it."""
        cause, beats = self.find_cause(), self._heartbeats.read()
        assert cause is not None
        restarts = self._budget.allows_restart(cause, beats)
        if not restarts:
            text = "\n".join(filter(None, (cause.text, self._budget.exhausted_text(cause))))
            self.cause, self._remaining_restarts = dataclasses.replace(cause, text=text), 0
        if cause.is_stopped:
            return
        step = max(beat.step for beat in beats)
        kind = "restart" if restarts else "gave up"
        if self._watch.hang is not None and restarts:
            kind = "stopped" if self._watch.hang.is_stopped else "hung"
        fault = Fault(time=time.time(), kind=kind, step=step, rank=cause.rank, host=self._host, text=cause.summary)
        self._pending_faults.append((fault, time.monotonic()))
        if restarts:
            used = f" ({self._budget.num_used} of {self.policy.max_restarts} restarts without progress)"
            counted = used if self._budget.num_used > 1 else ""
            self.policy.notify(f"{cause.text}\nstarting again{self.policy.starts_over_text(beats)}{counted}")

    def _record_recovered(self) -> None:
        """Record the pending faults once training continues again."""
        if not self._pending_faults:
            return
        beats = self._heartbeats.read()
        if all(beat.phase == STARTING for beat in beats):
            return
        first = min(beat.phase_start for beat in beats if beat.phase != STARTING)
        self._record_faults(first)

    def _record_faults(self, recovered_at: float | None) -> None:
        for fault, begin in self._pending_faults:
            seconds = None if recovered_at is None else round(recovered_at - begin, 3)
            self.policy.record_fault(msgspec.structs.replace(fault, seconds=seconds))
        self._pending_faults = []

    def find_cause(self) -> Cause | None:
        """Why the current attempt ended, as far as its ranks have recorded it; None if no rank has failed."""
        if self._watch.hang is not None:
            return self._hang_cause(self._watch.hang)
        records = self._records()
        early_exits = self._early_exits()
        has_failed = any(entry.kind != failure_report.ENDED for entry in records.values())
        if not has_failed and not early_exits and not any(self._early_exit_codes.values()):
            return None
        codes = {rank: code for rank, code in self._early_exit_codes.items() if code or records or rank in early_exits}
        cause = failure_report.first_cause(records, codes, self._rank_names())
        if cause.signal == signal.SIGTERM and self.policy.has_heartbeat:
            # Before its first step a rank handles no signals yet, and so leaves no record.
            text = f"{cause.text}: stopped; {self.policy.resume_hint()}"
            return Cause(text, REQUEUE_EXIT_CODE, cause.rank, is_final=True, is_stopped=True)
        # The record says why the rank ended, but not that a person asked for it.
        is_training = cause.rank is not None and self._heartbeats.read()[cause.rank].resumed_step >= 0
        record = None if cause.rank is None else records.get(cause.rank)
        was_asked = record is None or record.kind == failure_report.INTERRUPTED
        if is_training and cause.exit_code in STOP_TEXTS and was_asked:
            text = f"{cause.text}: {STOP_TEXTS[cause.exit_code]}; {self.policy.resume_hint()}".removesuffix("; ")
            return dataclasses.replace(cause, text=text, is_final=True, is_stopped=True)
        return cause

    def _records(self) -> dict[int, failure_report.FailureRecord]:
        """What the ranks have recorded of their ends."""
        paths = self._pcontext_of("error_files")
        records = {rank: failure_report.load_record(Path(path)) for rank, path in paths.items()}
        return {rank: record for rank, record in records.items() if record is not None}

    def _hang_cause(self, hang: hang_detector.Hang) -> Cause:
        names = self._rank_names()
        who = " and ".join(names[rank] for rank in hang.ranks)
        has, hangs, it_was = ("has", "hangs", "it was") if len(hang.ranks) == 1 else ("have", "hang", "they were")
        why = f"{has} been stopped by a signal" if hang.is_stopped else hangs
        wait = self._heartbeats.read()[hang.ranks[0]].wait
        text = f"{who} {why}: no step in {hang.seconds:.0f} s{wait.clause}, so {it_was} killed"
        stack = f"\nit was here, innermost first\n{hang.stack}" if hang.stack else ""
        return Cause(text + stack, 1, hang.ranks[0], signal=signal.SIGKILL)

    def _rank_names(self) -> list[str]:
        names = [f"rank {rank} of {self.num_ranks}" for rank in range(self.num_ranks)]
        if not self.policy.has_heartbeat:
            return names
        steps = [beat.done_step for beat in self._heartbeats.read()]
        times = [f"after step {step}" if step > 0 else "before its first step" for step in steps]
        return [f"{name} (host {self._host}, {when})" for name, when in zip(names, times, strict=True)]

    # ---- processes

    def _pcontext_of(self, name: str) -> dict[int, Any]:
        return {} if self._pcontext is None else getattr(self._pcontext, name)

    def exit_codes(self) -> dict[int, int | None]:
        """Each rank's exit code; None while it runs."""
        return {rank: handler.proc.poll() for rank, handler in self._pcontext_of("subprocess_handlers").items()}

    def _live_pids(self) -> dict[int, int]:
        alive = [rank for rank, code in self.exit_codes().items() if code is None]
        return {rank: self._pcontext_of("subprocess_handlers")[rank].proc.pid for rank in alive}

    def _signal_all(self, number: signal.Signals, ranks: Iterable[int] | None = None) -> None:
        """Send a signal to each rank's process group.

        torch's agent makes every rank the leader of its own group. So a Ctrl-C in a terminal reaches the launcher
        only, and each rank gets it once, from here.
        """
        handlers = self._pcontext_of("subprocess_handlers")
        for rank in handlers if ranks is None else ranks:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(handlers[rank].proc.pid, number)

    def _kill_orphans(self) -> None:
        """Kill the child processes that failed ranks have left behind in their process groups."""
        if any(code != 0 for code in self.exit_codes().values()):
            self._signal_all(signal.SIGKILL)

    def clean_up(self) -> None:
        """Leave nothing behind: no process, and no fault that is not recorded."""
        self._kill_orphans()
        self._record_faults(None)


# ---- the job ---------------------------------------------------------------------------------------------------------


MONITOR_SECONDS = 0.05


@dataclasses.dataclass(frozen=True)
class JobResult:
    """How a job ended: its exit code, and the text for the user ("" if all went well).

    stop_code  0, or the exit code for a signal that came too late to change how the job ended: nothing is to follow it
    """

    exit_code: int = 0
    text: str = ""
    stop_code: int = 0


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
            result, agent = _launch(command, num_processes, policy, start_rank)
    except SignalException as stop:  # while there was no rank
        return _stopped_result(policy, num_processes, stop.sigval, has_ranks=False)
    if agent.late_signal is None:
        return result
    late = _stopped_result(policy, num_processes, agent.late_signal, has_ranks=True)
    return dataclasses.replace(result, stop_code=late.exit_code)


def _raise_signal(number: signal.Signals) -> NoReturn:
    raise SignalException(f"the launcher got {number.name}", number)


def _launch(
    command: Sequence[str], num_processes: int, policy: SupervisionPolicy, start_rank: RankStarter
) -> tuple[JobResult, Agent]:
    with temporary_folder() as folder, _silence_logging():
        run_id = uuid.uuid4().hex
        heartbeats = HeartbeatFile(folder, num_processes)
        spec = WorkerSpec(
            role="rank",
            local_world_size=num_processes,
            rdzv_handler=AgentRendezvous(run_id=run_id),
            entrypoint=sys.executable,
            # The agent expands `${local_rank}` and the like in them.
            args=("-m", WORKER_MODULE, str(os.getpid()), *(word.replace("$", "$$") for word in command)),
            max_restarts=UNLIMITED_RESTARTS,
            monitor_interval=MONITOR_SECONDS,
            local_addr=LOOPBACK,
        )
        variables = {
            **launch_variables(num_processes),
            HEARTBEAT_VARIABLE: str(heartbeats.path),
            STORE_VARIABLE: str(folder / f"store-{run_id}"),
            TORCH_SIGNALS_VARIABLE: ",".join(number.name for number in handled_signals()),
        }
        if policy.hang_seconds is not None:
            variables[hang_detector.STACKS_VARIABLE] = str(folder)
        with _extended_environment(variables), ranks_started_by(start_rank):
            agent = Agent(spec, folder=folder, heartbeats=heartbeats, policy=policy)
            return _run_agent(agent), agent


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
        agent.late_signal = number
        return JobResult()
    return _stopped_result(agent.policy, agent.num_ranks, number, has_ranks=bool(codes))


def _stopped_result(policy: SupervisionPolicy, num_ranks: int, number: signal.Signals, *, has_ranks: bool) -> JobResult:
    hint = policy.resume_hint()
    text = f"stopped by {number.name}; all {num_ranks} processes have ended{f'; {hint}' if hint else ''}"
    # A script that has begun chooses its own answer to SIGTERM, and without one has Python's code.
    is_requeued = number == signal.SIGTERM and (policy.has_heartbeat or not has_ranks)
    return JobResult(REQUEUE_EXIT_CODE if is_requeued else 128 + number, text)


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


# ---- Local rendezvous: where the agent and the ranks of a job on one host meet --------------------------------------

LOOPBACK = "127.0.0.1"


class AgentRendezvous(RendezvousHandler):
    """A rendezvous with one agent in it.

    torch's dynamic rendezvous would pickle its state through a port open to the network, and would give a restarted
    job the store of the dead one, with the addresses of dead ranks in it.
    """

    use_agent_store = False  # type: ignore[assignment]

    def __init__(self, *, run_id: str) -> None:
        self._run_id = run_id
        self._reserved_socket: socket.socket | None = None

    def next_rendezvous(self) -> RendezvousInfo:
        self.shutdown()
        # Nothing listens at this port: MASTER_PORT is for scripts that build a TCPStore of their own. It is bound, so
        # that no other job gets it; with SO_REUSEADDR the scripts can listen there all the same.
        self._reserved_socket = socket.socket()
        self._reserved_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._reserved_socket.bind((LOOPBACK, 0))
        port = self._reserved_socket.getsockname()[1]
        return RendezvousInfo(PrefixStore("agent", HashStore()), 0, 1, RendezvousStoreInfo(LOOPBACK, port))

    def get_backend(self) -> str:
        return "one-host"

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None: ...

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        if self._reserved_socket is not None:
            self._reserved_socket.close()
        return True
