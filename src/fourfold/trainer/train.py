"""Train: a whole run of a task, from the first step, or where it was left, to the last evaluation.

Law: every rank does the same steps; rank 0 alone writes and speaks.
"""

import contextlib
import functools
import math
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

from fourfold.checkpoint.manager import AttemptDir, CheckpointManager, TrainingProgress
from fourfold.checkpoint.read import load_weights_file
from fourfold.checkpoint.state import TrainingState
from fourfold.environment.host_memory import available_bytes
from fourfold.environment.world import World
from fourfold.feed.collate import check_data
from fourfold.feed.feed import Feed
from fourfold.feed.sample_rng import fetch_seeded
from fourfold.parts.comm.communicator import PROCESS_EXIT_GRACE_SECONDS
from fourfold.parts.comm.init import world
from fourfold.plan.intervals import DRIFT_CHECK, is_due
from fourfold.plan.lr_schedule import LRSchedule
from fourfold.plan.plan import Plan
from fourfold.plan.sample_order import shard_range
from fourfold.plan.trace_file import DATA_SPAN
from fourfold.step.argument_checks import check_plan_argument
from fourfold.step.build import TrainStep, parallelize
from fourfold.step.ema import EMA
from fourfold.step.loss_sum import Loss
from fourfold.step.memory_bound import check_memory
from fourfold.step.meta_model import try_meta_model
from fourfold.step.model_call import eval_mode
from fourfold.step.same_source import check_same_length
from fourfold.step.uneven_means import is_uneven, uneven_problem
from fourfold.trainer import heartbeat as heartbeat_module
from fourfold.trainer.heartbeat import Heartbeat
from fourfold.trainer.run_logger import AVERAGED_STEPS, ProgressDisplay, RunLogger, RunResult
from fourfold.trainer.settings import Settings, check_steps, format_delayed, lr_factors, make_settings
from fourfold.trainer.stop_signal import handle_stop_signals, stop_seconds
from fourfold.trainer.stragglers import StragglerDetector
from fourfold.trainer.tracer import SAMPLE_EVERY, Tracer
from fourfold.words.errors import INTERRUPT_EXIT_CODE, PeerError, Problem, StoppedError, TaskError, TrainingError
from fourfold.words.task import Source, Task


def train(
    task: Task,
    plan: Plan | None = None,
    *,
    steps: int | None = None,
    batch_size: int | None = None,
    clip: float | None = None,
    seed: int = 0,
    evaluate_every: int | None = None,
    trace_every: int = SAMPLE_EVERY,
    name: str | None = None,
    folder: str = "runs",
    label: str = "run",
    spec: str | None = None,
    extra: Mapping[str, Any] | None = None,
    checkpoint_every: int = 100,
    ema: float | None = None,
    init: str | None = None,
    skip_nan: int = 0,
    drift_check: int = DRIFT_CHECK,
    rates: LRSchedule | None = None,
    report: ProgressDisplay | None = None,
) -> RunResult:
    """Train `task` as `plan` says; without a plan, all ranks are data ranks. Collective, with the same arguments.

    steps, batch_size (global) and clip default to the task's. `evaluate_every` counts steps; None evaluates at the
    end only. The run's folder is `folder`/`name`, or `folder`/`label`-1, -2 … without a name. A run that is there
    under its name goes on from its newest good checkpoint, on whatever mesh; one that has ended is told of, and not
    trained again. `spec`, `extra` (both go into settings.json) and what is trained make it the same run.

    `trace_every` counts steps too: steps 3 and 4 and every such step are recorded in trace.json; 0 records none.
    `checkpoint_every` counts steps; 0 saves never, otherwise the last step and every new best validation loss are
    saved too. `ema` keeps an average of the weights, which is evaluated, sampled from and saved. `init` is a plain
    safetensors file of weights to begin with. `skip_nan` steps in a row may be left out because the loss, or the norm
    where `clip` measures one, is not finite; they are told in faults.jsonl. After every `drift_check` steps, and after
    the last, ranks compare the weights that several of them hold; 0 never does. `rates` scales the learning rate to
    the batch, warms it up and lets it fall; without it the rate follows the task's schedule. `report` hears of the
    progress on rank 0.

    With `sync = "local"` all of these wait for the next step after which ranks have the same weights, and the average
    takes in the weights of such steps only; `steps` must be divisible by `local_steps`.

    SIGTERM or Ctrl-C to any rank ends the run after the next step, with a checkpoint and a StoppedError on every rank,
    unless the process handles that signal itself. A second one ends the process at once, and so does a step that does
    not end within FOURFOLD_STOP_SECONDS (25) of the first. Raises children of FourfoldError; KeyboardInterrupt at a
    second Ctrl-C.
    """
    check_plan_argument(plan)
    plan, limit = plan or Plan(dp=world().size), stop_seconds()
    given = {"steps": steps, "batch_size": batch_size, "clip": clip, "seed": seed, "evaluate_every": evaluate_every}
    given |= {"trace_every": trace_every, "name": name, "folder": folder, "label": label, "spec": spec, "extra": extra}
    given |= {"checkpoint_every": checkpoint_every, "ema": ema, "init": init, "skip_nan": skip_nan, "rates": rates}
    given |= {"training": plan.identity_fields, "drift_check": drift_check}
    settings = make_settings(task, **given)
    check_steps(settings.steps, plan)
    # Before the seed: a model may draw random numbers while it is made, and the real one must draw the same.
    outlined = try_meta_model(task, max_bytes=available_bytes())
    torch.manual_seed(settings.seed)
    data = task.data()
    check_data(data, where="the task's data")
    if outlined is not None:
        sizes = {"batch_size": settings.batch_size, "num_steps": settings.steps}
        check_memory(task, plan, data.train, outlined, **sizes, num_ranks=1)
    model = task.model()
    if settings.init is not None:
        load_weights_file(model, Path(settings.init))
    kept = {"clip": settings.clip, "seed": settings.seed, "skip_nan": settings.skip_nan}
    kept |= {"drift_check": settings.drift_check}
    step = parallelize(model, task.loss, task.optimizer, plan, **kept)
    feed = Feed(data.train, plan, batch_size=settings.batch_size, seed=settings.seed)
    trained = TrainingState(step, feed, None if settings.ema is None else EMA(step.weight_shards, settings.ema))
    beats = heartbeat_module.from_environment()
    with _run_logger(task, step, plan, settings, report) as speaker:
        if speaker.run_info.finished_record is not None:
            beats.mark_done()
            return speaker.finished_result(plan)
        with _checkpoint_manager(trained, settings, speaker) as keeper:
            progress = speaker.log_resumed(keeper.resume())
            if late := format_delayed(settings, plan):
                speaker.log_message(late)
            begin = time.perf_counter()
            traces = None if speaker.path is None else speaker.run_path
            tracing = Tracer(step, every=settings.trace_every, folder=traces, log_message=speaker.log_message)
            beats.set_resumed_step(progress.step)
            run = TrainingLoop(task, trained, settings, speaker, keeper, tracing, data.valid, beats)
            here = World(rank=step.rank, size=plan.mesh.size)
            stopping = handle_stop_signals(beats, speaker.run_path, here, limit_seconds=limit)
            with stopping as asked, _add_step_to_peer_error(step, speaker, beats):
                progress = run.run_steps(progress, asked)
                seconds = time.perf_counter() - begin
                return run.finish(progress, seconds)


@contextlib.contextmanager
def _add_step_to_peer_error(step: TrainStep, speaker: RunLogger, beats: Heartbeat) -> Iterator[None]:
    """Within: a PeerError says after which step. Where no launcher of ours does, it is written down here."""
    try:
        yield
    except PeerError as error:
        text = f"{error} (after step {beats.step})" if beats.step >= 0 else f"{error} (before the first step)"
        if not beats.has_reader:
            speaker.record_fault("lost rank", beats.step, text, rank=_dead_rank(step))
        raise PeerError(text) from error


def _dead_rank(step: TrainStep) -> int | None:
    """The rank of this host that has died, where it is one and no more."""
    deadline = time.monotonic() + PROCESS_EXIT_GRACE_SECONDS
    while not (dead := [rank for rank in range(step.plan.mesh.size) if step.peer_is_dead(rank)]):
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)
    return dead[0] if len(dead) == 1 else None


@contextlib.contextmanager
def _checkpoint_manager(trained: TrainingState, settings: Settings, speaker: RunLogger) -> Iterator[CheckpointManager]:
    keeper = CheckpointManager(
        trained, AttemptDir(speaker.run_path, speaker.run_info.token), speaker, seed=settings.seed
    )
    try:
        yield keeper
    except BaseException:
        keeper.abort()
        raise


@dataclass(frozen=True)
class TrainingLoop:
    """The steps of a run, and its end."""

    task: Task
    state: TrainingState
    settings: Settings
    logger: RunLogger
    checkpoints: CheckpointManager
    tracer: Tracer
    valid_source: Source | None
    heartbeat: Heartbeat

    def run_steps(self, progress: TrainingProgress, stop_signal: Callable[[], int]) -> TrainingProgress:
        """From where the run is to its last step. Raises StoppedError where a rank is `asked` to stop."""
        feed = self.state.feed
        feed.check_peers = self.state.step.check_peers
        # The thread that reads ahead ends here, however the steps end: in the interpreter's last moments it would
        # take the process down from within torch.
        with contextlib.closing(feed.repeat()) as batches:
            return self._run_steps(progress, stop_signal, batches)

    def _run_steps(
        self, progress: TrainingProgress, asked: Callable[[], int], batches: Iterator[Any]
    ) -> TrainingProgress:
        step, _, average = self.state
        every, last, period = self.settings.checkpoint_every, self.settings.steps, step.plan.sync_interval
        lateness = StragglerDetector(step, self.logger)
        factor = lr_factors(self.task, self.settings)
        losses = deque(progress.losses, maxlen=AVERAGED_STEPS)
        for number in range(progress.step, last):
            if factor is not None:
                scale = _check_lr_factor(factor(number), number)
                for group, rate in zip(step.optimizer.param_groups, self.logger.base_lrs, strict=True):
                    group["lr"] = rate * scale
            with self.tracer.sample(number + 1) as recorder:
                with recorder.span(DATA_SPAN), lateness.data_wait():
                    batch = next(batches)
                step.request_stop(asked() > 0)
                metrics = step(batch)
            if metrics.skipped is None:
                losses.append(metrics.loss)
            if average is not None and step.is_synchronized and (metrics.skipped is None or period > 1):
                step.flush()
                average.update((number + 1) // period)
            lateness.step_done(number + 1)
            self.logger.log_step(number + 1, metrics, lr=step.optimizer.param_groups[0]["lr"])
            self.checkpoints.report_failures()
            self.heartbeat.beat(number + 1)
            progress, best = TrainingProgress(number + 1, list(losses), {}, progress.best), progress.best
            if progress.step < last and step.is_synchronized:
                if step.stop_requested:
                    self.save_and_stop(progress, asked())
                if is_due(progress.step, self.settings.evaluate_every or 0, period):
                    progress = self.evaluate(progress)
                if every and (is_due(progress.step, every, period) or progress.best != best):
                    with self.heartbeat.pause():
                        self.checkpoints.save(progress)
        return progress

    def save_and_stop(self, progress: TrainingProgress, number: int) -> NoReturn:
        """Save, and end the run before its time. Collective. `number`: the signal this rank has got, or 0."""
        with self.heartbeat.pause():
            if self.settings.checkpoint_every and self.checkpoints.saved_step != progress.step:
                self.checkpoints.save(progress)
            self.checkpoints.wait()
            # A scheduler's SIGTERM goes before a Ctrl-C: it asks to be started again.
            name = "SIGTERM" if signal.SIGTERM in self.state.step.all_gather_json(number) else "SIGINT"
            saved = _format_saved(self.checkpoints.newest_step(), progress.step)
            text = f"stopped by {name} after step {progress.step}{saved}"
            self.logger.record_fault("terminated", progress.step, text)
            # All leave together: a launcher of others ends all ranks when the first has gone.
            text = self.state.step.all_gather_json(text)[0]
        error = StoppedError(text)
        if name == "SIGINT":
            error.exit_code = INTERRUPT_EXIT_CODE
        raise error

    def evaluate(self, progress: TrainingProgress) -> TrainingProgress:
        """What the run has reached, with what the validation data say of it."""
        with self.heartbeat.pause():
            return self._evaluate(progress)

    def _evaluate(self, progress: TrainingProgress) -> TrainingProgress:
        if self.valid_source is None:
            return progress
        step, _, average = self.state
        valid = evaluate(step, self.task, self.valid_source, self.settings.batch_size)
        if average is not None:
            with step.swapped_weights(average.values):
                averaged = evaluate(step, self.task, self.valid_source, self.settings.batch_size)
            valid |= {f"ema {name}": value for name, value in averaged.items()}
        self.logger.log_validation(progress.step, valid)
        loss = valid.get("loss")
        # A loss that is not a number is not equal to itself, and never the best.
        is_best = loss is not None and loss == loss and (progress.best is None or loss < progress.best)
        return progress._replace(valid=valid, best=loss if is_best else progress.best)

    def finish(self, progress: TrainingProgress, seconds: float) -> RunResult:
        """The last evaluation, the last checkpoint, and what is told of the run."""
        step, _, average = self.state
        step.flush()
        if self.settings.drift_check:
            step.check_drift()
        progress = self.evaluate(progress)
        self.heartbeat.mark_done()
        if self.settings.checkpoint_every and self.checkpoints.saved_step != progress.step:
            self.checkpoints.save(progress)
        sample = None
        if self.task.sample is not None:
            applied = step.swapped_weights(average.values) if average is not None else contextlib.nullcontext()
            with applied, eval_mode(step.model), step.unsharded():
                sample = self.task.sample(step.model) if self.logger.rank == 0 else None
        self.checkpoints.wait()
        if self.settings.checkpoint_every:
            self._check_last_step_saved(progress.step)
        losses = progress.losses
        loss = sum(losses) / len(losses) if losses else float("nan")
        path, rate = self.logger.path, self.logger.num_units / max(seconds, 1e-9)
        if path is not None and path.absolute() != self.logger.run_path:  # The task has changed the working directory.
            path = self.logger.run_path
        result = RunResult(path, self.settings.steps, loss, progress.valid, rate, seconds, sample)
        self.logger.finish(result)
        return result

    def _check_last_step_saved(self, last: int) -> None:
        """A run whose last step is on no disk has not ended well. Collective.

        Raises TrainingError, or PeerError where a rank died while it wrote its last piece.
        """
        newest = self.state.step.all_gather_json(self.checkpoints.newest_step())[0]
        if newest == last:
            return
        where = f"goes on from step {newest}" if newest else "begins again"
        got = f"all {last} steps are done, but the last checkpoint could not be written"
        raise TrainingError(Problem(got, "it on the disk", f"the same command: it {where}"), where="training")


def _format_saved(newest: int | None, step: int) -> str:
    """What is on the disk, of a run that is at `step`, and what the same command will do."""
    if newest == step:
        return ", which is saved; the same command goes on there"
    if newest:
        return f"; the newest checkpoint is of step {newest}, where the same command goes on"
    return "; nothing is saved, and the same command begins again"


def _is_number_pair(value: Any) -> bool:
    return isinstance(value, tuple | list) and len(value) == 2 and all(map(_is_number, value))


def _is_number(value: Any) -> bool:
    """Whether it is one number, of whatever library."""
    with contextlib.suppress(TypeError, ValueError, RuntimeError, OverflowError):
        float(value)
        return not isinstance(value, str)
    return False


def _check_lr_factor(factor: Any, step: int) -> float:
    """A factor of the learning rate. Raises TaskError where a schedule gives what no rate can be multiplied by."""
    # A tensor of one element is a number too.
    with contextlib.suppress(TypeError, ValueError, RuntimeError, OverflowError):
        if math.isfinite(value := float(factor)):
            return value
    raise TaskError(Problem(f"the schedule's factor at step {step + 1} is {factor!r}", "a finite number"))


@torch.no_grad()
def evaluate(step: TrainStep, task: Task, source: Source, batch_size: int) -> dict[str, float]:
    """Mean loss and the task's measures over a whole source, which the data ranks share. Collective.

    Raises TaskError, on every rank, where ranks have sources of other lengths; and where the loss is one number made of
    means whose counts part ways, and ranks share the source: then other ranks would give another number.
    """
    uneven_by = torch.zeros(3, dtype=torch.float64)
    sums: dict[str, list[float]] = {}
    step.flush()
    check_same_length(step.all_gather_json(len(source)), "validation data")
    start, stop = shard_range(0, len(source), step.plan.dp, step.dp_index)
    each = max(1, batch_size // step.plan.dp)
    draw = functools.partial(fetch_seeded, source, seed=0, epoch=0)
    step.dry_run(draw(range(start, min(start + each, stop)))[0])
    with eval_mode(step.model):
        # As many times on every rank: all of them bring the weights, where those rest split.
        longest = max(len(range(*shard_range(0, len(source), step.plan.dp, rank))) for rank in range(step.plan.dp))
        for first in range(start, start + longest, each):
            batch = draw(range(first, min(first + each, stop)))[0] if first < stop else None
            with step.unsharded():
                loss, found = (None, {}) if batch is None else _batch_metrics(step, task, batch)
            if loss is not None:
                uneven_by += torch.tensor(
                    list(map(float, (loss.count, loss.other_count, loss.other_square))), dtype=torch.float64
                )
            for name, (total, count) in found.items():
                held = sums.setdefault(name, [0.0, 0.0])
                held[0] += float(total)
                held[1] += float(count)
    if step.plan.dp > 1 and is_uneven(*step.all_reduce(uneven_by)):
        raise TaskError(uneven_problem(step.objective.loss_names), where="the validation loss")
    everyone: dict[str, list[float]] = {}
    for theirs in step.all_gather_json(sums):
        for name, (total, count) in theirs.items():
            held = everyone.setdefault(name, [0.0, 0.0])
            held[0] += total
            held[1] += count
    return {name: total / count for name, (total, count) in everyone.items() if count}


def _batch_metrics(step: TrainStep, task: Task, batch: Any) -> tuple[Loss, dict[str, Sequence[Any]]]:
    part, measured = step.run_forward(batch)
    # Of a model with a loss of its own the labels are among the inputs.
    targets = part.inputs if part.targets is None else part.targets
    extra = task.evaluate(measured.outputs, targets) if task.evaluate is not None else {}
    if not isinstance(extra, dict) or not all(isinstance(k, str) and _is_number_pair(v) for k, v in extra.items()):
        need = "a dict from names to pairs (sum, count)"
        raise TaskError(Problem("what the task's evaluate returned", need, '{"accuracy": (num_right, num_samples)}'))
    return measured.loss, {"loss": (measured.loss.total, measured.loss.count), **extra}


@contextlib.contextmanager
def _run_logger(
    task: Task, step: TrainStep, plan: Plan, settings: Settings, report: ProgressDisplay | None
) -> Iterator[RunLogger]:
    speaker = RunLogger(task, settings, rank=step.rank, report=report)
    try:
        speaker.open_run_dir(step, plan)
        yield speaker
    finally:
        speaker.close()
