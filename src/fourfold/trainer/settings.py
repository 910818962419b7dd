"""Settings: what a run needs beside the task and the plan, and what makes it the same run.

identity  the task, its settings, the number of steps, the batch size, the clip, the seed, a codec: not the mesh
Law: two commands with the same identity are the same run, on whatever mesh.
"""

import dataclasses
import functools
import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from fourfold.plan.intervals import DRIFT_CHECK
from fourfold.plan.lr_schedule import LRLambda, LRSchedule
from fourfold.plan.plan import Plan
from fourfold.words import argument_checks
from fourfold.words.errors import Problem, SettingError
from fourfold.words.task import Task, check_task

Identity = Mapping[str, Any]


@dataclass(frozen=True)
class Settings:
    """What a run needs beside the task and the plan; see `train`."""

    steps: int
    batch_size: int
    clip: float | None
    seed: int = 0
    evaluate_every: int | None = None
    trace_every: int = 0
    name: str | None = None
    folder: str = "runs"
    label: str = "run"
    spec: str | None = None
    extra: Mapping[str, Any] | None = field(default=None)
    checkpoint_every: int = 100
    ema: float | None = None
    init: str | None = None
    skip_nan: int = 0
    drift_check: int = DRIFT_CHECK
    rates: LRSchedule | None = None
    training: Mapping[str, Any] = field(default_factory=dict)
    """Of the plan: what makes another training of it."""

    def identity(self) -> Identity:
        """What makes a run the same run, as JSON has it."""
        asked = {"steps": self.steps, "batch_size": self.batch_size, "clip": self.clip, "seed": self.seed}
        over = {"ema": self.ema, "init": self.init, "rates": self.rates and self.rates.non_default_fields()}
        given = {name: value for name, value in over.items() if value is not None} | dict(self.training)
        return {"task": self.spec or self.label, "settings": dict(self.extra or {}), **asked, **given}


def make_settings(task: Task, **given: Any) -> Settings:
    """The settings of a run: what was given, the task's own for the rest. Raises SettingError."""
    check_task(task)
    own = {name: getattr(task, name) for name in ("steps", "batch_size", "clip") if given.get(name) is None}
    settings = Settings(**{**given, **own})
    if problems := _setting_problems(settings):
        raise SettingError(problems, where="the settings")
    settings = _to_builtin_types(settings)
    lr_factors(task, settings)
    return settings


def _to_builtin_types(settings: Settings) -> Settings:
    """NumPy's numbers and paths become Python's own, which JSON can hold."""
    whole = ("steps", "batch_size", "seed", "skip_nan", "trace_every", "evaluate_every")
    whole += ("checkpoint_every", "drift_check")
    kinds: dict[str, Callable[[Any], Any]] = {"clip": float, "ema": float, "folder": os.fspath, "init": os.fspath}
    kinds |= dict.fromkeys(whole, int)
    values = {name: getattr(settings, name) for name in kinds}
    # Python's own stay as they are: 1 and 1.0 are different texts in the identity of a run.
    others = {name: value for name, value in values.items() if type(value) not in (int, float, str, type(None))}
    return dataclasses.replace(settings, **{name: kinds[name](value) for name, value in others.items()})


def _setting_problems(settings: Settings) -> list[Problem]:
    """Every setting that has an impossible value."""
    problems = argument_checks.int_problems("steps", settings.steps, minimum=0)
    problems += argument_checks.int_problems("batch_size", settings.batch_size, minimum=1)
    problems += argument_checks.positive_problems("clip", settings.clip, optional=True, attempt="clip=1.0")
    problems += argument_checks.seed_problems(settings.seed)
    for name in ("trace_every", "checkpoint_every", "skip_nan", "drift_check"):
        problems += argument_checks.int_problems(name, getattr(settings, name), minimum=0)
    problems += argument_checks.int_problems("evaluate_every", settings.evaluate_every, minimum=0, optional=True)
    if settings.ema is not None and not (argument_checks.is_real(settings.ema) and 0 < settings.ema < 1):
        problems.append(Problem(f"ema = {settings.ema!r}", "more than 0, less than 1", "ema=0.999"))
    for name in ("name", "spec"):
        problems += argument_checks.str_problems(name, getattr(settings, name), optional=True)
    problems += argument_checks.str_problems("label", settings.label)
    problems += argument_checks.str_problems("folder", settings.folder, path=True)
    problems += argument_checks.str_problems("init", settings.init, path=True, optional=True)
    problems += argument_checks.instance_problems(
        "rates", settings.rates, LRSchedule, optional=True, attempt='ff.LRSchedule(schedule="cosine")'
    )
    problems += argument_checks.mapping_problems("extra", settings.extra, optional=True)
    return problems or _json_problems(settings)


def _json_problems(settings: Settings) -> list[Problem]:
    """What of `extra` cannot stand in settings.json."""
    problems = []
    for name, value in (settings.extra or {}).items():
        try:
            msgspec.json.encode({name: value})
        except (TypeError, ValueError, OverflowError) as error:
            problems.append(Problem(f"extra[{name!r}]: {error}", "a value that JSON can hold"))
    return problems


def check_steps(steps: int, plan: Plan) -> None:
    """Raises SettingError where a run would end before its ranks have met."""
    period = plan.sync_interval
    if steps % period == 0:
        return
    below = steps // period * period
    fitting = f"steps={below} or {below + period}" if below else f"steps={period}"
    got, need = f"steps = {steps}, local_steps = {period}", "a number of steps divisible by local_steps"
    raise SettingError(Problem(got, need, fitting), where="the settings")


def format_delayed(settings: Settings, plan: Plan) -> str | None:
    """What is said of a run whose evaluations or checkpoints cannot be just when they were asked for."""
    asked = {"checkpoint_every": settings.checkpoint_every, "evaluate_every": settings.evaluate_every or 0}
    late = [f"{name} = {every}" for name, every in asked.items() if every % plan.sync_interval]
    if not late:
        return None
    return f"{' and '.join(late)}: done at the next multiple of {plan.sync_interval}, where ranks have the same weights"


def lr_factors(task: Task, settings: Settings) -> LRLambda | None:
    """The factor of the learning rate at each step; None where the rate stays what the optimizer has.

    Raises SettingError where the rates do not go with the run.
    """
    own = None if task.schedule is None else functools.partial(_task_lr_factor, task, settings.steps)
    if settings.rates is None:
        return own
    return settings.rates.lr_lambda(
        steps=settings.steps, batch_size=settings.batch_size, tuned_batch_size=tuned_batch_size(task), task_schedule=own
    )


def _task_lr_factor(task: Task, steps: int, step: int) -> float:
    assert task.schedule is not None
    return task.schedule(step, steps)


def tuned_batch_size(task: Task) -> int:
    """The global batch size that the task's rate was tuned for."""
    return task.batch_size if task.tuned_for is None else task.tuned_for


def default_run_name(label: str, identity: Identity) -> str:
    """The name of a run that was given none: the same for the same command."""
    return f"{label}-{hashlib.blake2b(canonical_json(identity), digest_size=3).hexdigest()}"


def canonical_json(identity: Identity) -> bytes:
    """The same text for the same identity."""
    return msgspec.json.encode(identity, order="sorted")
