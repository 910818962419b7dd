"""Job: a task and a plan that fit each other and the number of processes.

Law: when `prepare_job` has returned, nothing that the user typed can be wrong; until then no process has been started.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fourfold.cli import arguments, task_loader
from fourfold.cli.arguments import CALLBACK_WORD, LaunchSettings
from fourfold.cli.callback_loader import load_callbacks
from fourfold.cli.errors import ErrorCollector, nearest_file
from fourfold.cli.job_checks import check_batch_size, check_fits_memory, check_init, check_tokens
from fourfold.launch.process_defaults import default_num_processes
from fourfold.plan.decode import DecodeError, read_bounded
from fourfold.plan.lr_schedule import LRSchedule
from fourfold.plan.plan import Plan
from fourfold.plan.plan_fields import FIELDS
from fourfold.trainer.callback_list import required_metrics
from fourfold.trainer.lr_factors import tuned_batch_size
from fourfold.trainer.run_identity import check_run_name, default_run_name, run_identity
from fourfold.trainer.settings import LR_PREFIX, TASK_FIELDS, check_steps, make_settings
from fourfold.words.callback import Callback
from fourfold.words.errors import PlanError, Problem, os_error_text
from fourfold.words.run_files import RUNS_DIR
from fourfold.words.task import Task


@dataclass(frozen=True)
class Job:
    """What a run needs.

    settings  keyword arguments of `train`; the run's name is always among them
    identity  the settings that make it the same run
    fresh     whether the run starts over
    restarts, hang_seconds  see `launch.restart_policy.SupervisionPolicy`; the ranks do not use them
    """

    task: Task
    plan: Plan
    settings: Mapping[str, Any]
    identity: Mapping[str, Any]
    callbacks: Sequence[Callback] = ()
    fresh: bool = False
    restarts: int = LaunchSettings.restarts
    hang_seconds: float | None = LaunchSettings.hang_seconds

    @property
    def task_name(self) -> str:
        """The task as the user named it."""
        return self.settings["task_name"]

    @property
    def run_dir(self) -> Path:
        """The run's folder, whether it exists or not."""
        return Path(RUNS_DIR) / self.settings["name"]

    @property
    def num_processes(self) -> int:
        return self.plan.mesh.size


def parse_job(words: Sequence[str], *, num_processes: int | None = None) -> Job:
    """The job that a command line describes. Does not look at its data.

    num_processes: how many there must be; None leaves it to the plan, or to this machine.
    Raises FourfoldError, or a group of them.
    """
    parsed = arguments.parse_args(words)
    errors = ErrorCollector()
    factory = argument_types = values = task = plan = callbacks = None
    with errors.collect():
        factory = task_loader.find_task(parsed.task)
    if factory is not None:
        with errors.collect():
            argument_types = task_loader.task_arguments(factory)
    with errors.collect():
        values = arguments.parse_values(parsed.values, argument_types)
    if values is None:  # The fields of the plan can be checked all the same.
        values = arguments.parse_values({key: text for key, text in parsed.values.items() if key in FIELDS}, None)
    elif factory is not None and argument_types is not None:
        with errors.collect():
            task = task_loader.make_task(factory, values.task, spec=parsed.task)
    with errors.collect():
        callbacks = load_callbacks(values.run.pop(CALLBACK_WORD, None), values.callback_options)
    with errors.collect():
        plan = read_plan(parsed.plan_file, values.plan, num_processes=num_processes)
    errors.raise_collected()
    assert callbacks is not None and task is not None and plan is not None  # noqa: PT018
    # These replace fields of the task: as an argument of `train`, clip=None would mean the task's own.
    overrides = {key: value for key, value in values.run.items() if key in TASK_FIELDS}
    settings = {key: value for key, value in values.run.items() if key not in TASK_FIELDS}
    settings |= {
        "run_prefix": run_prefix(parsed.task),
        "task_name": parsed.task,
        "extra_settings": {key: value for key, value in values.task.items() if key not in TASK_FIELDS},
    }
    launch_settings = {key: settings.pop(key) for key in arguments.LAUNCH_SETTINGS if key in settings}
    lr_values = {key: settings.pop(key) for key in list(settings) if key.startswith(LR_PREFIX)}
    if lr_values:
        settings["rates"] = LRSchedule(**{key.removeprefix(LR_PREFIX): value for key, value in lr_values.items()})
    # A new batch size does not change the one that the learning rate was tuned for.
    task = dataclasses.replace(task, **overrides, tuned_for=tuned_batch_size(task))
    identity = run_identity(make_settings(task, **settings), plan)
    settings.setdefault("name", default_run_name(settings["run_prefix"], identity))
    return Job(task=task, plan=plan, settings=settings, identity=identity, callbacks=callbacks, **launch_settings)


def prepare_job(words: Sequence[str], *, num_processes: int | None = None, has_run_dir: bool = True) -> Job:
    """The job that a command line describes, after every check that needs no other process.

    has_run_dir: False for a command that writes no run, such as `verify`.
    """
    from fourfold.step.parallelize import preflight
    from fourfold.trainer.metric_checks import check_evaluations, metric_needs

    job = parse_job(words, num_processes=num_processes)
    errors = ErrorCollector()
    with errors.collect():
        if has_run_dir:
            check_run_name(Path(RUNS_DIR), job.settings["name"], job.identity)
    with errors.collect():
        check_init(job.task, job.settings.get("init"))
    with errors.collect():
        check_batch_size(job.task.batch_size, job.plan)
    with errors.collect():
        check_steps(job.task.steps, job.plan)
    data = model = None
    with errors.collect():
        data = task_loader.open_data(job.task, spec=job.task_name)
        check_tokens(data, job.plan)
        if has_run_dir:
            settings = make_settings(job.task, **job.settings)
            check_evaluations(metric_needs(settings, required_metrics(job.callbacks)), job.task, data, settings)
    with errors.collect():
        model = preflight(job.task, job.plan)
    errors.raise_collected()
    assert data is not None
    assert model is not None
    check_fits_memory(job.task, job.plan, data, model)
    return job


def read_plan(file: str | None, values: Mapping[str, object], *, num_processes: int | None = None) -> Plan:
    """The plan in a file, with these values in place of its own; without a file, dp is what the other axes leave.

    Raises PlanError with all problems of both, or where the mesh does not have `num_processes` ranks.
    """
    from fourfold.plan.check import size_problems

    errors = ErrorCollector()
    plan = overrides = None
    with errors.collect():
        plan = Plan() if file is None else Plan.from_toml(_read_plan_text(file), where=file)
    with errors.collect():
        overrides = Plan.from_dict(values, where="the command line")
    errors.raise_collected()
    assert plan is not None
    assert overrides is not None
    plan = dataclasses.replace(plan, **values)  # type: ignore[arg-type]
    if file is None and "dp" not in values:
        plan = dataclasses.replace(plan, dp=_default_dp(plan, num_processes))
    if num_processes is not None and plan.mesh.size != num_processes:
        raise PlanError(size_problems(plan, num_processes), where=file or "the command line")
    return plan


def _read_plan_text(file: str) -> str:
    try:
        return read_bounded(Path(file)).decode()
    except DecodeError as error:
        raise PlanError(Problem(f"{file} has {error}", "a plan in TOML"), where=file) from None
    except OSError as error:
        close = nearest_file(Path(file), "*.toml")
        raise PlanError(Problem(f"{file} ({os_error_text(error)})", "a file", close)) from None
    except UnicodeDecodeError:
        raise PlanError(Problem(f"{file} is no text", "TOML in UTF-8"), where=file) from None


def _default_dp(plan: Plan, num_processes: int | None) -> int:
    """The number of data ranks: the processes, divided by the ranks of the other axes."""
    other_ranks = plan.mesh.size // plan.dp
    return max(1, (default_num_processes() if num_processes is None else num_processes) // other_ranks)


def run_prefix(spec: str) -> str:
    """A run's name without its number: lm, or FILE, or FILE-TASK where the task in FILE has a name of its own."""
    file, _, name = spec.partition(":")
    return f"{Path(file).stem}-{name}" if name not in ("", task_loader.DEFAULT_NAME) else Path(file).stem
