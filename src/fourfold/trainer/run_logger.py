"""Speaker: rank 0's log and progress line.

Law: rank 0 alone writes and speaks; on other ranks the same calls only count.
"""

import platform
import secrets
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from fourfold.checkpoint.manager import TrainingProgress
from fourfold.plan.plan import Plan
from fourfold.step.build import TrainStep
from fourfold.step.metrics import Metrics
from fourfold.step.nan_guard import Skipped
from fourfold.trainer import fault_log
from fourfold.trainer.fault_log import Fault
from fourfold.trainer.lr_factors import tuned_batch_size
from fourfold.trainer.run_dir import RunDir, RunInfo
from fourfold.trainer.run_identity import format_finished
from fourfold.trainer.settings import Settings
from fourfold.trainer.summary import RunResult, format_metrics, format_offload, format_summary
from fourfold.words.errors import os_error_text
from fourfold.words.progress import ProgressLine
from fourfold.words.task import Task
from fourfold.words.units import format_count

AVERAGED_STEPS = 20  # steps over which the progress line averages


class ProgressDisplay(Protocol):
    """Who tells people how the run goes."""

    def start(self, text: str) -> None: ...
    def show_step(self, line: ProgressLine) -> None: ...
    def print_message(self, text: str) -> None: ...
    def finish(self, text: str) -> None: ...


class RunLogger:
    """Rank 0's log and progress line; on other ranks it only counts."""

    def __init__(self, task: Task, settings: Settings, *, rank: int, report: ProgressDisplay | None) -> None:
        self.rank, self._task, self._settings, self._report = rank, task, settings, report
        self._run_dir: RunDir | None = None
        self._has_old_log = False
        self._has_write_error = False
        self.run_info = RunInfo("", "", None)
        self.run_path = Path()
        """The run's folder, wherever the program's working directory is later; on every rank."""
        self.base_lrs: list[float] = []
        """The learning rates by group, which the task's schedule multiplies."""
        self.num_units, self._first_step = 0, 0
        self._recent_metrics: deque[tuple[int, Metrics]] = deque(maxlen=AVERAGED_STEPS)
        self._start_time = time.perf_counter()
        # When each of the recent steps ended, and the step before them: reading data is part of the time.
        self._step_end_times = deque([self._start_time], maxlen=AVERAGED_STEPS + 1)

    @property
    def path(self) -> Path | None:
        return self._run_dir.path if self._run_dir else None

    def open_run_dir(self, step: TrainStep, plan: Plan) -> None:
        """Open the run's folder, and tell every rank of it. Collective."""
        s = self._settings
        self.base_lrs = [group["lr"] for group in step.optimizer.param_groups]
        if self.rank == 0:
            self._run_dir = RunDir(Path(s.folder), s.name, label=s.label, identity=s.identity())
            self.run_info = RunInfo(str(self._run_dir.path), secrets.token_hex(4), self._run_dir.finished_record)
            self._has_old_log = self._run_dir.log_bytes() > 0
        self.run_info = RunInfo(*step.all_gather_json(self.run_info)[0])
        self.run_path = Path(self.run_info.path).absolute()
        if self._run_dir is None or self.run_info.finished_record is not None:
            return
        rates = self._describe_lr()
        asked = {"steps": s.steps, "batch_size": s.batch_size, "clip": s.clip, "seed": s.seed}
        asked |= {} if rates is None else {"rates": rates}
        self._run_dir.write_plan_and_settings(
            plan, {"task": s.label, **asked, **(s.extra or {}), "transport": step.transport_name}
        )
        parameters = sum(p.numel() for p in step.model.parameters())
        mesh = f"{plan.mesh.size} ranks" if plan.mesh.size > 1 else "1 process"
        if self._report is not None:
            self._report.start(f"{s.label} · {format_count(parameters)} parameters · {mesh} · {step.transport_name}")
            if rates is not None:
                self._report.print_message(rates)
            for name, need in plan.ineffective_fields.items():
                self._report.print_message(f"{name} = {getattr(plan, name)} has no effect without {need}")
            if plan.offload == "states":
                self._report.print_message(format_offload(step.device.type))

    def _describe_lr(self) -> str | None:
        """What the run makes of the optimizer's rates, where it was asked to make something of them."""
        if self._settings.rates is None:
            return None
        sizes = {"batch_size": self._settings.batch_size, "tuned": tuned_batch_size(self._task)}
        return self._settings.rates.describe(self.base_lrs, **sizes, has_task_schedule=self._task.schedule is not None)

    def log_resumed(self, progress: TrainingProgress | None) -> TrainingProgress:
        """The run goes on from there. None: it begins."""
        self._start_time = time.perf_counter()
        self._step_end_times = deque([self._start_time], maxlen=AVERAGED_STEPS + 1)
        if progress is None:
            if self._run_dir is not None and self._has_old_log:
                self.log_message(f"{self._run_dir.path} has no good checkpoint: it begins again")
            return TrainingProgress()
        self._first_step = progress.step
        if self._run_dir is not None:
            self.write_record({"resumed": progress.step})
            self.log_message(f"{self._run_dir.path} goes on from step {progress.step} of {self._settings.steps}")
        return progress

    def finished_result(self, plan: Plan) -> RunResult:
        """What a run that has ended already told at its end."""
        line = self.run_info.finished_record or {}
        path = Path(self.run_info.path)
        if self._report is not None:
            self._report.finish(format_finished(path, line, plan))
        loss = line.get("loss")
        numbers = {name: float("nan") if value is None else value for name, value in line.get("valid", {}).items()}
        loss = float("nan") if loss is None else loss
        return RunResult(path, line["finished"], loss, numbers, line.get("rate", 0.0), line.get("seconds", 0.0), None)

    def write_record(self, record: Mapping[str, Any]) -> None:
        if self._run_dir is None:
            return
        error = self._run_dir.append_record(record)
        if error is not None and not self._has_write_error:
            said = f"metrics.jsonl could not be written: {os_error_text(error)}"
            self.log_message(f"warning: {said}; its lines are kept, training goes on")
        self._has_write_error = error is not None

    def log_message(self, text: str) -> None:
        if self._run_dir is not None and self._report is not None:
            self._report.print_message(text)

    def record_fault(self, kind: str, step: int, text: str, *, rank: int | None = None) -> None:
        """Write down a fault that this rank has noticed; `rank` is one of this host's."""
        if self._run_dir is None:
            return
        try:
            host = None if rank is None else platform.node()
            fault = Fault(time=time.time(), kind=kind, step=step, rank=rank, host=host, text=text)
            fault_log.append_fault(self.run_path, fault)
        except OSError as error:
            self.log_message(f"warning: {fault_log.FAULTS_FILE} could not be written: {os_error_text(error)}")

    def log_bytes(self) -> int:
        return self._run_dir.log_bytes() if self._run_dir is not None else 0

    def truncate_log(self, num_bytes: int) -> None:
        if self._run_dir is not None:
            self._run_dir.truncate_log(num_bytes)

    def sync(self) -> None:
        if self._run_dir is not None:
            self._run_dir.sync()

    def log_step(self, step_number: int, metrics: Metrics, *, lr: float) -> None:
        units = metrics.tokens or metrics.samples
        self.num_units += units
        if self._run_dir is None:
            return
        record = {"step": step_number, "loss": metrics.loss, "samples": metrics.samples, "tokens": metrics.tokens}
        times = {
            "seconds": metrics.seconds,
            "waiting_seconds": metrics.waiting_seconds,
            "sent_bytes": metrics.sent_bytes,
        }
        record |= {"grad_norm": metrics.grad_norm, "lr": float(lr), **times}
        if metrics.loss_scale is not None:
            record["loss_scale"] = metrics.loss_scale
        if metrics.overflowed:
            record["overflowed"] = True
        if metrics.skipped is not None:
            self._log_skipped(step_number, metrics.skipped)
            record["skipped"] = True
        self.write_record(record)
        self._recent_metrics.append((units, metrics))
        self._step_end_times.append(time.perf_counter())
        if self._report is not None:
            self._report.show_step(self._progress_line(step_number))

    def _log_skipped(self, number: int, skipped: Skipped) -> None:
        assert self._run_dir is not None
        try:
            fault = Fault(
                time=time.time(), kind="skipped step", step=number, rank=skipped.rank, host=None, text=skipped.text
            )
            fault_log.append_fault(self.run_path, fault)
        except OSError as error:  # A run is worth more than the list of its faults.
            self.log_message(f"warning: {fault_log.FAULTS_FILE} could not be written: {os_error_text(error)}")
        self.log_message(f"skipped {skipped.text}")

    def _progress_line(self, number: int) -> ProgressLine:
        seconds = max(self._step_end_times[-1] - self._step_end_times[0], 1e-9)
        elapsed = self._step_end_times[-1] - self._start_time
        losses = [m.loss for _, m in self._recent_metrics if m.skipped is None]
        return ProgressLine(
            step=number,
            num_steps=self._settings.steps,
            loss=sum(losses) / len(losses) if losses else float("nan"),
            units_per_second=sum(units for units, _ in self._recent_metrics) / seconds,
            unit=self._task.unit,
            waiting_fraction=sum(m.waiting_seconds for _, m in self._recent_metrics) / seconds,
            remaining_seconds=elapsed / (number - self._first_step) * (self._settings.steps - number),
        )

    def log_validation(self, step_number: int, valid: Mapping[str, float]) -> None:
        if self._run_dir is None or not valid:
            return
        self.write_record({"step": step_number, "valid": dict(valid)})
        if self._report is not None and step_number < self._settings.steps:
            self._report.print_message(f"step {step_number}   validation {format_metrics(valid)}")

    def finish(self, result: RunResult) -> None:
        if self._run_dir is None:
            return
        ending = {
            "seconds": result.seconds,
            "rate": result.units_per_second,
            "unit": self._task.unit,
            "valid": dict(result.valid),
        }
        ending["loss"] = result.loss
        self.write_record({"finished": result.steps, **ending})
        if self._report is not None:
            self._report.finish(format_summary(result, self._task.unit, steps=result.steps - self._first_step))

    def close(self) -> None:
        if self._run_dir is not None:
            self._run_dir.close()
