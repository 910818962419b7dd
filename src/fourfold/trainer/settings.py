"""Settings: what a run needs besides the task and the plan, each declared once.

setting   a field of `Settings`: its type, bounds and default, one line of help, its part in the run's identity
word      a setting as KEY=VALUE on the command line
identity  what makes two commands the same run: the task, its settings, and the fields marked so; never the mesh
Law: whatever lists settings is derived from these fields: the checks of `train`, the words of the command line, the
tables of `fourfold train --help` and docs/runs.md, the identity. A new setting is one field, and one line in
`TrainOptions`, which type checkers read. A check returns every problem of a value, and raises nothing.
"""

import dataclasses
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypedDict

import msgspec

from fourfold.orders.order_names import ORDERS
from fourfold.plan.intervals import DRIFT_CHECK
from fourfold.plan.lr_schedule import LRSchedule
from fourfold.trainer.lr_factors import check_tuned_size, lr_factors
from fourfold.words import argument_checks
from fourfold.words.argument_checks import MAX_SEED
from fourfold.words.errors import Problem, SettingError, closest_match, place_of_setting
from fourfold.words.field import declare, declared_problems, declared_settings, to_builtin
from fourfold.words.measures import MODES
from fourfold.words.run_files import RUNS_DIR
from fourfold.words.task import DEFAULT_STEPS, Task, check_task, length_problems

# ---- checks of values with rules of their own ------------------------------------------------------------------------


def json_problems(value: Any, name: str) -> list[Problem]:
    """What of a dict cannot stand in settings.json."""
    problems = argument_checks.mapping_problems(name, value, optional=True)
    for key, each in value.items() if not problems else ():
        try:
            msgspec.json.encode({key: each})
        except (TypeError, ValueError, OverflowError) as error:
            problems.append(Problem(f"{name}[{key!r}]: {error}", "a value that JSON can hold"))
    return problems


def _name_problems(name: str, value: Any, known: Collection[str]) -> list[Problem]:
    """Why a keyword of `train` is none. What the command line calls lr_WORD are fields of `rates` in Python."""
    if name in known:
        return []
    field = name.removeprefix("lr_")
    attempt = place_of_setting(name, known) or closest_match(name, known)
    if field != name and field in declared_settings(LRSchedule):
        attempt = f"rates=ff.LRSchedule({field}=…)"
    return [Problem(argument_checks.format_argument(name, value), "a keyword of ff.train", attempt or "help(ff.train)")]


# ---- the settings ----------------------------------------------------------------------------------------------------


TRACE_EVERY = 100  # steps
TASK_FIELDS = ("steps", "epochs", "batch_size", "clip")  # a task has them too; None takes the task's
LR_PREFIX = "lr_"  # lr_warmup is the word of LRSchedule.warmup


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a run needs besides the task and the plan."""

    steps: int | None = declare(
        minimum=0,
        help="optimizer steps",
        default_text="the task's",
        in_identity="always",
        word={"minimum": 1},
    )
    epochs: int | None = declare(
        None,
        minimum=1,
        help="passes over the training data, in place of steps",
        default_text="the task's",
        in_identity="if given",
    )
    batch_size: int | None = declare(
        minimum=1,
        help="samples in a global batch",
        default_text="the task's, or its DataLoader's",
        in_identity="always",
    )
    drop_last: bool | None = declare(
        None,
        attempt="drop_last=True",
        help="leave out the samples of an epoch that do not fill a batch",
        default_text="the DataLoader's, or false",
        in_identity="if given",
    )
    order: str | None = declare(
        None,
        choices=ORDERS,
        attempt="order=windowed window=4",
        help="how samples are shuffled: " + ", ".join(ORDERS),
        default_text="global, or a mixture's own",
        in_identity="if given",
    )
    window: int | None = declare(
        None,
        minimum=1,
        help="order=windowed: how many files' samples are shuffled together",
        default_text="none",
        in_identity="if given",
    )
    bad_samples: int = declare(0, minimum=0, help="damaged samples that may be left out; one more ends the run")
    clip: float | None = declare(
        above=0,
        attempt="clip=1.0",
        help="maximum gradient norm; none: no clipping",
        default_text="the task's",
        in_identity="always",
    )
    seed: int = declare(
        0,
        check=argument_checks.seed_problems,
        help="random seed for initial weights, sample order and dropout",
        in_identity="always",
        word={"minimum": 0, "maximum": MAX_SEED},
    )
    evaluate_every: int | None = declare(
        None,
        minimum=0,
        help="steps between evaluations; each new best validation saves a checkpoint",
        default_text="at the end only",
        word={"minimum": 1},
    )
    trace_every: int = declare(
        TRACE_EVERY,
        minimum=0,
        help="steps between the steps recorded in trace.json, in addition to steps 3 and 4; 0: none",
    )
    name: str | None = declare(
        None,
        help="the run's name",
        default_text="the task and a hash",
        word={"is_optional": False},  # `none` is a name; a run that shall have none is given none
    )
    folder: str = declare(RUNS_DIR, type=os.PathLike, help="where the run's folder is", word=None)
    run_prefix: str = declare("run", help="what the name of an unnamed run begins with", word=None)
    task_name: str | None = declare(None, help="the task in the identity; None: run_prefix", word=None)
    extra_settings: Mapping[str, Any] | None = declare(
        None, check=json_problems, help="the task's, for the identity", word=None
    )
    config_text: str | None = declare(None, help="the text of config.toml in the run's folder", word=None)
    argument_defaults: Mapping[str, Any] | None = declare(
        None,
        check=json_problems,
        help="the arguments of the task's function that are not given, for the report",
        word=None,
    )
    launch_settings: Mapping[str, Any] | None = declare(
        None, check=json_problems, help="the settings of the command line alone, for the report", word=None
    )
    checkpoint_every: int = declare(
        100, minimum=0, help="steps between checkpoints; 0: none, not even of the last step"
    )
    disk_seconds: int = declare(
        600, minimum=0, help="how long a finished run waits for room on the disk for its last checkpoint"
    )
    keep: int = declare(2, minimum=1, help="how many of the newest checkpoints are kept")
    keep_best: int = declare(1, minimum=0, help="how many of the best checkpoints are kept in addition")
    best_metric: str = declare("loss", help="the validation metric that chooses the best checkpoint")
    best_mode: str = declare(
        "min",
        choices=MODES,
        attempt="best_mode=max",
        help="whether the lowest or the highest value is the best: min, max",
    )
    ema: float | None = declare(
        None,
        above=0,
        below=1,
        attempt="ema=0.999",
        help="decay of the EMA of the weights",
        default_text="no average",
        in_identity="if given",
    )
    init: str | None = declare(
        None,
        type=os.PathLike,
        help="initial weights: a safetensors file, or a folder of them",
        default_text="random",
        in_identity="if given",
    )
    skip_nan: int = declare(
        0, minimum=0, help="steps in a row that may be skipped because the loss or gradient is not finite"
    )
    drift_check: int = declare(
        DRIFT_CHECK, minimum=0, help="steps between checks that ranks hold the same weights; 0: never"
    )
    peer_timeout: float | None = declare(
        120.0,
        above=0,
        help="seconds of silence between two hosts after which the run ends; none: never",
    )
    rates: LRSchedule | None = declare(  # noqa: RUF009 (a field, as the others)
        None,
        attempt='ff.LRSchedule(schedule="cosine")',
        help="scaling, warm-up and schedule of the learning rate",
        in_identity="if given",
        word=None,  # its fields are
    )


class TrainOptions(TypedDict, total=False):
    """The keywords of `train` that are settings."""

    steps: int | None
    epochs: int | None
    batch_size: int | None
    drop_last: bool | None
    order: str | None
    window: int | None
    bad_samples: int
    clip: float | None
    seed: int
    evaluate_every: int | None
    trace_every: int
    name: str | None
    folder: str
    run_prefix: str
    task_name: str | None
    extra_settings: Mapping[str, Any] | None
    config_text: str | None
    argument_defaults: Mapping[str, Any] | None
    launch_settings: Mapping[str, Any] | None
    checkpoint_every: int
    disk_seconds: int
    keep: int
    keep_best: int
    best_metric: str
    best_mode: str
    ema: float | None
    init: str | None
    skip_nan: int
    drift_check: int
    peer_timeout: float | None
    rates: LRSchedule | None


def check_setting_names(given: Mapping[str, Any]) -> None:
    """Raise SettingError for every further keyword of `train` that is no setting."""
    known = [*declared_settings(Settings), "plan", "callbacks", "quiet", "report"]
    problems = [each for name, value in given.items() for each in _name_problems(name, value, known)]
    if problems:
        raise SettingError(problems, where="the arguments of ff.train")


def recorded_settings(settings: Settings) -> dict[str, Any]:
    """The settings as settings.json and the report of a run have them: by the words of the command line."""
    names = [name for name, each in declared_settings(Settings).items() if each.word is not None]
    rates = vars(settings.rates or LRSchedule())
    return (
        {name: getattr(settings, name) for name in names}
        | {f"{LR_PREFIX}{name}": value for name, value in rates.items()}
        | dict(settings.launch_settings or {})
    )


def make_settings(task: Task, **given: Any) -> Settings:
    """The settings of a run: what is given, and the task's length, batch size and clip where they are None.

    Of `steps` and `epochs` one is None. `batch_size` is None if only the data says it. Raises SettingError with all
    problems.
    """
    check_task(task)
    from_task = {name: getattr(task, name) for name in TASK_FIELDS if given.get(name) is None}
    settings = Settings(**{**given, **from_task, **run_length(task, given)})
    problems = declared_problems(settings) + length_problems(given.get("steps"), given.get("epochs"))
    if problems:
        raise SettingError(problems, where="the settings")
    # NumPy's numbers and paths become Python's own, which JSON can hold.
    settings = dataclasses.replace(settings, **{name: to_builtin(value) for name, value in vars(settings).items()})
    check_tuned_size(task, settings.rates)
    if settings.steps is not None and settings.batch_size is not None:
        lr_factors(task, steps=settings.steps, batch_size=settings.batch_size, rates=settings.rates)
    return settings


def run_length(task: Task, given: Mapping[str, Any]) -> dict[str, int | None]:
    """`steps` and `epochs` of a run, one of them None: what is given, else the task's."""
    asked = given if given.get("steps") is not None or given.get("epochs") is not None else vars(task)
    steps, epochs = asked.get("steps"), asked.get("epochs")
    return {"steps": DEFAULT_STEPS if steps is None and epochs is None else steps, "epochs": epochs}
