"""Run logger: a run's log, its list of faults, its progress display, and what it says at its end.

Law: only rank 0 writes and prints; on other ranks the same calls only count.
"""

import platform
import secrets
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from fourfold.axes.pipeline.rules.edges import edge_note
from fourfold.checkpoint.manager import TrainingProgress
from fourfold.checkpoint.pretrained_files import save_pretrained_files
from fourfold.model.weights import num_parameters
from fourfold.plan.damaged_samples import DamagedRecord
from fourfold.plan.plan import Plan
from fourfold.step.step_checks import Skipped
from fourfold.step.step_runner import Metrics
from fourfold.step.train_step import TrainStep
from fourfold.trainer import fault_log
from fourfold.trainer.fault_log import Fault
from fourfold.trainer.lr_factors import tuned_batch_size
from fourfold.trainer.progress import ProgressLine
from fourfold.trainer.run_dir import RunDir, RunInfo
from fourfold.trainer.run_identity import Identity, format_finished
from fourfold.trainer.run_length import RunSettings
from fourfold.trainer.settings import recorded_settings
from fourfold.words.errors import os_error_text
from fourfold.words.measures import AVERAGED_STEPS, count_units, recent_rate, remaining_seconds, waiting_fraction
from fourfold.words.run_files import ARGUMENTS_KEY
from fourfold.words.task import Task
from fourfold.words.units import format_count

# ---- what it says at the end -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunResult:
    """How a run ended.

    loss    mean of the last steps
    valid   "loss" and the task's own measures
    units_per_second  since it has started or resumed, with evaluations and checkpoints
    sample  what the task's `sample` returned, on rank 0
    stopped  why the run ended before its last step, if a callback asked for it
    """

    folder: Path | None
    steps: int
    loss: float
    valid: Mapping[str, float]
    units_per_second: float
    seconds: float
    sample: str | None
    stopped: str | None = None


def format_offload(device: str) -> str:
    """What is printed for a plan with offload = "states"."""
    if device == "cpu":
        return 'offload = "states": optimizer states are in host memory already, as everything is on CPU ranks'
    return 'offload = "states": optimizer states and weights to be updated are in host memory, where the update runs'


def _format_metrics(valid: Mapping[str, float]) -> str:
    """Measures in one line: `loss 2.031   bits per byte 2.930`."""
    return "   ".join(f"{name} {value:.4f}" for name, value in valid.items())


def format_summary(result: RunResult, unit: str, *, steps: int) -> str:
    """What is printed at the end of a run. `steps`: those that `result.seconds` were spent on."""
    rows = [(f"validation {name}" if name == "loss" else name, f"{value:.4f}") for name, value in result.valid.items()]
    rows += [("training loss", f"{result.loss:.4f}")] if result.steps else []
    if steps:
        rows += [(f"{unit} per second", f"{result.units_per_second:,.0f}")]
        rows += [("time", f"{result.seconds:.1f} s for {steps} steps")]
    else:
        rows += [("steps", f"all {result.steps} had been done; nothing was left to train")]
    rows += [("stopped", f"after step {result.steps}, {result.stopped}")] if result.stopped is not None else []
    rows += [("folder", str(result.folder))]
    width = max(len(name) for name, _ in rows)
    text = "\n".join(f"{name:<{width}}   {value}" for name, value in rows)
    return text if not result.sample else f"{text}\n\nsample\n{result.sample}"


# ---- throughput ------------------------------------------------------------------------------------------------------


class Throughput:
    """The clock of a run on one rank. The time between two steps counts as a whole: reading, evaluating, saving too."""

    def __init__(self, unit: str) -> None:
        self.unit = unit
        """What is counted: what was asked for, or samples if the first step shows nothing else."""
        self.num_units = 0.0
        """Of all steps since `restart`."""
        self._recent_metrics: deque[tuple[float, Metrics]] = deque(maxlen=AVERAGED_STEPS)
        self.restart()

    def restart(self) -> None:
        """The run begins now, or resumes."""
        self._start_time = time.perf_counter()
        self.num_steps, self._first_end = 0, 0.0
        # Of the recent steps, and of the one before them: the time in between includes reading data.
        self._ends: deque[float] = deque(maxlen=AVERAGED_STEPS + 1)

    def add_step(self, metrics: Metrics) -> float:
        """A step has ended just now; returns what is counted of it."""
        counts = {"samples": metrics.samples, "tokens": metrics.tokens, "targets": metrics.targets}
        units, shown = count_units(self.unit, **counts)
        self.unit = self.unit if self._recent_metrics else shown
        self.num_units += units
        self._recent_metrics.append((units, metrics))
        self._ends.append(time.perf_counter() - self._start_time)
        self.num_steps += 1
        if self.num_steps == 1:
            self._first_end = self.elapsed_seconds
        return units

    @property
    def units_per_second(self) -> float:
        """Over all ranks, the mean of the last steps."""
        return recent_rate([units for units, _ in self._recent_metrics], [*self._ends])

    @property
    def elapsed_seconds(self) -> float:
        """From the start to the end of the last step."""
        return self._ends[-1]

    def progress_line(self, step: int, *, num_steps: int, loss: float) -> ProgressLine:
        """Where the run stands after `step`."""
        done, ends = self.num_steps, {"first_end": self._first_end, "last_end": self.elapsed_seconds}
        return ProgressLine(
            step=step,
            num_steps=num_steps,
            loss=loss,
            units_per_second=self.units_per_second,
            unit=self.unit,
            waiting_fraction=waiting_fraction([(m.waiting_seconds, m.seconds) for _, m in self._recent_metrics]),
            remaining_seconds=remaining_seconds(done, num_steps - step, **ends),
        )


# ---- the logger ------------------------------------------------------------------------------------------------------


class ProgressDisplay(Protocol):
    """What shows people how a run goes."""

    def start(self, text: str) -> None: ...
    def show_step(self, line: ProgressLine) -> None: ...
    def show_wait(self, text: str) -> None: ...
    def print_message(self, text: str) -> None: ...
    def finish(self, text: str) -> None: ...


class RunLogger:
    """Rank 0's log and progress display."""

    def __init__(self, task: Task, settings: RunSettings, *, rank: int, report: ProgressDisplay | None) -> None:
        self.rank, self._task, self._settings, self._report = rank, task, settings, report
        self._run_dir: RunDir | None = None
        self._has_old_log = False
        self._has_write_error = False
        self.run_info = RunInfo("", "", None)
        self.run_path = Path()
        """The run's folder as an absolute path, on every rank: a task may change the working directory."""
        self.base_lrs: list[float] = []
        """The optimizer's learning rates by group, which the schedule multiplies."""
        self.throughput = Throughput(task.unit)
        self.settings_record: Mapping[str, Any] = {}
        """The settings as settings.json has them, on rank 0."""
        self._new_faults: list[Fault] = []

    @property
    def path(self) -> Path | None:
        """The run's folder as the user named it; None on ranks other than 0."""
        return self._run_dir.path if self._run_dir else None

    def open_run_dir(self, step: TrainStep, plan: Plan, identity: Identity, callbacks: Sequence[str] = ()) -> None:
        """Open the run's folder, and send its path to every rank. Collective.

        identity   of the settings as given
        callbacks  their names
        """
        settings = self._settings
        self.base_lrs = [group["lr"] for group in step.optimizer.param_groups]
        if self.rank == 0:
            self._run_dir = RunDir(
                Path(settings.folder), settings.name, run_prefix=settings.run_prefix, identity=identity
            )
            self.run_info = RunInfo(str(self._run_dir.path), secrets.token_hex(4), self._run_dir.finished_record)
            self._has_old_log = self._run_dir.log_bytes() > 0
        self.run_info = RunInfo(*step.all_gather_json(self.run_info)[0])
        self.run_path = Path(self.run_info.path).absolute()
        if self._run_dir is None or self.run_info.finished_record is not None:
            return
        rates = self._describe_lr()
        record = {**recorded_settings(settings), "name": self._run_dir.path.name, "tensor": dict(self._task.tensor)}
        record |= {"callbacks": list(callbacks), "unit": self._task.unit}
        record |= {} if rates is None else {"rates": rates}
        record["transport"] = step.transport_name
        arguments = {**(settings.argument_defaults or {}), **(settings.extra_settings or {})}
        record |= {ARGUMENTS_KEY: arguments} if arguments else {}
        self.settings_record = {"task": settings.run_prefix, **record}
        self._run_dir.write_plan_and_settings(plan, self.settings_record, config_text=settings.config_text)
        if self._report is not None:
            self._show_start(self._report, step, plan, rates)
        if failure := save_pretrained_files(self.run_path, step.model, self._task.tokenizer):
            self.log_message(f"warning: {failure}")

    def _show_start(self, report: ProgressDisplay, step: TrainStep, plan: Plan, rates: str | None) -> None:
        parameters = format_count(num_parameters(step.pipeline.skeleton, step.tensor_shards))
        mesh = f"{plan.mesh.size} ranks" if plan.mesh.size > 1 else "1 process"
        report.start(f"{self._settings.run_prefix} · {parameters} parameters · {mesh} · {step.transport_name}")
        if rates is not None:
            report.print_message(rates)
        for name, need in plan.ineffective_fields.items():
            report.print_message(f"{name} = {getattr(plan, name)} has no effect without {need}")
        if note := edge_note(plan.edge_spec):
            report.print_message(note)
        if plan.offload == "states":
            report.print_message(format_offload(step.device.type))

    def _describe_lr(self) -> str | None:
        """How the run's `rates` change the optimizer's learning rates; None without `rates`."""
        if self._settings.rates is None:
            return None
        return self._settings.rates.describe(
            self.base_lrs,
            batch_size=self._settings.batch_size,
            tuned_batch_size=tuned_batch_size(self._task),
            has_task_schedule=self._task.schedule is not None or self._task.scheduler is not None,
        )

    def log_resumed(self, progress: TrainingProgress | None) -> TrainingProgress:
        """Log that the run resumes from `progress`, or begins if that is None; returns where it starts."""
        self.throughput.restart()
        if progress is None:
            if self._run_dir is not None and self._has_old_log:
                self.log_message(f"{self._run_dir.path} has no valid checkpoint: it starts over")
            return TrainingProgress()
        if self._run_dir is not None:
            self.write_record({"resumed": progress.step})
            self.log_message(f"{self._run_dir.path} resumes from step {progress.step} of {self._settings.steps}")
        return progress

    def finished_result(self, plan: Plan) -> RunResult:
        """The result of a run that had finished before, read from the last line of its log."""
        record = self.run_info.finished_record or {}
        path = Path(self.run_info.path)
        if self._report is not None:
            self._report.finish(format_finished(path, record, plan))
        valid = {name: _none_to_nan(value) for name, value in record.get("valid", {}).items()}
        rate, seconds, stopped = record.get("rate", 0.0), record.get("seconds", 0.0), record.get("stopped")
        return RunResult(
            path, record["finished"], _none_to_nan(record.get("loss")), valid, rate, seconds, None, stopped
        )

    def write_record(self, record: Mapping[str, Any]) -> None:
        """Append a line to the log; a message says once that the disk does not take it."""
        if self._run_dir is None:
            return
        error = self._run_dir.append_record(record)
        if error is not None and not self._has_write_error:
            reason = f"metrics.jsonl could not be written: {os_error_text(error)}"
            self.log_message(f"warning: {reason}; its lines are kept; training continues")
        self._has_write_error = error is not None

    def log_message(self, text: str) -> None:
        if self._run_dir is not None and self._report is not None:
            self._report.print_message(text)

    def record_fault(self, kind: str, step: int, text: str, *, rank: int | None = None) -> None:
        """Append a fault that this rank has noticed; `rank` is a rank of this host."""
        host = None if rank is None else platform.node()
        self._append_fault(Fault(time=time.time(), kind=kind, step=step, rank=rank, host=host, text=text))

    def _append_fault(self, fault: Fault) -> None:
        if self._run_dir is None:
            return
        self._new_faults.append(fault)
        try:
            fault_log.append_fault(self.run_path, fault)
        except OSError as error:  # training must not end because a fault cannot be listed
            self.log_message(f"warning: {fault_log.FAULTS_FILE} could not be written: {os_error_text(error)}")

    def take_faults(self) -> list[Fault]:
        """The faults since the last call, on rank 0."""
        faults, self._new_faults = self._new_faults, []
        return faults

    def log_bytes(self) -> int:
        return self._run_dir.log_bytes() if self._run_dir is not None else 0

    def truncate_log(self, num_bytes: int) -> None:
        if self._run_dir is not None:
            self._run_dir.truncate_log(num_bytes)

    def sync(self) -> None:
        if self._run_dir is not None:
            self._run_dir.sync()

    def log_step(self, step_number: int, metrics: Metrics, *, lr: float, loss: float) -> None:
        """Write a step's line, and show the progress. Other ranks count what throughput is of.

        loss  the mean of the last steps
        """
        asked, units, unit = self.throughput.unit, self.throughput.add_step(metrics), self.throughput.unit
        if self._run_dir is None:
            return
        if unit != asked:
            shown = "no targets or labels" if metrics.targets is None else "one target a sample, and no input_ids"
            self.log_message(f"throughput is in {unit}, not in {asked}: the batch shows {shown}")
        record: dict[str, Any] = {
            "step": step_number,
            "loss": metrics.loss,
            "samples": metrics.samples,
            "tokens": metrics.tokens,
            "units": units,
            "unit": unit,
            "grad_norm": metrics.grad_norm,
            "lr": float(lr),
            "elapsed_seconds": self.throughput.elapsed_seconds,
            "seconds": metrics.seconds,
            "waiting_seconds": metrics.waiting_seconds,
            "data_seconds": metrics.data_seconds,
            "sent_bytes": metrics.sent_bytes,
        }
        if metrics.loss_scale is not None:
            record["loss_scale"] = metrics.loss_scale
        if metrics.overflowed:
            record["overflowed"] = True
        if metrics.out_of_turn:
            record["out_of_turn"] = metrics.out_of_turn
        if metrics.skipped is not None:
            self._log_skipped(step_number, metrics.skipped)
            record["skipped"] = True
        self.write_record(record)
        if self._report is not None:
            line = self.throughput.progress_line(step_number, num_steps=self._settings.steps, loss=loss)
            self._report.show_step(line)

    @property
    def shows_progress(self) -> bool:
        return self._run_dir is not None and self._report is not None

    def show_wait(self, text: str) -> None:
        """Show what the run waits for. Called by a thread of its own."""
        if self._report is not None:
            self._report.show_wait(text)

    def _log_skipped(self, step_number: int, skipped: Skipped) -> None:
        kind, rank, text = "skipped step", skipped.rank, skipped.text
        self._append_fault(Fault(time=time.time(), kind=kind, step=step_number, rank=rank, host=None, text=text))
        self.log_message(f"skipped {text}")

    def record_damaged(self, step_number: int, record: DamagedRecord) -> None:
        """Append a damaged sample to the faults: after which step it was found missing, or in which one."""
        self.record_fault("damaged sample", step_number, str(record))
        self.log_message(f"step {step_number}: {record}; it is left out")

    def log_validation(self, step_number: int, valid: Mapping[str, float]) -> None:
        if self._run_dir is None or not valid:
            return
        self.write_record({"step": step_number, "valid": dict(valid)})
        if self._report is not None and step_number < self._settings.steps:
            self._report.print_message(f"step {step_number}   validation {_format_metrics(valid)}")

    def finish(self, result: RunResult) -> None:
        """Write the log's last line, and show the summary."""
        if self._run_dir is None:
            return
        record = {
            "finished": result.steps,
            "seconds": result.seconds,
            "rate": result.units_per_second,
            "unit": self.throughput.unit,
            "valid": dict(result.valid),
            "loss": result.loss,
        }
        if result.stopped is not None:
            record["stopped"] = result.stopped
        self.write_record(record)
        if self._report is not None:
            self._report.finish(format_summary(result, self.throughput.unit, steps=self.throughput.num_steps))

    def close(self) -> None:
        if self._run_dir is not None:
            self._run_dir.close()


def _none_to_nan(value: float | None) -> float:
    """JSON has null where a number was not finite."""
    return float("nan") if value is None else value
