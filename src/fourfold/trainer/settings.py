"""Settings: what a run needs besides the task and the plan, each declared once.

setting   a field of `Settings`: its type, bounds and default, one line of help, its part in the run's identity
word      a setting as KEY=VALUE on the command line
identity  what makes two commands the same run: the task, its settings, and the fields marked so; never the mesh
Law: whatever lists settings is derived from these fields: the checks of `train`, the words of the command line, the
tables of `fourfold train --help` and docs/runs.md, the identity. A new setting is one field, and one line in
`TrainOptions`, which type checkers read.
"""

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict

import msgspec

from fourfold.plan.intervals import DRIFT_CHECK
from fourfold.plan.lr_schedule import CURVES, SCALING_RULES, LRSchedule
from fourfold.plan.plan import Plan
from fourfold.trainer.lr_factors import lr_factors
from fourfold.words import argument_checks
from fourfold.words.argument_checks import MAX_SEED
from fourfold.words.errors import Problem, SettingError
from fourfold.words.measures import MODES
from fourfold.words.run_files import RUNS_DIR
from fourfold.words.task import Task, check_task

TRACE_EVERY = 100  # steps
TASK_FIELDS = ("steps", "batch_size", "clip")  # a task has them too; None takes the task's
LR_PREFIX = "lr_"  # lr_warmup is the word of LRSchedule.warmup


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a setting means, and which values it may have.

    type         int, float, str, bool, tuple (of numbers), os.PathLike, Mapping, or the class of an object
    check        (value, name) -> problems, where the type and the bounds do not say it all
    attempt      what an error suggests
    default_text  the default as tables show it; "": the field's own
    in_identity  "if given": unless it is None
    word         fields that differ on the command line; None: no word of the command line
    """

    help: str
    type: Any
    is_optional: bool = False
    minimum: int | None = None
    above: float | None = None
    maximum: int | None = None
    choices: tuple[str, ...] = ()
    check: Callable[[Any, str], list[Problem]] | None = None
    attempt: str = ""
    default_text: str = ""
    in_identity: Literal["never", "always", "if given"] = "never"
    word: Mapping[str, Any] | None = field(default_factory=dict)

    def problems(self, name: str, value: Any) -> list[Problem]:
        """The problem with a value given in Python, if there is one."""
        if value is None and self.is_optional:
            return []
        if self.check is not None:
            return self.check(value, name)
        optional, attempt = self.is_optional, self.attempt
        checks: dict[Any, Callable[..., list[Problem]]] = {
            int: functools.partial(argument_checks.int_problems, minimum=self.minimum or 0, attempt=attempt),
            float: functools.partial(argument_checks.positive_problems, attempt=attempt),
            str: argument_checks.str_problems,
            os.PathLike: functools.partial(argument_checks.str_problems, path=True),
            Mapping: argument_checks.mapping_problems,
        }
        of_class = functools.partial(argument_checks.instance_problems, kind=self.type, attempt=attempt)
        return checks.get(self.type, of_class)(name, value, optional=optional)


def setting(default: Any = dataclasses.MISSING, /, **declared: Any) -> Any:
    """A dataclass field that is a setting; `declared` are fields of `Setting`. Without a default it must be given."""
    return field(default=default, metadata={"setting": Setting(**declared)})


def declared_settings(settings: Any) -> dict[str, Setting]:
    """The settings that a dataclass declares, or the class of an instance, by name."""
    return {each.name: each.metadata["setting"] for each in dataclasses.fields(settings)}


def _ema_problems(value: Any, name: str) -> list[Problem]:
    if argument_checks.is_real(value) and 0 < value < 1:
        return []
    return [Problem(f"{name} = {value!r}", "more than 0, less than 1", "ema=0.999")]


def _json_problems(value: Any, name: str) -> list[Problem]:
    """What of a dict cannot stand in settings.json."""
    problems = argument_checks.mapping_problems(name, value, optional=True)
    for key, each in value.items() if not problems else ():
        try:
            msgspec.json.encode({key: each})
        except (TypeError, ValueError, OverflowError) as error:
            problems.append(Problem(f"{name}[{key!r}]: {error}", "a value that JSON can hold"))
    return problems


def _mode_problems(value: Any, name: str) -> list[Problem]:
    return (
        [] if value in MODES else [Problem(argument_checks.format_argument(name, value), "min or max", f"{name}=max")]
    )


# On the command line a setting that is not wanted is left out.
GIVEN = {"is_optional": False}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a run needs besides the task and the plan."""

    steps: int = setting(
        type=int,
        minimum=0,
        help="optimizer steps",
        default_text="the task's",
        in_identity="always",
        word={"minimum": 1},
    )
    batch_size: int = setting(
        type=int, minimum=1, help="samples in a global batch", default_text="the task's", in_identity="always"
    )
    clip: float | None = setting(
        type=float,
        is_optional=True,
        above=0,
        attempt="clip=1.0",
        help="largest norm of the gradient; none: no limit",
        default_text="the task's",
        in_identity="always",
    )
    seed: int = setting(
        0,
        type=int,
        check=argument_checks.seed_problems,
        help="of the initial weights, the order of the samples, and dropout",
        in_identity="always",
        word={"minimum": 0, "maximum": MAX_SEED},
    )
    evaluate_every: int | None = setting(
        None,
        type=int,
        minimum=0,
        is_optional=True,
        help="steps between evaluations; each new best validation saves a checkpoint",
        default_text="at the end only",
        word={"minimum": 1, **GIVEN},
    )
    trace_every: int = setting(
        TRACE_EVERY,
        type=int,
        minimum=0,
        help="steps between steps recorded in trace.json, besides steps 3 and 4; 0: none",
    )
    name: str | None = setting(
        None, type=str, is_optional=True, help="the run's name", default_text="the task and a hash", word=GIVEN
    )
    folder: str = setting(RUNS_DIR, type=os.PathLike, help="where the run's folder is", word=None)
    run_prefix: str = setting("run", type=str, help="what the name of an unnamed run begins with", word=None)
    task_name: str | None = setting(
        None, type=str, is_optional=True, help="the task in the identity; None: run_prefix", word=None
    )
    extra_settings: Mapping[str, Any] | None = setting(
        None, type=Mapping, is_optional=True, check=_json_problems, help="the task's, for the identity", word=None
    )
    checkpoint_every: int = setting(
        100, type=int, minimum=0, help="steps between checkpoints; 0: none, not even of the last step"
    )
    keep: int = setting(2, type=int, minimum=1, help="how many of the newest checkpoints are kept")
    keep_best: int = setting(1, type=int, minimum=0, help="how many of the best checkpoints are kept besides")
    best_metric: str = setting("loss", type=str, help="the validation measure that chooses the best checkpoint")
    best_mode: str = setting(
        "min",
        type=str,
        choices=MODES,
        check=_mode_problems,
        help="whether the least value is the best, or the greatest: min, max",
    )
    ema: float | None = setting(
        None,
        type=float,
        is_optional=True,
        above=0,
        check=_ema_problems,
        help="decay of the average of the weights that is kept",
        default_text="no average",
        in_identity="if given",
    )
    init: str | None = setting(
        None,
        type=os.PathLike,
        is_optional=True,
        help="a safetensors file of weights to begin with",
        default_text="random",
        in_identity="if given",
        word=GIVEN,
    )
    skip_nan: int = setting(
        0, type=int, minimum=0, help="steps in a row that may be skipped because the loss or gradient is not finite"
    )
    drift_check: int = setting(
        DRIFT_CHECK, type=int, minimum=0, help="steps between checks that ranks hold the same weights; 0: never"
    )
    rates: LRSchedule | None = setting(  # noqa: RUF009 (a field, as the others)
        None,
        type=LRSchedule,
        is_optional=True,
        attempt='ff.LRSchedule(schedule="cosine")',
        help="scaling, warm-up and schedule of the learning rate",
        in_identity="if given",
        word=None,  # its fields are: LR_SETTINGS
    )


class TrainOptions(TypedDict, total=False):
    """The keywords of `train` that are settings."""

    steps: int | None
    batch_size: int | None
    clip: float | None
    seed: int
    evaluate_every: int | None
    trace_every: int
    name: str | None
    folder: str
    run_prefix: str
    task_name: str | None
    extra_settings: Mapping[str, Any] | None
    checkpoint_every: int
    keep: int
    keep_best: int
    best_metric: str
    best_mode: str
    ema: float | None
    init: str | None
    skip_nan: int
    drift_check: int
    rates: LRSchedule | None


# Words of the command line for the fields of `LRSchedule`, which checks their values.
LR_SETTINGS = {
    "schedule": Setting(
        type=str,
        choices=tuple(CURVES),
        help="the curve of the learning rate: " + ", ".join(CURVES),
        default_text="the task's",
    ),
    "warmup": Setting(type=int, minimum=0, help="steps in which the learning rate rises to its full value"),
    "scale": Setting(
        type=str,
        choices=tuple(SCALING_RULES),
        help="how the learning rate grows with the batch size: " + ", ".join(SCALING_RULES),
    ),
    "batch_size": Setting(
        type=int, minimum=1, help="the batch size that the learning rate was tuned for", default_text="the task's"
    ),
    "milestones": Setting(
        type=tuple,
        help="lr_schedule=step: fractions of all steps at which the rate drops",
        default_text="1/3, 2/3, 8/9",
    ),
    "drop": Setting(type=float, above=0, help="lr_schedule=step: factor of the rate at each milestone"),
    "floor": Setting(type=float, minimum=0, help="lr_schedule=linear, cosine: fraction of the rate left at the end"),
}


def make_settings(task: Task, **given: Any) -> Settings:
    """The settings of a run: what is given, and the task's steps, batch size and clip where they are None.

    Raises SettingError with all problems.
    """
    check_task(task)
    from_task = {name: getattr(task, name) for name in TASK_FIELDS if given.get(name) is None}
    settings = Settings(**{**given, **from_task})
    if problems := setting_problems(settings):
        raise SettingError(problems, where="the settings")
    settings = _to_builtin_types(settings)
    lr_factors(task, steps=settings.steps, batch_size=settings.batch_size, rates=settings.rates)
    return settings


def setting_problems(settings: Settings) -> list[Problem]:
    """Every setting that has an impossible value."""
    return [
        problem
        for name, each in declared_settings(settings).items()
        for problem in each.problems(name, getattr(settings, name))
    ]


def _to_builtin_types(settings: Settings) -> Settings:
    """NumPy's numbers and paths become Python's own, which JSON can hold."""
    converters: dict[Any, Callable[[Any], Any]] = {int: int, float: float, os.PathLike: os.fspath}
    changed = {}
    for name, each in declared_settings(settings).items():
        value = getattr(settings, name)
        # Python's own stay as they are: 1 and 1.0 are different texts in the identity of a run.
        if each.type in converters and type(value) not in (int, float, str, type(None)):
            changed[name] = converters[each.type](value)
    return dataclasses.replace(settings, **changed)


def check_steps(steps: int, plan: Plan) -> None:
    """Raise SettingError where a run would end between two synchronizations of its local steps."""
    period = plan.sync_interval
    if steps % period == 0:
        return
    below = steps // period * period
    fitting = f"steps={below} or {below + period}" if below else f"steps={period}"
    got, need = f"steps = {steps}, local_steps = {period}", "a number of steps divisible by local_steps"
    raise SettingError(Problem(got, need, fitting), where="the settings")


def format_delayed(settings: Settings, plan: Plan) -> str | None:
    """Which evaluations or checkpoints come later than asked for, because ranks have the same weights only then."""
    asked = {"checkpoint_every": settings.checkpoint_every, "evaluate_every": settings.evaluate_every or 0}
    delayed = [f"{name} = {every}" for name, every in asked.items() if every % plan.sync_interval]
    if not delayed:
        return None
    return (
        f"{' and '.join(delayed)}: done at the next multiple of {plan.sync_interval}, where ranks have the same weights"
    )
