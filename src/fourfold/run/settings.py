"""Settings: what a run needs beside the task and the plan, and what makes it the same run.

identity  the task, its settings, the number of steps, the batch size, the clip, the seed, a codec: not the mesh
Law: two commands with the same identity are the same run, on whatever mesh.
"""

import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from fourfold.plan.plan import Plan
from fourfold.plan.rates import Factors, Rates
from fourfold.words.errors import Problem, SettingError
from fourfold.words.task import Task

Identity = Mapping[str, Any]
DRIFT_CHECK = 1000  # steps: a check takes about as long as the least step, so less than 0.1 % (docs/measured.md)


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
    rates: Rates | None = None
    training: Mapping[str, Any] = field(default_factory=dict)
    """Of the plan: what makes another training of it."""

    def identity(self) -> Identity:
        """What makes a run the same run, as JSON has it."""
        asked = {"steps": self.steps, "batch_size": self.batch_size, "clip": self.clip, "seed": self.seed}
        over = {"ema": self.ema, "init": self.init, "rates": self.rates and self.rates.given()}
        given = {name: value for name, value in over.items() if value is not None} | dict(self.training)
        return {"task": self.spec or self.label, "settings": dict(self.extra or {}), **asked, **given}


def settings_of(task: Task, **given: Any) -> Settings:
    """The settings of a run: what was given, the task's own for the rest. Raises SettingError."""
    own = {name: getattr(task, name) for name in ("steps", "batch_size", "clip") if given.get(name) is None}
    settings = Settings(**{**given, **own})
    problems = []
    if settings.checkpoint_every < 0:
        problems.append(Problem(f"checkpoint_every = {settings.checkpoint_every}", "a number of steps, or 0 for never"))
    if settings.skip_nan < 0:
        problems.append(Problem(f"skip_nan = {settings.skip_nan}", "a number of steps, or 0 for none"))
    if settings.drift_check < 0:
        problems.append(Problem(f"drift_check = {settings.drift_check}", "a number of steps, or 0 for never"))
    if settings.ema is not None and not 0 < settings.ema < 1:
        problems.append(Problem(f"ema = {settings.ema}", "more than 0, less than 1", "ema=0.999"))
    if problems:
        raise SettingError(problems, where="the settings")
    factors(task, settings)
    return settings


def refuse_steps(steps: int, plan: Plan) -> None:
    """Raises SettingError where a run would end before its ranks have met."""
    period = plan.period
    if steps % period == 0:
        return
    below = steps // period * period
    fitting = f"steps={below} or {below + period}" if below else f"steps={period}"
    got, need = f"steps = {steps}, local_steps = {period}", "a number of steps divisible by local_steps"
    raise SettingError(Problem(got, need, fitting), where="the settings")


def told_late(settings: Settings, plan: Plan) -> str | None:
    """What is said of a run whose evaluations or checkpoints cannot be just when they were asked for."""
    asked = {"checkpoint_every": settings.checkpoint_every, "evaluate_every": settings.evaluate_every or 0}
    late = [f"{name} = {every}" for name, every in asked.items() if every % plan.period]
    if not late:
        return None
    return f"{' and '.join(late)}: done at the next multiple of {plan.period}, where ranks have the same weights"


def is_due(step: int, every: int, period: int) -> bool:
    """Whether what is wanted after every so many steps is to be done after this one.

    Ranks have the same weights after every `period` steps only: what comes between waits until then.
    """
    return every > 0 and step % period == 0 and step // every > (step - period) // every


def factors(task: Task, settings: Settings) -> Factors | None:
    """The factor of the learning rate at each step; None where the rate stays what the optimizer has.

    Raises SettingError where the rates do not go with the run.
    """
    own = None if task.schedule is None else functools.partial(_own, task, settings.steps)
    if settings.rates is None:
        return own
    return settings.rates.factors(steps=settings.steps, batch_size=settings.batch_size, tuned=tuned_for(task), own=own)


def _own(task: Task, steps: int, step: int) -> float:
    assert task.schedule is not None
    return task.schedule(step, steps)


def tuned_for(task: Task) -> int:
    """The global batch size that the task's rate was tuned for."""
    return task.batch_size if task.tuned_for is None else task.tuned_for


def run_name(label: str, identity: Identity) -> str:
    """The name of a run that was given none: the same for the same command."""
    return f"{label}-{hashlib.blake2b(canonical(identity), digest_size=3).hexdigest()}"


def canonical(identity: Identity) -> bytes:
    """The same text for the same identity."""
    return msgspec.json.encode(identity, order="sorted")
