"""Job: a task and a plan that fit each other and the number of processes.

Law: when `prepare_job` has returned, nothing that the user typed can be wrong; until then no process has been started.
"""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fourfold.cli import arguments, task_loader
from fourfold.cli.arguments import CALLBACK_WORD, RULES_WORD, CommandSettings, ParsedValues
from fourfold.cli.callback_loader import load_callbacks
from fourfold.cli.errors import ErrorCollector
from fourfold.cli.run import Run, check_init_path, read_rules_setting
from fourfold.cli.settings_file import NEVER_RESOLVED, argument_defaults, format_resolved, json_arguments
from fourfold.environment.world import from_environment
from fourfold.plan.batch_split import batch_size_problems
from fourfold.plan.lr_schedule import LRSchedule
from fourfold.plan.plan import Plan
from fourfold.trainer.callbacks.registry import required_metrics
from fourfold.trainer.lr_factors import tuned_batch_size
from fourfold.trainer.run_identity import HF_PREFIX, check_folder_name, check_run_name, default_run_name, run_identity
from fourfold.trainer.settings import LR_PREFIX, TASK_FIELDS, make_settings, run_length
from fourfold.words.callback import Callback
from fourfold.words.errors import DataError, SettingError
from fourfold.words.run_files import RUNS_DIR
from fourfold.words.task import Task, length_problems

if TYPE_CHECKING:
    from torch import nn

    from fourfold.feed.data_input import DataInput
    from fourfold.trainer.run_length import RunSettings


@dataclass(frozen=True)
class Job:
    """What a run needs.

    run       what the user typed
    settings  keyword arguments of `train`; the run's name is always among them
    identity  the settings that make it the same run
    fresh     whether the run starts over
    restarts, hang_seconds  see `launcher.restart_policy.SupervisionPolicy`; the ranks do not use them
    """

    run: Run
    task: Task
    plan: Plan
    settings: Mapping[str, Any]
    identity: Mapping[str, Any]
    callbacks: Sequence[Callback] = ()
    fresh: bool = False
    restarts: int = CommandSettings.restarts
    hang_seconds: float | None = CommandSettings.hang_seconds

    @property
    def task_name(self) -> str:
        """The task as the user named it."""
        return self.settings["task_name"]

    @property
    def run_dir(self) -> Path:
        """The run's folder, whether it exists or not."""
        return Path(RUNS_DIR) / self.settings["name"]

    @property
    def default_name(self) -> str:
        """The name of a run that is given none."""
        return default_run_name(self.settings["run_prefix"], self.identity)

    @property
    def num_processes(self) -> int:
        return self.plan.mesh.size


def parse_job(run: Run, *, has_run_dir: bool = True) -> Job:
    """The job that a run describes. Does not look at its data.

    has_run_dir: False for a command that writes no run: it leaves out what only a run needs of a settings file.
    Raises FourfoldError, or a group of them.
    """
    errors = ErrorCollector()
    factory = errors.attempt(task_loader.find_task, run.task)
    types = None if factory is None else errors.attempt(task_loader.task_arguments, factory)
    values, task = run.values(types, has_run_dir=has_run_dir, errors=errors), None
    if factory is not None and not errors.errors:
        task = errors.attempt(task_loader.make_task, factory, values.task, spec=run.task)
    callbacks = errors.attempt(load_callbacks, values.run.get(CALLBACK_WORD), values.callback_options)
    plan = errors.attempt(run.plan)
    values.run.update(errors.attempt(read_rules_setting, values.run.get(RULES_WORD)) or {})
    errors.raise_collected()
    assert factory is not None
    assert types is not None
    assert task is not None
    assert callbacks is not None
    assert plan is not None
    overrides = _task_overrides(task, values.run)
    # A new batch size does not change the one that the learning rate was tuned for.
    task = dataclasses.replace(task, **overrides, tuned_for=tuned_batch_size(task))
    defaults = argument_defaults(factory, types)
    settings, launch_settings = _split_settings(run.task, values, defaults)
    resolved = make_settings(task, **settings)
    identity = run_identity(resolved, plan)
    settings.setdefault("name", default_run_name(settings["run_prefix"], identity))
    job = Job(run, task, plan, settings=settings, identity=identity, callbacks=callbacks, **launch_settings)
    if has_run_dir:
        settings["config_text"] = format_resolved(job.run_dir, run.task, defaults, values, plan, resolved)
    return job


def _task_overrides(task: Task, given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that replace fields of the task: as an argument of `train`, clip=None would mean the task's own.

    Raises SettingError for steps and epochs.
    """
    if problems := length_problems(given.get("steps"), given.get("epochs")):
        raise SettingError(problems, where="the settings")
    return {key: value for key, value in given.items() if key in (*TASK_FIELDS, RULES_WORD)} | run_length(task, given)


def _split_settings(
    spec: str, values: ParsedValues, defaults: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The keywords of `train`, and the settings of the launch. `defaults`: of the arguments of the task's function."""
    settings = {key: value for key, value in values.run.items() if key not in (*TASK_FIELDS, RULES_WORD, CALLBACK_WORD)}
    settings |= {
        "run_prefix": run_prefix(spec),
        "task_name": spec,
        "extra_settings": {key: value for key, value in values.task.items() if key not in TASK_FIELDS},
        "argument_defaults": json_arguments({key: value for key, value in defaults.items() if key not in values.task}),
        "launch_settings": _launch_words(values),
    }
    launch_settings = {key: settings.pop(key) for key in arguments.LAUNCH_SETTINGS if key in settings}
    lr_values = {key: settings.pop(key) for key in list(settings) if key.startswith(LR_PREFIX)}
    if lr_values:
        settings["rates"] = LRSchedule(**{key.removeprefix(LR_PREFIX): value for key, value in lr_values.items()})
    return settings, launch_settings


def _launch_words(values: ParsedValues) -> dict[str, Any]:
    """The settings that `train` does not take under their words, as config.toml has them."""
    words = [word for word in (CALLBACK_WORD, *arguments.LAUNCH_SETTINGS) if word not in NEVER_RESOLVED]
    return {word: values.run.get(word, arguments.SETTINGS[word].default) for word in words} | values.callback_options


def prepare_job(run: Run, *, has_run_dir: bool = True) -> Job:
    """The job that a run describes, after every check that needs no other process.

    has_run_dir: False for a command that writes no run, such as `verify`.
    """
    from fourfold.step.parallelize import preflight
    from fourfold.trainer.evaluate import check_evaluations, metric_needs
    from fourfold.trainer.run_length import check_steps, with_sizes

    job = parse_job(run, has_run_dir=has_run_dir)
    errors = ErrorCollector()
    if has_run_dir and job.fresh:  # whatever has this name is moved aside
        errors.attempt(check_folder_name, job.settings["name"])
    elif has_run_dir:
        errors.attempt(check_run_name, Path(RUNS_DIR), job.settings["name"], job.identity)
    errors.attempt(_check_init, job.task, job.settings.get("init"))
    inputs = sized = None
    with errors.collect():
        inputs = task_loader.open_task_data(job.task, spec=job.task_name)
        _check_tokens(inputs.train, job.plan)
    if inputs is not None:
        with errors.collect():
            sized = with_sizes(make_settings(job.task, **job.settings), job.task, inputs.train)
            _check_order(inputs.train, sized)
    known = job.task if sized is None else sized
    errors.attempt(_check_batch_size, known.batch_size, job.plan)
    errors.attempt(check_steps, known.steps, job.plan)
    if has_run_dir and inputs is not None and sized is not None:
        with errors.collect():
            check_evaluations(metric_needs(sized, required_metrics(job.callbacks)), job.task, inputs, sized)
    model = errors.attempt(preflight, job.task, job.plan)
    if inputs is not None and model is not None and sized is not None:
        errors.attempt(_check_scheduler, job, model, sized, has_valid=inputs.valid is not None)
    errors.raise_collected()
    assert inputs is not None
    assert sized is not None
    assert model is not None
    _check_fits_memory(job.task, job.plan, inputs.train, model, sized)
    return job


def _check_batch_size(batch_size: int | None, plan: Plan) -> None:
    """Raises SettingError where the data ranks and microbatches do not divide the batch; None: it is not known."""
    if batch_size is None:
        return
    if problems := batch_size_problems(batch_size, dp=plan.dp, microbatches=plan.microbatches):
        raise SettingError(problems, where="the settings")


def _check_tokens(data: "DataInput", plan: Plan) -> None:
    """Raises TaskError where cp > 1 and the samples have no sequence of tokens to split. Streams are not read here."""
    if plan.cp == 1:
        return
    from fourfold.axes.context.attach.token_shards import sequence_length
    from fourfold.feed.sample_rng import fetch_one
    from fourfold.feed.stream import Stream

    if not isinstance(data.source, Stream):
        sequence_length(fetch_one(data.source, 0))


def _check_order(data: "DataInput", settings: "RunSettings") -> None:
    """Raises DataError where the data cannot have the order of samples that the settings say."""
    from fourfold.feed.position import order_problems

    if problems := order_problems(data.source, order=settings.order, window=settings.window, shuffle=None):
        raise DataError(problems, where="the order of the training data")


def _check_fits_memory(task: Task, plan: Plan, data: "DataInput", meta_model: Any, settings: "RunSettings") -> None:
    """Raises SettingError where the run cannot fit into the memory of this host."""
    from fourfold.step.memory_bound import check_memory

    # Under another launcher every rank checks its own part.
    num_ranks = plan.mesh.size if from_environment() is None else 1
    sizes = {"batch_size": settings.batch_size, "num_steps": settings.steps}
    check_memory(task, plan, data, meta_model, **sizes, num_ranks=num_ranks)


def _check_init(task: Task, init: str | None) -> None:
    """Raises SettingError or CheckpointError where the files of initial weights are missing or another model's."""
    from fourfold.checkpoint.initial_weights import check_weights
    from fourfold.step.initial_model import build_meta_model

    if init is not None:
        check_init_path(init)
        check_weights(build_meta_model(task), Path(init))


def _check_scheduler(job: Job, model: "nn.Module", sized: "RunSettings", *, has_valid: bool) -> None:
    """Make the task's scheduler once, over the model without memory. Raises TaskError or SettingError."""
    from fourfold.optim.user_optimizer import build_optimizer
    from fourfold.trainer.task_scheduler import check_evaluations, make_scheduler

    if job.task.scheduler is None:
        return
    optimizer = build_optimizer(job.task.optimizer, list(model.parameters()))
    scheduler = make_scheduler(job.task, optimizer, steps=sized.steps, rates=sized.rates)
    check_evaluations(scheduler, evaluate_every=sized.evaluate_every, has_valid=has_valid)


def run_prefix(spec: str) -> str:
    """A run's name without its number: lm, or FILE, or FILE-TASK where the task in FILE has a name of its own.

    Of a config of transformers hf-FILE; of one that is called config.json, as most are, hf-FOLDER.
    """
    if spec.startswith(HF_PREFIX):
        path = Path(os.path.abspath(spec.removeprefix(HF_PREFIX)))
        return f"hf-{(path.parent.name or path.stem) if path.stem == 'config' else path.stem}"
    file, _, name = spec.partition(":")
    return f"{Path(file).stem}-{name}" if name not in ("", task_loader.DEFAULT_NAME) else Path(file).stem
