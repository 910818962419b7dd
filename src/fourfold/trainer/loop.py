"""Training loop: the steps of a run, with its evaluations and checkpoints, and its end.

Law: every rank does the same steps, evaluations and saves; local steps evaluate and save only at synchronized steps. A
run has finished only when its last step is saved: until the disk has it, it holds its result in memory; all ranks try
again, give up and write the weights together.
"""

import contextlib
import math
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from fourfold.checkpoint.collect import TrainingState
from fourfold.checkpoint.manager import CheckpointManager, TrainingProgress
from fourfold.environment.known_waits import waiting_for
from fourfold.feed.data_input import DataInput
from fourfold.feed.feed import Feed
from fourfold.plan.damaged_samples import DamagedRecord, new_records, too_many_problem
from fourfold.plan.intervals import is_due
from fourfold.plan.lr_schedule import LRLambda
from fourfold.step.step_runner import Metrics
from fourfold.trainer.callback_runner import CallbackRunner
from fourfold.trainer.evaluate import evaluate
from fourfold.trainer.heartbeat import Heartbeat
from fourfold.trainer.lr_factors import lr_factors
from fourfold.trainer.memory_log import FIRST_MEASURED_STEP, MemoryLog
from fourfold.trainer.meters import DataMeter, StragglerDetector
from fourfold.trainer.run_length import RunSettings
from fourfold.trainer.run_logger import RunLogger, RunResult
from fourfold.trainer.tracer import Tracer
from fourfold.words.error_notes import describe_function, has_note, noting
from fourfold.words.errors import (
    INTERRUPT_EXIT_CODE,
    DataError,
    FourfoldError,
    Problem,
    StoppedError,
    TaskError,
    TrainingError,
)
from fourfold.words.measures import AVERAGED_STEPS, is_better, training_loss
from fourfold.words.task import Task
from fourfold.words.units import format_bytes

RETRY_SECONDS = 5.0


@dataclass(frozen=True)
class TrainingLoop:
    """What the steps of a run work on. `stop_signal` returns the stop signal this rank has received, or 0."""

    task: Task
    state: TrainingState
    settings: RunSettings
    logger: RunLogger
    checkpoints: CheckpointManager
    tracer: Tracer
    valid: DataInput | None
    heartbeat: Heartbeat
    memory: MemoryLog
    callbacks: CallbackRunner
    stop_signal: Callable[[], int]

    def run_steps(self, progress: TrainingProgress) -> TrainingProgress:
        """Train from `progress` to the last step, or to the one after which a callback wants to stop.

        Raises StoppedError if any rank has received a stop signal.
        """
        feed = self._feed
        feed.check_peers = self.state.step.check_peers
        # End the prefetch thread here, however the steps end: at interpreter exit it would abort the process inside
        # torch.
        with contextlib.closing(feed.repeat()) as batches:
            return self._run_steps(progress, batches)

    def _run_steps(self, progress: TrainingProgress, batches: Iterator[Any]) -> TrainingProgress:
        step, settings = self.state.step, self.settings
        last, period = settings.steps, step.plan.sync_interval
        stragglers, meter = StragglerDetector(step, self.logger), DataMeter(step, self._feed, self.logger)
        lr_factor = lr_factors(self.task, steps=last, batch_size=settings.batch_size, rates=settings.rates)
        losses = list(progress.losses)
        progress = self._evaluate_if_missed(progress, period)
        if progress.step:  # before its first step a run has nothing to save
            progress = self._agree_on_stop(progress)
        while progress.step < last and progress.stopped is None:
            number = progress.step
            if lr_factor is not None:
                self._set_lr(lr_factor, number)
            metrics = self._train_step(number + 1, batches, meter)
            lr = step.optimizer.param_groups[0]["lr"]
            if self.state.scheduler is not None:
                self.state.scheduler.step_done()
            if metrics.skipped is None:
                losses = [*losses, metrics.loss][-AVERAGED_STEPS:]
            self._update_average(number + 1, metrics, period)
            stragglers.step_done(number + 1, metrics.data_seconds)
            self.logger.log_step(number + 1, metrics, lr=lr, loss=training_loss(losses))
            self.callbacks.step(number + 1, metrics, lr=lr)
            self.heartbeat.beat(number + 1)
            self._report_checkpoints()
            meter.step_done(number + 1, metrics)
            if number + 1 == FIRST_MEASURED_STEP:
                self.memory.log(number + 1)
            damaged = self._add_damaged(progress, number + 1, metrics.damaged)
            progress = TrainingProgress(number + 1, losses, {}, progress.best, damaged=damaged)
            if progress.step < last and step.is_synchronized:
                if step.stop_requested:
                    meter.end_segment()
                    progress = self._stop(progress, self.stop_signal())
                if progress.stopped is None:
                    progress = self._evaluate_and_save_if_due(progress, period)
        meter.end_segment()
        return progress

    def _train_step(self, number: int, batches: Iterator[Any], meter: DataMeter) -> Metrics:
        """Read the batch of step `number`, and train with it. An error of the user's code has a note with both."""
        step, batch = self.state.step, None
        try:
            with self.tracer.sample(number) as recorder:
                with recorder.reading():
                    batch = next(batches)
                meter.batch_read(batch)
                step.request_stop(self.stop_signal() > 0 or self.callbacks.stop_reason is not None)
                return step(batch)
        except Exception as error:
            if not isinstance(error, FourfoldError):
                samples = getattr(batch, "samples", None)
                names = "" if samples is None or has_note(error) else f", with {self._feed.sample_names(samples)}"
                error.add_note(f"in step {number}{names}")
            raise

    @property
    def _feed(self) -> Feed:
        assert self.state.feed is not None
        return self.state.feed

    def _add_damaged(
        self, progress: TrainingProgress, step_number: int, found: Sequence[DamagedRecord]
    ) -> tuple[DamagedRecord, ...]:
        """The run's damaged samples, with those that a step or an evaluation has left out.

        Raises DataError, on every rank, if they are more than the settings allow.
        """
        new = new_records(progress.damaged, found)
        for record in new:
            self.logger.record_damaged(step_number, record)
        damaged, limit = progress.damaged + new, self.settings.bad_samples
        problem = too_many_problem(damaged, limit) if new else None
        if problem is not None:
            raise DataError(problem, where=f"the data of step {step_number}")
        return damaged

    def _report_checkpoints(self) -> None:
        self.checkpoints.report_failures()
        self.callbacks.checkpoints(self.checkpoints.take_written())

    def _agree_on_stop(self, progress: TrainingProgress) -> TrainingProgress:
        """`progress`, with why rank 0's callbacks want to stop here, if they do. Collective."""
        return progress._replace(stopped=self.state.step.all_gather_json(self.callbacks.stop_reason)[0])

    def _stop(self, progress: TrainingProgress, signal_number: int) -> TrainingProgress:
        """What a requested stop leads to: StoppedError if any rank has received a signal. Collective."""
        if any(self.state.step.all_gather_json(signal_number)):
            self.save_and_stop(progress, signal_number)
        return self._agree_on_stop(progress)

    def _set_lr(self, lr_factor: LRLambda, number: int) -> None:
        factor = _check_lr_factor(lr_factor(number), number)
        if self.state.scheduler is not None:
            self.state.scheduler.scale(factor)
            return
        for group, lr in zip(self.state.step.optimizer.param_groups, self.logger.base_lrs, strict=True):
            group["lr"] = lr * factor

    def _update_average(self, step_number: int, metrics: Metrics, period: int) -> None:
        step, average = self.state.step, self.state.ema
        # With local steps, a skipped step may still be the one that synchronizes the weights of the steps before it.
        if average is not None and step.is_synchronized and (metrics.skipped is None or period > 1):
            step.flush()
            average.update(step_number // period)

    def _evaluate_and_save_if_due(self, progress: TrainingProgress, period: int) -> TrainingProgress:
        every, best = self.settings.checkpoint_every, progress.best
        if is_due(progress.step, self.settings.evaluate_every or 0, period):
            progress = self._agree_on_stop(self.evaluate(progress))
            self.memory.log(progress.step)
        if every and (is_due(progress.step, every, period) or progress.best != best):
            self._save(progress)
        return progress

    def _evaluate_if_missed(self, progress: TrainingProgress, period: int) -> TrainingProgress:
        """At a resume, do an evaluation that was due at the saved step: a run that is asked to stop leaves it out."""
        is_due_here = 0 < progress.step < self.settings.steps and is_due(
            progress.step, self.settings.evaluate_every or 0, period
        )
        return self.evaluate(progress) if is_due_here and not progress.valid else progress

    def _save(self, progress: TrainingProgress) -> None:
        with self.heartbeat.pause():
            self.checkpoints.save(progress._replace(callbacks=self.callbacks.state_dicts()))
        self._report_checkpoints()

    def save_and_stop(self, progress: TrainingProgress, signal_number: int, weights: Path | None = None) -> NoReturn:
        """Save, and raise StoppedError. Collective. `signal_number`: what this rank has received, or 0."""
        with self.heartbeat.pause():
            if self.settings.checkpoint_every and self.checkpoints.saved_step != progress.step:
                self._save(progress)
            self.checkpoints.wait()
            self._report_checkpoints()
            # SIGTERM takes precedence over Ctrl-C: a scheduler sends it, which starts the job again.
            is_sigterm = signal.SIGTERM in self.state.step.all_gather_json(signal_number)
            name = "SIGTERM" if is_sigterm else "SIGINT"
            saved = _format_saved(self.checkpoints.newest_step(), progress.step, weights)
            text = f"stopped by {name} after step {progress.step}{saved}"
            self.logger.record_fault("terminated", progress.step, text)
            # All ranks leave together: other launchers end all ranks when the first has gone.
            text = self.state.step.all_gather_json(text)[0]
        error = StoppedError(text)
        if name == "SIGINT":
            error.exit_code = INTERRUPT_EXIT_CODE
        raise error

    def evaluate(self, progress: TrainingProgress) -> TrainingProgress:
        """`progress` with the validation measures, and the best loss so far. Collective."""
        before = progress.best
        with self.heartbeat.pause(), _noted(f"in the evaluation after step {progress.step}"):
            progress = self._evaluate(progress)
        if progress.valid:
            self.callbacks.evaluate(progress, is_best=progress.best != before)
        return progress

    def _evaluate(self, progress: TrainingProgress) -> TrainingProgress:
        if self.valid is None:
            return progress
        step, _, average, scheduler = self.state
        valid, found = evaluate(step, self.task, self.valid, self.settings.batch_size)
        damaged = self._add_damaged(progress, progress.step, found)
        if average is not None:
            with step.swapped_weights(average.values):
                averaged = evaluate(step, self.task, self.valid, self.settings.batch_size)
            valid |= {f"ema {name}": value for name, value in averaged.metrics.items()}
        self.logger.log_validation(progress.step, valid)
        if scheduler is not None and (loss := valid.get("loss")) is not None:
            scheduler.evaluated(loss)
        value = valid.get(self.settings.best_metric)
        is_best = is_better(value, progress.best, self.settings.best_mode)
        return progress._replace(valid=valid, best=value if is_best else progress.best, damaged=damaged)

    # ---- until the disk has the last step

    def _write_last(self, progress: TrainingProgress) -> None:
        """The last checkpoint is on the disk when this returns. Collective. Raises StoppedError and TrainingError."""
        step, checkpoints = self.state.step, self.checkpoints
        if self.wait_until_saved(progress.step):
            return
        number = self.stop_signal()
        is_stopped = any(step.all_gather_json(number))
        folder, failure = checkpoints.save_weights(progress)
        if failure := step.all_gather_json(failure)[0]:
            checkpoints.remove_weights(keep_whole=True)
        weights = None if failure else folder
        if is_stopped:
            self.save_and_stop(progress, number, weights)
        resumed, reason = step.all_gather_json([checkpoints.newest_step(), checkpoints.last_reason])[0]
        got = f"all {progress.step} steps are done, but the last checkpoint could not be written: {reason}"
        attempt = f"the same command, which {f'resumes from step {resumed}' if resumed else 'starts over'}"
        if weights is None:
            got = f"{got}; nor could the weights alone: {failure}"
        else:
            attempt = f"fourfold checkpoint export {weights}, which has the weights; or {attempt}"
        raise TrainingError(Problem(got, "a disk that can be written and has room", attempt), where="training")

    def wait_until_saved(self, last: int) -> bool:
        """Wait for the checkpoint of step `last`, and write it again while it fails. Collective.

        Returns whether it is written: not if `disk_seconds` have passed, or any rank is asked to stop. Raises PeerError
        if a rank died while it wrote its file.
        """
        checkpoints, log, wait_seconds = self.checkpoints, self.logger, self.settings.disk_seconds
        begin, has_said = time.monotonic(), False
        while True:
            checkpoints.wait_for_writer()
            reasons = checkpoints.take_failures()
            own = checkpoints.is_saved(last), time.monotonic() - begin < wait_seconds, self.stop_signal() > 0
            views = self.state.step.all_gather_json(own)
            (is_saved, has_time, _), is_stopped = views[0], any(view[2] for view in views)
            if is_saved or is_stopped or not has_time:
                if is_saved:
                    checkpoints.remove_weights()  # an earlier attempt's
                if is_saved and has_said:
                    log.log_message(f"the checkpoint of step {last} is written")
                return is_saved
            if reasons and not has_said:
                has_said = True
                held = f"the result of {format_bytes(checkpoints.num_bytes)} is held in memory"
                wait = f"written as soon as the disk takes it: waiting up to {wait_seconds} s (disk_seconds)"
                log.log_message(f"warning: {reasons[0].got}; {held}, and {wait}")
            with waiting_for("room on the disk"):
                time.sleep(RETRY_SECONDS)
            checkpoints.save_again()

    # ---- the end

    def _make_sample(self) -> Any:
        """What the task's `sample` returns, by the averaged weights where there are some. Collective."""
        step, average = self.state.step, self.state.ema
        if self.task.sample is None:
            return None
        weights = step.swapped_weights(average.values) if average is not None else contextlib.nullcontext()
        note = noting(f"  in the task's sample, {describe_function(self.task.sample)}")
        with waiting_for("the task's sample"), weights, step.inference() as model, note:
            # The stages and tensor ranks of a place call the model together; rank 0's text is that of all.
            return self.task.sample(model) if step.rank in step.plan.mesh.peers(0, "pp", "tp") else None

    def finish(self, progress: TrainingProgress, seconds: float) -> RunResult:
        """The last evaluation, checkpoint and sample; logs and returns the result. Collective."""
        step = self.state.step
        step.flush()
        if self.settings.drift_check:
            step.check_drift()
        if progress.stopped is None or not progress.valid:
            progress = self.evaluate(progress)
        with self.heartbeat.pause():
            if self.settings.checkpoint_every and self.checkpoints.saved_step != progress.step:
                self.checkpoints.save(progress._replace(callbacks=self.callbacks.state_dicts()))
            sample = self._make_sample()
            if self.settings.checkpoint_every:
                self._write_last(progress)
        self.heartbeat.mark_done()  # not before: a launcher that is asked to stop waits for ranks that save
        self.tracer.write_again()
        self._report_checkpoints()
        self.memory.log(progress.step)
        loss = training_loss(progress.losses)
        path, rate = self.logger.path, self.logger.throughput.num_units / max(seconds, 1e-9)
        if path is not None and path.absolute() != self.logger.run_path:  # the task has changed the working directory
            path = self.logger.run_path
        result = RunResult(path, progress.step, loss, progress.valid, rate, seconds, sample, progress.stopped)
        self.logger.finish(result)
        self.callbacks.end(result)
        return result


@contextlib.contextmanager
def _noted(place: str) -> Iterator[None]:
    """Within: an error of the user's code gets a note of the place."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, FourfoldError):
            error.add_note(place)
        raise


def _format_saved(newest: int | None, step: int, weights: Path | None) -> str:
    """What is saved of a run that has stopped after `step`, and where the same command will resume."""
    if newest == step:
        return ", which is saved; run the same command again to resume there"
    alone = f"; the weights alone are saved, for fourfold checkpoint export {weights}" if weights else ""
    if newest:
        return f"{alone}; the newest checkpoint is of step {newest}; run the same command again to resume there"
    return f"{alone or '; nothing is saved'}, and the same command starts over"


def _check_lr_factor(factor: Any, step: int) -> float:
    """The factor as a float. Raises TaskError if a schedule returned something other than a finite number."""
    # A tensor of one element is a number too.
    with contextlib.suppress(TypeError, ValueError, RuntimeError, OverflowError):
        if math.isfinite(value := float(factor)):
            return value
    raise TaskError(Problem(f"the schedule's factor at step {step + 1} is {factor!r}", "a finite number"))
