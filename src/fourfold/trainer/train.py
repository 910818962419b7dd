"""Train: a whole run of a task, from its first step, or the checkpoint it resumes from, to its last evaluation.

Law: every rank does the same steps; only rank 0 writes and prints.
"""

import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Unpack

import torch
from torch import nn

from fourfold.checkpoint.collect import TrainingState
from fourfold.checkpoint.initial_weights import initial_model_of_files
from fourfold.checkpoint.manager import AttemptDir, CheckpointManager
from fourfold.checkpoint.store import Retention
from fourfold.comm.communicator import PROCESS_EXIT_GRACE_SECONDS
from fourfold.comm.init import init_communicator, world
from fourfold.environment.host_limits import available_bytes, resident_bytes
from fourfold.environment.world import World
from fourfold.feed.data_input import DataInput, TaskInputs, open_data
from fourfold.feed.feed import Feed
from fourfold.optim.ema import EMA
from fourfold.plan.plan import Plan
from fourfold.step.argument_checks import check_plan_argument
from fourfold.step.initial_model import try_meta_model
from fourfold.step.memory_bound import check_memory
from fourfold.step.parallelize import parallelize
from fourfold.step.train_step import TrainStep
from fourfold.trainer import heartbeat as heartbeat_module
from fourfold.trainer.callback_runner import CallbackRunner
from fourfold.trainer.callbacks.registry import check_callbacks, required_metrics, unique_names
from fourfold.trainer.evaluate import check_measured, metric_needs
from fourfold.trainer.heartbeat import Heartbeat
from fourfold.trainer.link_watch import compilations_known, links_watched, waits_shown
from fourfold.trainer.loop import TrainingLoop
from fourfold.trainer.memory_log import MemoryLog, predict_bytes
from fourfold.trainer.progress import make_progress
from fourfold.trainer.run_identity import run_identity
from fourfold.trainer.run_length import RunSettings, check_steps, format_delayed, format_epochs, with_sizes
from fourfold.trainer.run_logger import ProgressDisplay, RunLogger, RunResult
from fourfold.trainer.settings import TrainOptions, check_setting_names, make_settings
from fourfold.trainer.stop_signal import handle_stop_signals, stop_seconds
from fourfold.trainer.task_scheduler import check_evaluations, make_scheduler
from fourfold.trainer.tracer import Tracer
from fourfold.words.callback import Callback
from fourfold.words.error_notes import describe_function, noting
from fourfold.words.errors import PeerError
from fourfold.words.task import Task

POLL_SECONDS = 0.01


def train(
    task: Task,
    plan: Plan | None = None,
    *,
    callbacks: Sequence[Callback] = (),
    quiet: bool = False,
    report: ProgressDisplay | None = None,
    **options: Unpack[TrainOptions],
) -> RunResult:
    """Train `task` as `plan` says; without a plan, all ranks are data ranks. Collective, with the same arguments.

    callbacks   objects of classes derived from `ff.Callback`, whose hooks are called on rank 0
    quiet       print nothing; otherwise rank 0 prints what `fourfold train` prints
    report      shows the progress in place of that, on rank 0
    steps, epochs, batch_size, clip   None: the task's. The batch size is global. Steps or epochs, not both
    drop_last   leave out the samples of an epoch that do not fill a batch; None: the DataLoader's, else False
    order, window   how samples are shuffled: see `ff.Feed`
    bad_samples  how many damaged samples, of all ranks, may be left out; faults.jsonl and the checkpoints list them
    seed        of the initial weights, the order of the samples and dropout
    evaluate_every   steps; None evaluates only at the end
    trace_every      steps; steps 3 and 4 and every such step are recorded in trace.json; 0 records none
    checkpoint_every   steps; 0 never saves, otherwise the last step and every new best validation are saved too
    disk_seconds   how long a finished run waits for room for its last checkpoint before it saves the weights alone
    keep, keep_best  how many of the newest checkpoints are kept, and of the best
    best_metric, best_mode   the validation metric that chooses the best checkpoint, and whether its "min" or "max" is
                the best value
    folder, name     the run's folder is `folder`/`name`, or `folder`/`run_prefix`-1, -2 … without a name. A run that
                exists under its name resumes from its newest valid checkpoint, on any mesh; one that has finished is
                not trained again, and its result is returned
    run_prefix  see `folder`
    task_name, extra_settings   the task and its arguments as given: they go into settings.json, and are part of what
                makes it the same run
    config_text  goes into config.toml: a settings file for `fourfold train`
    argument_defaults, launch_settings   the task's other arguments, and the settings of the command line that are none
                of these: they go into settings.json for the report
    ema         decay of an average of the weights, which is evaluated, sampled from and saved
    init        initial weights: a plain safetensors file, or a folder as `save_pretrained` writes it
    skip_nan    how many steps in a row may be skipped because the loss, or the norm where `clip` measures one, is not
                finite; faults.jsonl lists them
    peer_timeout  seconds of silence between two hosts after which the run ends with a PeerError; None: never
    drift_check   every so many steps, and after the first and the last one, ranks compare the weights that several
                of them hold; 0: never
    rates       scales the learning rate with the batch size, warms it up and decays it; None: the task's schedule
    `settings.Settings` has the defaults.

    With `sync = "local"`, evaluations, checkpoints and drift checks wait for the next step after which ranks have the
    same weights, the average includes the weights of such steps only, and `steps` must be divisible by `local_steps`.

    SIGTERM or Ctrl-C to any rank ends the run after the next step, with a checkpoint and a StoppedError on every rank,
    unless the process handles that signal itself. A second one ends the process at once, and so does a step that does
    not end within FOURFOLD_STOP_SECONDS (25) of the first. Raises children of FourfoldError; KeyboardInterrupt at a
    second Ctrl-C.
    """
    check_setting_names(options)
    check_plan_argument(plan)
    check_callbacks(callbacks)
    plan, limit_seconds = plan or Plan(dp=world().size), stop_seconds()
    given = make_settings(task, **options)
    check_steps(given.steps, plan)
    opened = _open_task(task, given.seed)
    inputs, settings = opened.inputs, with_sizes(given, task, opened.inputs.train)
    check_steps(settings.steps, plan)
    step = _build_step(task, plan, settings, opened)
    predicted = predict_bytes(task, step, opened.meta_model)
    scheduler = make_scheduler(task, step.optimizer, steps=settings.steps, rates=settings.rates)
    check_evaluations(scheduler, evaluate_every=settings.evaluate_every, has_valid=inputs.valid is not None)
    feed = _make_feed(inputs.train, step, settings)
    ema = None if settings.ema is None else EMA(step.weight_shards, settings.ema)
    state = TrainingState(step, feed, ema, scheduler)
    heartbeat = heartbeat_module.from_environment()
    needs = metric_needs(settings, step.all_gather_json(required_metrics(callbacks))[0])
    check_measured(needs, step, task, inputs, settings)
    own_display = None if report is not None or quiet or step.rank > 0 else make_progress()
    with (
        contextlib.nullcontext(report) if own_display is None else contextlib.closing(own_display) as display,
        contextlib.closing(RunLogger(task, settings, rank=step.rank, report=display)) as logger,
    ):
        logger.open_run_dir(step, plan, run_identity(given, plan), unique_names(callbacks))
        if logger.run_info.finished_record is not None:
            heartbeat.mark_done()
            return logger.finished_result(plan)
        hooks = CallbackRunner(callbacks, logger, heartbeat)
        with hooks.ended_by_errors(), _checkpoint_manager(state, settings, logger) as checkpoints:
            progress = logger.log_resumed(checkpoints.resume())
            for message in (*inputs.notes, format_epochs(settings, inputs.train), format_delayed(settings, plan)):
                if message:
                    logger.log_message(message)
            begin = time.perf_counter()
            trace_dir = None if logger.path is None else logger.run_path
            tracer = Tracer(step, every=settings.trace_every, folder=trace_dir, log_message=logger.log_message)
            heartbeat.set_resumed_step(progress.step)
            hooks.start(step, settings, progress)
            memory = MemoryLog(step, logger, before_bytes=opened.resident_bytes, predicted=predicted)
            here = World(rank=step.rank, size=plan.mesh.size)
            stop_signals = handle_stop_signals(heartbeat, logger.run_path, here, limit_seconds=limit_seconds)
            with (
                links_watched(step.communicator, heartbeat, logger, timeout_seconds=settings.peer_timeout),
                waits_shown(heartbeat, logger),
                compilations_known(),
                stop_signals as stop,
                _add_step_to_peer_error(step, logger, heartbeat),
            ):
                loop = TrainingLoop(
                    task, state, settings, logger, checkpoints, tracer, inputs.valid, heartbeat, memory, hooks, stop
                )
                progress = loop.run_steps(progress)
                return loop.finish(progress, time.perf_counter() - begin)


class _OpenedTask(NamedTuple):
    """What is known of a task before its model is made."""

    meta_model: nn.Module | None
    inputs: TaskInputs
    resident_bytes: int | None


def _open_task(task: Task, seed: int) -> _OpenedTask:
    """Seeds torch and opens the task's data."""
    before_bytes = resident_bytes()
    # Before the seed: building a model may draw random numbers, and the real model must draw the same as without this.
    meta_model = try_meta_model(task, max_bytes=available_bytes())
    torch.manual_seed(seed)
    with noting(f"  in the task's data, {describe_function(task.data)}"):
        data = task.data()
    return _OpenedTask(meta_model, open_data(data, where="the task's data"), before_bytes)


def _make_feed(data: DataInput, step: TrainStep, settings: RunSettings) -> Feed:
    """The feed of this rank. Collective."""
    sizes = {"batch_size": settings.batch_size, "drop_last": settings.drop_last}
    feed = Feed(data, step.plan, seed=settings.seed, order=settings.order, window=settings.window, **sizes)
    feed.leaves_damage_to_caller = True  # the loop counts damaged samples over all ranks
    shares = step.plan.mesh.size > step.plan.dp
    if shares:
        feed.share_reads(step.communicator)
    # Ranks that need the same samples compare their batches before a step, on the host.
    feed.copy_to(step.device, compares=shares)
    return feed


def _build_step(task: Task, plan: Plan, settings: RunSettings, opened: _OpenedTask) -> TrainStep:
    """The step that trains the task's model. Collective. Raises what `train` raises."""
    if opened.meta_model is not None:
        sizes = {"batch_size": settings.batch_size, "num_steps": settings.steps}
        check_memory(task, plan, opened.inputs.train, opened.meta_model, **sizes, num_ranks=1)
    model = task.model
    if settings.init is not None:
        comm = init_communicator()
        options = {"defers": plan.tp > 1, "is_log_rank": comm.rank == 0}
        model = initial_model_of_files(task.model, Path(settings.init), comm.device, **options)
    return parallelize(
        model,
        task.loss,
        task.optimizer,
        plan,
        clip=settings.clip,
        seed=settings.seed,
        skip_nan=settings.skip_nan,
        drift_check=settings.drift_check,
        tensor=task.tensor,
    )


@contextlib.contextmanager
def _checkpoint_manager(state: TrainingState, settings: RunSettings, logger: RunLogger) -> Iterator[CheckpointManager]:
    attempt_dir = AttemptDir(logger.run_path, logger.run_info.token)
    retention = Retention(settings.keep, settings.keep_best, settings.best_metric, settings.best_mode)
    checkpoints = CheckpointManager(state, attempt_dir, logger, seed=settings.seed, retention=retention)
    try:
        yield checkpoints
    except BaseException:
        checkpoints.abort()
        raise


@contextlib.contextmanager
def _add_step_to_peer_error(step: TrainStep, logger: RunLogger, heartbeat: Heartbeat) -> Iterator[None]:
    """Within: a PeerError says after which step. The fault is recorded here if no launcher of ours records it."""
    try:
        yield
    except PeerError as error:
        text = f"{error} (after step {heartbeat.step})" if heartbeat.step >= 0 else f"{error} (before the first step)"
        if not heartbeat.has_reader:
            logger.record_fault("lost rank", heartbeat.step, text, rank=_dead_rank(step))
        raise PeerError(text) from error


def _dead_rank(step: TrainStep) -> int | None:
    """The rank of this host that has died; None if none has, or more than one."""
    deadline = time.monotonic() + PROCESS_EXIT_GRACE_SECONDS
    while not (dead := [rank for rank in range(step.plan.mesh.size) if step.peer_is_dead(rank)]):
        if time.monotonic() > deadline:
            break
        time.sleep(POLL_SECONDS)
    return dead[0] if len(dead) == 1 else None
