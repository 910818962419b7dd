"""Speaker: rank 0's log and progress line.

Law: rank 0 alone writes and speaks; on other ranks the same calls only count.
"""

import platform
import secrets
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from fourfold.plan.plan import Plan
from fourfold.run import faults
from fourfold.run.build import TrainStep
from fourfold.run.checkpoint.keeper import TrainingProgress
from fourfold.run.faults import Fault
from fourfold.run.folder import RunDir, RunInfo, format_finished
from fourfold.run.guard import Skipped
from fourfold.run.metrics import Metrics
from fourfold.run.settings import Settings, tuned_batch_size
from fourfold.words.errors import reason
from fourfold.words.record import Line
from fourfold.words.task import Task
from fourfold.words.units import counted

WINDOW = 20  # steps over which the progress line averages


class Report(Protocol):
    """Who tells people how the run goes."""

    def start(self, text: str) -> None: ...
    def step(self, line: Line) -> None: ...
    def note(self, text: str) -> None: ...
    def finish(self, text: str) -> None: ...


@dataclass(frozen=True)
class Result:
    """How a run ended. `valid` holds "loss" and the task's own measures; `rate` is units per second over the run."""

    folder: Path | None
    steps: int
    loss: float
    valid: Mapping[str, float]
    rate: float
    seconds: float
    sample: str | None


class Speaker:
    """Rank 0's log and progress line; on other ranks it only counts."""

    def __init__(self, task: Task, settings: Settings, *, rank: int, report: Report | None) -> None:
        self.rank, self._task, self._settings, self._report = rank, task, settings, report
        self._folder: RunDir | None = None
        self._existed = False
        self._is_late = False
        self.opened = RunInfo("", "", None)
        self.place = Path()
        """The run's folder, wherever the program's working directory is later; on every rank."""
        self.rates: list[float] = []
        """The learning rates by group, which the task's schedule multiplies."""
        self.units, self._first = 0, 0
        self._recent: deque[tuple[int, Metrics]] = deque(maxlen=WINDOW)
        self._begin = time.perf_counter()
        # When each of the recent steps ended, and the step before them: reading data is part of the time.
        self._ends = deque([self._begin], maxlen=WINDOW + 1)

    @property
    def path(self) -> Path | None:
        return self._folder.path if self._folder else None

    def start(self, step: TrainStep, plan: Plan) -> None:
        """Open the run's folder, and tell every rank of it. Collective."""
        s = self._settings
        self.rates = [group["lr"] for group in step.optimizer.param_groups]
        if self.rank == 0:
            self._folder = RunDir(Path(s.folder), s.name, label=s.label, identity=s.identity())
            self.opened = RunInfo(str(self._folder.path), secrets.token_hex(4), self._folder.finished_record)
            self._existed = self._folder.log_bytes() > 0
        self.opened = RunInfo(*step.all_gather_json(self.opened)[0])
        self.place = Path(self.opened.path).absolute()
        if self._folder is None or self.opened.finished_record is not None:
            return
        rates = self._rates()
        asked = {"steps": s.steps, "batch_size": s.batch_size, "clip": s.clip, "seed": s.seed}
        asked |= {} if rates is None else {"rates": rates}
        self._folder.write_plan_and_settings(
            plan, {"task": s.label, **asked, **(s.extra or {}), "transport": step.transport_name}
        )
        parameters = sum(p.numel() for p in step.model.parameters())
        mesh = f"{plan.mesh.size} ranks" if plan.mesh.size > 1 else "1 process"
        if self._report is not None:
            self._report.start(f"{s.label} · {counted(parameters)} parameters · {mesh} · {step.transport_name}")
            if rates is not None:
                self._report.note(rates)
            for name, need in plan.ineffective_fields.items():
                self._report.note(f"{name} = {getattr(plan, name)} has no effect without {need}")
            if plan.offload == "states":
                self._report.note(told_offload(step.device.type))

    def _rates(self) -> str | None:
        """What the run makes of the optimizer's rates, where it was asked to make something of them."""
        if self._settings.rates is None:
            return None
        sizes = {"batch_size": self._settings.batch_size, "tuned": tuned_batch_size(self._task)}
        return self._settings.rates.describe(self.rates, **sizes, has_task_schedule=self._task.schedule is not None)

    def resumed(self, progress: TrainingProgress | None) -> TrainingProgress:
        """The run goes on from there. None: it begins."""
        self._begin = time.perf_counter()
        self._ends = deque([self._begin], maxlen=WINDOW + 1)
        if progress is None:
            if self._folder is not None and self._existed:
                self.note(f"{self._folder.path} has no good checkpoint: it begins again")
            return TrainingProgress()
        self._first = progress.step
        if self._folder is not None:
            self.line({"resumed": progress.step})
            self.note(f"{self._folder.path} goes on from step {progress.step} of {self._settings.steps}")
        return progress

    def ended_before(self, plan: Plan) -> Result:
        """What a run that has ended already told at its end."""
        line = self.opened.finished_record or {}
        path = Path(self.opened.path)
        if self._report is not None:
            self._report.finish(format_finished(path, line, plan))
        loss = line.get("loss")
        numbers = {name: float("nan") if value is None else value for name, value in line.get("valid", {}).items()}
        loss = float("nan") if loss is None else loss
        return Result(path, line["finished"], loss, numbers, line.get("rate", 0.0), line.get("seconds", 0.0), None)

    def line(self, record: Mapping[str, Any]) -> None:
        if self._folder is None:
            return
        error = self._folder.append_record(record)
        if error is not None and not self._is_late:
            said = f"metrics.jsonl could not be written: {reason(error)}"
            self.note(f"warning: {said}; its lines are kept, training goes on")
        self._is_late = error is not None

    def note(self, text: str) -> None:
        if self._folder is not None and self._report is not None:
            self._report.note(text)

    def fault(self, kind: str, step: int, text: str, *, rank: int | None = None) -> None:
        """Write down a fault that this rank has noticed; `rank` is one of this host's."""
        if self._folder is None:
            return
        try:
            host = None if rank is None else platform.node()
            fault = Fault(time=time.time(), kind=kind, step=step, rank=rank, host=host, text=text)
            faults.append_fault(self.place, fault)
        except OSError as error:
            self.note(f"warning: {faults.FAULTS_FILE} could not be written: {reason(error)}")

    def position(self) -> int:
        return self._folder.log_bytes() if self._folder is not None else 0

    def cut(self, position: int) -> None:
        if self._folder is not None:
            self._folder.truncate_log(position)

    def sync(self) -> None:
        if self._folder is not None:
            self._folder.sync()

    def stepped(self, number: int, metrics: Metrics, *, lr: float) -> None:
        units = metrics.tokens or metrics.samples
        self.units += units
        if self._folder is None:
            return
        record = {"step": number, "loss": metrics.loss, "samples": metrics.samples, "tokens": metrics.tokens}
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
            self._skipped(number, metrics.skipped)
            record["skipped"] = True
        self.line(record)
        self._recent.append((units, metrics))
        self._ends.append(time.perf_counter())
        if self._report is not None:
            self._report.step(self._line(number))

    def _skipped(self, number: int, skipped: Skipped) -> None:
        assert self._folder is not None
        try:
            fault = Fault(
                time=time.time(), kind="skipped step", step=number, rank=skipped.rank, host=None, text=skipped.text
            )
            faults.append_fault(self.place, fault)
        except OSError as error:  # A run is worth more than the list of its faults.
            self.note(f"warning: {faults.FAULTS_FILE} could not be written: {reason(error)}")
        self.note(f"skipped {skipped.text}")

    def _line(self, number: int) -> Line:
        seconds = max(self._ends[-1] - self._ends[0], 1e-9)
        elapsed = self._ends[-1] - self._begin
        losses = [m.loss for _, m in self._recent if m.skipped is None]
        return Line(
            step=number,
            steps=self._settings.steps,
            loss=sum(losses) / len(losses) if losses else float("nan"),
            rate=sum(units for units, _ in self._recent) / seconds,
            unit=self._task.unit,
            waiting=sum(m.waiting_seconds for _, m in self._recent) / seconds,
            seconds_left=elapsed / (number - self._first) * (self._settings.steps - number),
        )

    def evaluated(self, number: int, valid: Mapping[str, float]) -> None:
        if self._folder is None or not valid:
            return
        self.line({"step": number, "valid": dict(valid)})
        if self._report is not None and number < self._settings.steps:
            self._report.note(f"step {number}   validation {describe(valid)}")

    def finish(self, result: Result) -> None:
        if self._folder is None:
            return
        ending = {"seconds": result.seconds, "rate": result.rate, "unit": self._task.unit, "valid": dict(result.valid)}
        ending["loss"] = result.loss
        self.line({"finished": result.steps, **ending})
        if self._report is not None:
            self._report.finish(summary(result, self._task.unit, steps=result.steps - self._first))

    def close(self) -> None:
        if self._folder is not None:
            self._folder.close()


def told_offload(device: str) -> str:
    """What is said of states that are to rest in host memory."""
    if device == "cpu":
        return 'offload = "states": optimizer states are in host memory already, as all is on CPU ranks'
    return 'offload = "states": optimizer states and weights to be updated are in host memory, where the update runs'


def describe(valid: Mapping[str, float]) -> str:
    """Measures in one line: `loss 2.031   bits per byte 2.930`."""
    return "   ".join(f"{name} {value:.4f}" for name, value in valid.items())


def summary(result: Result, unit: str, *, steps: int) -> str:
    """What is said at the end of a run, whose last `steps` steps took its time."""
    rows = [(f"validation {name}" if name == "loss" else name, f"{value:.4f}") for name, value in result.valid.items()]
    rows += [("training loss", f"{result.loss:.4f}"), (f"{unit} per second", f"{result.rate:,.0f}")]
    rows += [("time", f"{result.seconds:.1f} s for {steps} steps"), ("folder", str(result.folder))]
    width = max(len(name) for name, _ in rows)
    text = "\n".join(f"{name:<{width}}   {value}" for name, value in rows)
    return text if not result.sample else f"{text}\n\nsample\n{result.sample}"
