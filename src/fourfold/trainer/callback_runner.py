"""Callback runner: calls the hooks of a run's callbacks, and switches off a callback that fails.

Law: what a callback does wrong never changes the training: an exception is reported with the callback and the hook, and
that callback is not called again.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec

from fourfold.checkpoint.manager import TrainingProgress
from fourfold.checkpoint.writer import WrittenCheckpoint
from fourfold.environment.known_waits import waiting_for
from fourfold.model.weights import num_parameters
from fourfold.plan.plan_fields import FIELDS
from fourfold.step.step_runner import Metrics
from fourfold.step.train_step import TrainStep
from fourfold.trainer.callbacks.registry import unique_names
from fourfold.trainer.heartbeat import Heartbeat
from fourfold.trainer.run_length import RunSettings
from fourfold.trainer.run_logger import RunLogger, RunResult
from fourfold.words.callback import (
    Callback,
    CheckpointEvent,
    EndEvent,
    EndStatus,
    EvaluateEvent,
    FaultEvent,
    StartEvent,
    StepEvent,
)
from fourfold.words.error_notes import error_line
from fourfold.words.errors import FourfoldError, StoppedError

MAX_STATE_BYTES = 2**20  # of one callback, in a manifest
CALLBACK_FAILED = "callback failed"


class CallbackRunner:
    """The callbacks of a run. On ranks other than 0 there are none, whatever they were given."""

    def __init__(self, callbacks: Sequence[Callback], logger: RunLogger, heartbeat: Heartbeat) -> None:
        self._logger, self._heartbeat = logger, heartbeat
        self._active = dict(zip(unique_names(callbacks), callbacks, strict=True)) if logger.rank == 0 else {}
        self._last_step, self._is_running = -1, False

    @property
    def stop_reason(self) -> str | None:
        """Why a callback wants the run to stop; None if none does, and on ranks other than 0."""
        stopping = ((name, each.stop_reason) for name, each in self._active.items())
        return next((f"{name}: {reason}" for name, reason in stopping if reason is not None), None)

    # ---- the state in a checkpoint

    def state_dicts(self) -> dict[str, dict[str, Any]]:
        """The states of the callbacks that have one, as JSON values."""
        states = {}
        for name, each in list(self._active.items()):
            with self._switching_off(name, "state_dict"):
                encoded = msgspec.json.encode(each.state_dict())
                state = msgspec.json.decode(encoded, type=dict[str, Any])
                if len(encoded) > MAX_STATE_BYTES:
                    raise ValueError(f"a state of {len(encoded):,} bytes, where {MAX_STATE_BYTES:,} are allowed")
                states |= {name: state} if state else {}
        return states

    # ---- hooks

    def start(self, step: TrainStep, settings: RunSettings, progress: TrainingProgress) -> None:
        """The first step is about to begin, after `progress`."""
        if not self._active:
            return
        self._last_step, self._is_running = progress.step, True
        for name, each in list(self._active.items()):
            if name in progress.callbacks:
                with self._switching_off(name, "load_state_dict"):
                    each.load_state_dict(progress.callbacks[name])
        event = StartEvent(
            folder=self._logger.run_path,
            name=self._logger.run_path.name,
            task=settings.task_name or settings.run_prefix,
            num_parameters=num_parameters(step.pipeline.skeleton, step.tensor_shards),
            num_ranks=step.plan.mesh.size,
            steps=settings.steps,
            batch_size=settings.batch_size,
            step=progress.step,
            settings=_read_only(self._logger.settings_record),
            plan=_read_only({name: getattr(step.plan, name) for name in FIELDS}),
        )
        self._call("on_start", event)

    def step(self, step_number: int, metrics: Metrics, *, lr: float) -> None:
        """A step is done."""
        self._last_step = step_number
        if not self._active:
            return
        event = StepEvent(
            step=step_number,
            loss=metrics.loss,
            grad_norm=metrics.grad_norm,
            lr=float(lr),
            samples=metrics.samples,
            tokens=metrics.tokens,
            seconds=metrics.seconds,
            waiting_seconds=metrics.waiting_seconds,
            units_per_second=self._logger.throughput.units_per_second,
            unit=self._logger.throughput.unit,
            skipped=metrics.skipped is not None,
            data_seconds=metrics.data_seconds,
        )
        # Not within a pause: the time of a step is to include what callbacks take of it.
        self._call_all("on_step", event)
        self._deliver_faults()

    def evaluate(self, progress: TrainingProgress, *, is_best: bool) -> None:
        """An evaluation is done."""
        self._call(
            "on_evaluate", EvaluateEvent(step=progress.step, metrics=_read_only(progress.valid), is_best=is_best)
        )

    def checkpoints(self, written: Sequence[WrittenCheckpoint]) -> None:
        """Checkpoints are on the disk."""
        for step, path, valid in written:
            metrics = {name: float("nan") if value is None else value for name, value in valid.items()}
            self._call("on_checkpoint", CheckpointEvent(step=step, path=path, metrics=_read_only(metrics)))

    def end(self, result: RunResult) -> None:
        """The run has ended well."""
        self._end(
            EndEvent(
                status="finished" if result.stopped is None else "stopped",
                text=result.stopped or "",
                step=result.steps,
                loss=result.loss,
                metrics=_read_only(result.valid),
                seconds=result.seconds,
                units_per_second=result.units_per_second,
                sample=result.sample,
            )
        )

    @contextlib.contextmanager
    def ended_by_errors(self) -> Iterator[None]:
        """Within: an exception that ends the run is a fault, and the end of the run for the callbacks too."""
        try:
            yield
        except BaseException as error:
            terminated = isinstance(error, StoppedError | KeyboardInterrupt)
            status: EndStatus = "terminated" if terminated else "failed"
            text = str(error) if isinstance(error, FourfoldError) else f"{type(error).__name__}: {error}"
            with contextlib.suppress(KeyboardInterrupt):  # a second Ctrl-C must not hide why the run ended
                self._deliver_faults()
                if status == "failed" and self._is_running:
                    self._call("on_fault", FaultEvent(step=self._last_step, kind="failed", text=text))
                self._end(EndEvent(status=status, text=text, step=self._last_step, metrics=_read_only({})))
            raise

    def _end(self, event: EndEvent) -> None:
        if self._is_running:
            self._is_running = False
            self._call("on_end", event)

    # ---- calling

    def _call(self, hook: str, event: Any) -> None:
        if self._active:
            with self._heartbeat.pause():
                self._call_all(hook, event)
        self._deliver_faults()

    def _call_all(self, hook: str, event: Any) -> None:
        for name, each in list(self._active.items()):
            # The other ranks wait for this one. The exception is `on_step`, which is to be short.
            wait = contextlib.nullcontext() if hook == "on_step" else waiting_for(f"{hook} of callback {name}")
            with wait, self._switching_off(name, hook):
                getattr(each, hook)(event)

    def _deliver_faults(self) -> None:
        """Faults since the last call. A callback that fails here is a fault too, until none is left to fail."""
        while faults := self._logger.take_faults():
            for fault in faults:
                event = FaultEvent(step=fault.step, kind=fault.kind, text=fault.text, rank=fault.rank)
                self._call_all("on_fault", event)

    @contextlib.contextmanager
    def _switching_off(self, name: str, hook: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            del self._active[name]
            text = f"callback {name} failed in {hook}: {error_line(error)}"
            self._logger.log_message(f"warning: {text}; it is switched off; training continues")
            self._logger.write_record({"warning": text})
            self._logger.record_fault(CALLBACK_FAILED, self._last_step, text)


def _read_only(values: Mapping[str, Any]) -> Mapping[str, Any]:
    return MappingProxyType(dict(values))
