"""Train: a whole run of a task, from the first step, or where it was left, to the last evaluation.

Law: every rank does the same steps; rank 0 alone writes and speaks.
"""

import contextlib
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from fourfold.checkpoint.collect import TrainingState
from fourfold.checkpoint.manager import AttemptDir, CheckpointManager
from fourfold.checkpoint.weights_file import load_weights_file
from fourfold.environment.host_memory import available_bytes
from fourfold.environment.world import World
from fourfold.feed.collate import check_data
from fourfold.feed.feed import Feed
from fourfold.parts.comm.communicator import PROCESS_EXIT_GRACE_SECONDS, world
from fourfold.plan.intervals import DRIFT_CHECK
from fourfold.plan.lr_schedule import LRSchedule
from fourfold.plan.plan import Plan
from fourfold.step.argument_checks import check_plan_argument
from fourfold.step.build import TrainStep, parallelize
from fourfold.step.ema import EMA
from fourfold.step.memory_bound import check_memory
from fourfold.step.meta_model import try_meta_model
from fourfold.trainer import heartbeat as heartbeat_module
from fourfold.trainer.heartbeat import Heartbeat
from fourfold.trainer.loop import TrainingLoop
from fourfold.trainer.run_logger import ProgressDisplay, RunLogger
from fourfold.trainer.settings import Settings, check_steps, format_delayed, make_settings
from fourfold.trainer.stop_signal import handle_stop_signals, stop_seconds
from fourfold.trainer.summary import RunResult
from fourfold.trainer.tracer import SAMPLE_EVERY, Tracer
from fourfold.words.errors import PeerError
from fourfold.words.task import Task


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
