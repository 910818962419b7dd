"""Job: a task and a plan that fit each other and this many processes. All checks are here.

Law: when `prepare` has returned, nothing the user typed can be wrong any more; no process has been started before.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fourfold.cli import arguments, task_loader
from fourfold.cli.arguments import LaunchSettings
from fourfold.cli.errors import ErrorCollector, is_file, nearest_file
from fourfold.environment.world import from_environment
from fourfold.launch.process_defaults import default_num_processes
from fourfold.plan.decode import DecodeError, read_bounded
from fourfold.plan.lr_schedule import LRSchedule
from fourfold.plan.plan import Plan
from fourfold.trainer.lr_factors import tuned_batch_size
from fourfold.trainer.run_identity import check_run_name, default_run_name, run_identity
from fourfold.trainer.settings import LR_PREFIX, TASK_FIELDS, check_steps, make_settings
from fourfold.words.errors import PlanError, Problem, SettingError
from fourfold.words.task import Data, Task

RUNS_DIR = Path("runs")


@dataclass(frozen=True)
class Job:
    """What a run needs.

    settings  keyword arguments of `train`; the run's name is always among them
    identity  what makes it the same run
    fresh     whether the run is to start over
    restarts, hang_seconds  see `engines.restart.Care`; of no concern to the ranks
    """

    task: Task
    plan: Plan
    settings: Mapping[str, Any]
    identity: Mapping[str, Any]
    fresh: bool = False
    restarts: int = LaunchSettings.restarts
    hang_seconds: float | None = LaunchSettings.hang_seconds

    @property
    def task_name(self) -> str:
        """The task as the user named it."""
        return self.settings["task_name"]

    @property
    def run_dir(self) -> Path:
        """The run's folder, whether it is there or not."""
        return RUNS_DIR / self.settings["name"]

    @property
    def num_processes(self) -> int:
        return self.plan.mesh.size


def parse_job(words: Sequence[str], *, num_processes: int | None = None) -> Job:
    """The job a command line describes, without looking at its data.

    num_processes: as many as there must be; None leaves it to the plan, or to this machine.
    Raises FourfoldError, or a group of them.
    """
    given = arguments.parse_args(words)
    errors = ErrorCollector()
    maker = known = values = made = plan = None
    with errors.collect():
        maker = task_loader.find_task(given.task)
    if maker is not None:
        with errors.collect():
            known = task_loader.task_arguments(maker)
    with errors.collect():
        values = arguments.parse_values(given.values, known)
    if values is None:  # The plan's own words can be judged all the same.
        values = arguments.parse_values(
            {key: text for key, text in given.values.items() if key in arguments.FIELDS}, None
        )
    elif maker is not None and known is not None:
        with errors.collect():
            made = task_loader.make_task(maker, values.task, spec=given.task)
    with errors.collect():
        plan = read_plan(given.plan_file, values.plan, num_processes=num_processes)
    errors.raise_collected()
    assert made is not None
    assert plan is not None
    # The task's own settings take these: in a call of `train`, clip=None would mean the task's.
    over = {key: value for key, value in values.run.items() if key in TASK_FIELDS}
    rest = {key: value for key, value in values.run.items() if key not in TASK_FIELDS}
    rest |= {
        "run_prefix": run_prefix(given.task),
        "task_name": given.task,
        "extra_settings": {key: value for key, value in values.task.items() if key not in TASK_FIELDS},
    }
    launching = {key: rest.pop(key) for key in arguments.LAUNCH_SETTINGS if key in rest}
    rates = {key: rest.pop(key) for key in list(rest) if key.startswith(LR_PREFIX)}
    if rates:
        rest["rates"] = LRSchedule(**{key.removeprefix(LR_PREFIX): value for key, value in rates.items()})
    # A task that was written for one batch size is still tuned for that one.
    made = dataclasses.replace(made, **over, tuned_for=tuned_batch_size(made))
    identity = run_identity(make_settings(made, **rest), plan)
    rest.setdefault("name", default_run_name(rest["run_prefix"], identity))
    return Job(task=made, plan=plan, settings=rest, identity=identity, **launching)


def prepare_job(words: Sequence[str], *, num_processes: int | None = None, has_run_dir: bool = True) -> Job:
    """The job a command line describes, after every check that can be made before processes are started.

    keeps: whether it is to be a run, with a folder.
    """
    from fourfold.step.build import preflight

    job = parse_job(words, num_processes=num_processes)
    errors = ErrorCollector()
    with errors.collect():
        if has_run_dir:
            check_run_name(RUNS_DIR, job.settings["name"], job.identity)
    with errors.collect():
        check_init(job)
    with errors.collect():
        check_batch_size(job.task.batch_size, job.plan)
    with errors.collect():
        check_steps(job.task.steps, job.plan)
    data = model = None
    with errors.collect():
        data = task_loader.open_data(job.task, spec=job.task_name)
        check_tokens(data, job.plan)
    with errors.collect():
        model = preflight(job.task, job.plan)
    errors.raise_collected()
    assert data is not None
    assert model is not None
    check_memory(job, data, model)
    return job


def read_plan(file: str | None, values: Mapping[str, object], *, num_processes: int | None = None) -> Plan:
    """The plan in a file, with these values instead of its own; without a file, dp takes the processes that are left.

    Raises PlanError with all problems of both, or where the mesh has not `num_processes` ranks.
    """
    from fourfold.plan.check import size_problems

    errors = ErrorCollector()
    plan = over = None
    with errors.collect():
        plan = Plan() if file is None else Plan.from_toml(_read_plan_text(file), where=file)
    with errors.collect():
        over = Plan.from_dict(values, where="the command line")
    errors.raise_collected()
    assert plan is not None
    assert over is not None
    plan = dataclasses.replace(plan, **values)  # type: ignore[arg-type]
    if file is None and "dp" not in values:
        plan = dataclasses.replace(plan, dp=_default_dp(plan, num_processes))
    if num_processes is not None and plan.mesh.size != num_processes:
        raise PlanError(size_problems(plan, num_processes), where=file or "the command line")
    return plan


def check_batch_size(batch_size: int, plan: Plan) -> None:
    """Raises SettingError where the batch cannot be cut evenly."""
    parts = plan.dp * plan.microbatches
    if batch_size % parts == 0:
        return
    below = batch_size // parts * parts
    fitting = f"batch_size={below} or {below + parts}" if below else f"batch_size={parts}"
    need = "a batch divisible by dp × microbatches" if plan.microbatches > 1 else "a batch divisible by dp"
    got = f"batch_size = {batch_size}, dp = {plan.dp}"
    got += f", microbatches = {plan.microbatches}" if plan.microbatches > 1 else ""
    raise SettingError(Problem(got, need, fitting), where="the settings")


def check_tokens(data: Data, plan: Plan) -> None:
    """Raises TaskError where a sample's tokens are to be cut, and cannot be."""
    if plan.sp > 1:
        from fourfold.feed.source import fetch
        from fourfold.step.sequence.token_shards import sequence_length

        sequence_length(fetch(data.train, [0]))


def check_memory(job: Job, data: Data, model: Any) -> None:
    """Raises SettingError where the run cannot fit into the memory of this host. `model` is an outline."""
    from fourfold.step.memory_bound import check_memory

    # A launcher's ranks check themselves, each its own part.
    num_ranks = job.num_processes if from_environment() is None else 1
    sizes = {"batch_size": job.task.batch_size, "num_steps": job.task.steps}
    check_memory(job.task, job.plan, data.train, model, **sizes, num_ranks=num_ranks)


def check_init(job: Job) -> None:
    """Raises SettingError or CheckpointError where the weights to begin with are not there, or are another model's."""
    from fourfold.checkpoint.weights_file import check_weights_file
    from fourfold.step.meta_model import build_meta_model

    init = job.settings.get("init")
    if init is None:
        return
    path = Path(init)
    if not is_file(path):
        got = f"init = {init} (no such file)"
        raise SettingError(Problem(got, "a safetensors file of weights", nearest_file(path, "*.safetensors")))
    check_weights_file(build_meta_model(job.task), path)


def _read_plan_text(file: str) -> str:
    try:
        return read_bounded(Path(file)).decode()
    except DecodeError as error:
        raise PlanError(Problem(f"{file} has {error}", "a plan in TOML"), where=file) from None
    except OSError as error:
        close = nearest_file(Path(file), "*.toml")
        raise PlanError(Problem(f"{file} ({(error.strerror or 'unreadable').lower()})", "a file", close)) from None
    except UnicodeDecodeError:
        raise PlanError(Problem(f"{file} is no text", "TOML in UTF-8"), where=file) from None


def _default_dp(plan: Plan, num_processes: int | None) -> int:
    """Data ranks: the processes there are, shared among the other axes."""
    others = plan.mesh.size // plan.dp
    return max(1, (default_num_processes() if num_processes is None else num_processes) // others)


def run_prefix(spec: str) -> str:
    """The run's name without a number: lm, or the file's and the task's where they say more."""
    file, _, name = spec.partition(":")
    return f"{Path(file).stem}-{name}" if name not in ("", task_loader.DEFAULT_NAME) else Path(file).stem
