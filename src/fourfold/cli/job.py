"""Job: a task and a plan that fit each other and the number of processes.

Law: when `prepare_job` has returned, nothing that the user typed can be wrong; until then no process has been started.
"""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fourfold.cli import arguments, settings_file, task_loader
from fourfold.cli.arguments import CALLBACK_WORD, RULES_WORD, LaunchSettings, ParsedValues
from fourfold.cli.callback_loader import check_shipped_callbacks, load_callbacks, options_of_file
from fourfold.cli.errors import ErrorCollector
from fourfold.cli.job_checks import check_batch_size, check_fits_memory, check_init, check_order, check_tokens
from fourfold.cli.plan_file import read_plan_text
from fourfold.cli.resolved_settings import argument_defaults, format_resolved, json_arguments
from fourfold.cli.rules_file import read_rules_setting
from fourfold.cli.task_source import argument_names
from fourfold.launcher.process_defaults import default_num_processes
from fourfold.plan.lr_schedule import LRSchedule
from fourfold.plan.plan import Plan
from fourfold.plan.plan_fields import FIELDS
from fourfold.trainer.callbacks.registry import required_metrics
from fourfold.trainer.lr_factors import tuned_batch_size
from fourfold.trainer.run_identity import HF_PREFIX, check_run_name, default_run_name, run_identity
from fourfold.trainer.settings import LR_PREFIX, TASK_FIELDS, make_settings, run_length
from fourfold.words.callback import Callback
from fourfold.words.errors import FourfoldError, PlanError, SettingError
from fourfold.words.field import Field
from fourfold.words.run_files import RUNS_DIR
from fourfold.words.task import Task, length_problems

if TYPE_CHECKING:
    from torch import nn

    from fourfold.trainer.run_length import RunSettings

SETTINGS_WITHOUT_RUN = (*TASK_FIELDS, RULES_WORD, "seed")  # of a settings file, for commands that write no run


@dataclass(frozen=True)
class Job:
    """What a run needs.

    settings  keyword arguments of `train`; the run's name is always among them
    identity  the settings that make it the same run
    fresh     whether the run starts over
    restarts, hang_seconds  see `launcher.restart_policy.SupervisionPolicy`; the ranks do not use them
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
    def default_name(self) -> str:
        """The name of a run that is given none."""
        return default_run_name(self.settings["run_prefix"], self.identity)

    @property
    def num_processes(self) -> int:
        return self.plan.mesh.size


def parse_job(words: Sequence[str], *, num_processes: int | None = None, has_run_dir: bool = True) -> Job:
    """The job that a command line describes. Does not look at its data.

    num_processes: how many there must be; None leaves it to the plan, or to this machine.
    has_run_dir: False for a command that writes no run: it leaves out what only a run needs of a settings file.
    Raises FourfoldError, or a group of them.
    """
    command = settings_file.parse_command(words)
    errors = ErrorCollector()
    factory = types = task = plan = callbacks = None
    with errors.collect():
        factory = task_loader.find_task(command.task)
    if factory is not None:
        with errors.collect():
            types = task_loader.task_arguments(factory)
    values, in_words = _parse_values(command, types, errors, has_run_dir=has_run_dir)
    if factory is not None and types is not None and not errors.errors:
        with errors.collect():
            task = task_loader.make_task(factory, values.task, spec=command.task)
    with errors.collect():
        callbacks = load_callbacks(values.run.get(CALLBACK_WORD), values.callback_options)
    with errors.collect():
        plan = _make_plan(command, values, in_words, num_processes=num_processes)
    with errors.collect():
        values.run.update(read_rules_setting(values.run.get(RULES_WORD)))
    errors.raise_collected()
    assert callbacks is not None
    assert factory is not None
    assert types is not None
    assert task is not None
    assert plan is not None
    overrides = _task_overrides(task, values.run)
    # A new batch size does not change the one that the learning rate was tuned for.
    task = dataclasses.replace(task, **overrides, tuned_for=tuned_batch_size(task))
    defaults = argument_defaults(factory, types)
    settings, launch_settings = _split_settings(command.task, values, defaults)
    resolved = make_settings(task, **settings)
    identity = run_identity(resolved, plan)
    settings.setdefault("name", default_run_name(settings["run_prefix"], identity))
    job = Job(task=task, plan=plan, settings=settings, identity=identity, callbacks=callbacks, **launch_settings)
    if has_run_dir:
        settings["config_text"] = format_resolved(job.run_dir, command.task, defaults, values, plan, resolved)
    return job


def _parse_values(
    command: settings_file.Command, types: settings_file.Arguments, errors: ErrorCollector, *, has_run_dir: bool
) -> tuple[ParsedValues, ParsedValues]:
    """The values of file and words, which take precedence; and those of the words alone."""
    in_words, in_file, options = None, ParsedValues(), {}
    with errors.collect():
        in_words = arguments.parse_values(command.values, types)
    if in_words is None:  # The fields of the plan can be checked all the same.
        in_words = arguments.parse_values({key: text for key, text in command.values.items() if key in FIELDS}, None)
    if command.settings_file is not None:
        with errors.collect():
            in_file = command.settings_file.parse(types)
        if has_run_dir:
            with errors.collect():
                options = options_of_file(in_file, in_words, path=command.settings_file.path)
    run = {key: value for key, value in in_file.run.items() if has_run_dir or key in SETTINGS_WITHOUT_RUN}
    both = ParsedValues(
        in_file.plan | in_words.plan,
        run | in_words.run,
        in_file.task | in_words.task,
        options | in_words.callback_options,
    )
    return both, in_words


def _make_plan(
    command: settings_file.Command, values: ParsedValues, in_words: ParsedValues, *, num_processes: int | None
) -> Plan:
    if command.settings_file is None:
        return read_plan(command.plan_file, in_words.plan, num_processes=num_processes)
    Plan.from_dict(in_words.plan, where="the command line")
    path = command.settings_file.path
    plan = Plan.from_dict(values.plan, where=path)
    return _fit_plan(plan, num_processes, has_dp="dp" in values.plan, where=path)


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
    }
    launch_settings = {key: settings.pop(key) for key in arguments.LAUNCH_SETTINGS if key in settings}
    lr_values = {key: settings.pop(key) for key in list(settings) if key.startswith(LR_PREFIX)}
    if lr_values:
        settings["rates"] = LRSchedule(**{key.removeprefix(LR_PREFIX): value for key, value in lr_values.items()})
    return settings, launch_settings


def planned_size(words: Sequence[str], num_processes: int | None) -> int | None:
    """The number of ranks, from the words alone: without the task, and without importing torch where there is no GPU.

    None where a word is wrong, as far as that is seen here: `parse_job` says how.
    """
    try:
        command = settings_file.parse_command(words)
        names = argument_names(command.task)
        types = None if names is None else dict.fromkeys(names, Field())
        in_words, in_file, options = arguments.parse_values(command.values, types), ParsedValues(), {}
        if (file := command.settings_file) is not None:
            in_file = file.parse(None)
            options = options_of_file(in_file, in_words, path=file.path)
        spec = (in_file.run | in_words.run).get(CALLBACK_WORD)
        check_shipped_callbacks(spec, options | in_words.callback_options)
        values = ParsedValues(plan={**in_file.plan, **in_words.plan})
        return _make_plan(command, values, in_words, num_processes=num_processes).mesh.size
    except (FourfoldError, ExceptionGroup):
        return None


def prepare_job(words: Sequence[str], *, num_processes: int | None = None, has_run_dir: bool = True) -> Job:
    """The job that a command line describes, after every check that needs no other process.

    has_run_dir: False for a command that writes no run, such as `verify`.
    """
    from fourfold.step.parallelize import preflight
    from fourfold.trainer.evaluate import check_evaluations, metric_needs
    from fourfold.trainer.run_length import check_steps, with_sizes

    job = parse_job(words, num_processes=num_processes, has_run_dir=has_run_dir)
    errors = ErrorCollector()
    with errors.collect():
        if has_run_dir:
            check_run_name(Path(RUNS_DIR), job.settings["name"], job.identity)
    with errors.collect():
        check_init(job.task, job.settings.get("init"))
    inputs = data = model = sized = None
    with errors.collect():
        inputs = task_loader.open_task_data(job.task, spec=job.task_name)
        data = inputs.train
        check_tokens(data, job.plan)
    if data is not None:
        with errors.collect():
            sized = with_sizes(make_settings(job.task, **job.settings), job.task, data)
            check_order(data, sized)
    with errors.collect():
        check_batch_size(job.task.batch_size if sized is None else sized.batch_size, job.plan)
    with errors.collect():
        check_steps(job.task.steps if sized is None else sized.steps, job.plan)
    if has_run_dir and inputs is not None and sized is not None:
        with errors.collect():
            check_evaluations(metric_needs(sized, required_metrics(job.callbacks)), job.task, inputs, sized)
    with errors.collect():
        model = preflight(job.task, job.plan)
    if inputs is not None and model is not None and sized is not None:
        with errors.collect():
            _check_scheduler(job, model, sized, has_valid=inputs.valid is not None)
    errors.raise_collected()
    assert data is not None
    assert sized is not None
    assert model is not None
    check_fits_memory(job.task, job.plan, data, model, sized)
    return job


def _check_scheduler(job: Job, model: "nn.Module", sized: "RunSettings", *, has_valid: bool) -> None:
    """Make the task's scheduler once, over the model without memory. Raises TaskError or SettingError."""
    from fourfold.optim.user_optimizer import build_optimizer
    from fourfold.trainer.task_scheduler import check_evaluations, make_scheduler

    if job.task.scheduler is None:
        return
    optimizer = build_optimizer(job.task.optimizer, list(model.parameters()))
    scheduler = make_scheduler(job.task, optimizer, steps=sized.steps, rates=sized.rates)
    check_evaluations(scheduler, evaluate_every=sized.evaluate_every, has_valid=has_valid)


def read_plan(file: str | None, values: Mapping[str, object], *, num_processes: int | None = None) -> Plan:
    """The plan in a file, with these values in place of its own; without a file, dp is what the other axes leave.

    Raises PlanError with all problems of both, or where the mesh does not have `num_processes` ranks.
    """
    errors = ErrorCollector()
    plan = overrides = None
    with errors.collect():
        plan = Plan() if file is None else Plan.from_toml(read_plan_text(file), where=file)
    with errors.collect():
        overrides = Plan.from_dict(values, where="the command line")
    errors.raise_collected()
    assert plan is not None
    assert overrides is not None
    plan = dataclasses.replace(plan, **values)  # type: ignore[arg-type]
    has_dp = file is not None or "dp" in values
    return _fit_plan(plan, num_processes, has_dp=has_dp, where=file or "the command line")


def _fit_plan(plan: Plan, num_processes: int | None, *, has_dp: bool, where: str) -> Plan:
    """The plan; if nothing says how large dp is, it becomes what the other axes leave. Raises PlanError."""
    from fourfold.plan.check import size_problems

    if not has_dp:
        plan = dataclasses.replace(plan, dp=_default_dp(plan, num_processes))
    if num_processes is not None and plan.mesh.size != num_processes:
        raise PlanError(size_problems(plan, num_processes, start="or -n {size}"), where=where)
    return plan


def _default_dp(plan: Plan, num_processes: int | None) -> int:
    """The number of data ranks: the processes, divided by the ranks of the other axes."""
    other_ranks = plan.mesh.size // plan.dp
    return max(1, (default_num_processes() if num_processes is None else num_processes) // other_ranks)


def run_prefix(spec: str) -> str:
    """A run's name without its number: lm, or FILE, or FILE-TASK where the task in FILE has a name of its own.

    Of a config of transformers hf-FILE; of one that is called config.json, as most are, hf-FOLDER.
    """
    if spec.startswith(HF_PREFIX):
        path = Path(os.path.abspath(spec.removeprefix(HF_PREFIX)))
        return f"hf-{(path.parent.name or path.stem) if path.stem == 'config' else path.stem}"
    file, _, name = spec.partition(":")
    return f"{Path(file).stem}-{name}" if name not in ("", task_loader.DEFAULT_NAME) else Path(file).stem
