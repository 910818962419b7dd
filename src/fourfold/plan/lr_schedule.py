"""Learning rate schedule: the learning rate over a run, as factors of the rate that was tuned; a scheduler's state.

scale     multiplies the tuned rate if the batch is larger than the one that it was tuned for
warm-up   the first steps: the rate rises linearly from the tuned one to the scaled one
schedule  the curve after warm-up: constant, linear, cosine or step
Law: a factor depends only on the step, the number of steps and the batch sizes: not on ranks, nor on earlier steps.
Law: a torch scheduler's state holds no pickle and no callable: numbers, strings, and lists and dicts of these.

Sources: linear scaling and gradual warm-up, Goyal et al. 2017 (arXiv 1706.02677), §2.1, §2.2; step schedule, §5.1;
square root, Krizhevsky 2014 (arXiv 1404.5997), §5; cosine, Loshchilov and Hutter 2017 (arXiv 1608.03983), eq. 5.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from fourfold.plan.decode import is_too_deep
from fourfold.words import argument_checks
from fourfold.words.errors import Problem, SettingError
from fourfold.words.field import declare, declared_problems, to_builtin

# ---- state of a torch scheduler ------------------------------------------------------------------------------------


class SchedulerState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The state of a scheduler at a step.

    name     its class
    state    its state_dict, as `optim/lr_scheduler.py` writes it
    initial  the same before the first step, which shows whether its arguments have changed
    options  by group: the optimizer's options that the scheduler has changed, and the learning rate
    """

    name: str
    state: dict[str, Any]
    initial: dict[str, Any]
    options: tuple[dict[str, Any], ...]

    @property
    def is_too_deep(self) -> bool:
        """Whether it is nested deeper than anything that was written."""
        return is_too_deep([self.state, self.initial, *self.options])


# ---- curves --------------------------------------------------------------------------------------------------------


LRLambda = Callable[[int], float]

SCALING_RULES: dict[str, Callable[[float], float]] = {"none": lambda k: 1.0, "linear": lambda k: k, "sqrt": math.sqrt}


def _constant(schedule: "LRSchedule", step: int, steps: int) -> float:
    return 1.0


def _linear(schedule: "LRSchedule", step: int, steps: int) -> float:
    return schedule.floor + (1.0 - schedule.floor) * (1.0 - schedule._progress(step, steps))


def _cosine(schedule: "LRSchedule", step: int, steps: int) -> float:
    return schedule.floor + (1.0 - schedule.floor) * 0.5 * (1.0 + math.cos(math.pi * schedule._progress(step, steps)))


def _step(schedule: "LRSchedule", step: int, steps: int) -> float:
    # Steps count from the first one, warm-up included, as Goyal et al. count their epochs; 1e-9: 2/3 of 90 is 60.
    return schedule.drop ** sum(step >= milestone * steps - 1e-9 for milestone in schedule.milestones)


CURVES: dict[str, Callable[["LRSchedule", int, int], float]] = {
    "constant": _constant,
    "linear": _linear,
    "cosine": _cosine,
    "step": _step,
}


def _milestone_problems(value: Any, name: str) -> list[Problem]:
    """Why these are no fractions of the steps, in increasing order."""
    is_listed = isinstance(value, tuple | list)
    are_fractions = is_listed and all(argument_checks.is_real(each) and 0 < each < 1 for each in value)
    if are_fractions and list(value) == sorted(set(value)):
        return []
    listed = ", ".join(map(str, value)) if is_listed else f"{value!r}"
    need = "increasing fractions of the steps, between 0 and 1"
    return [Problem(f"{name} = {listed}", need, "milestones = (0.5, 0.75)")]


@dataclass(frozen=True, kw_only=True)
class LRSchedule:
    """How the learning rate changes over a run. Every factor multiplies the rate that the optimizer was made with.

    schedule    constant, linear, cosine or step; None: the task's own schedule, or constant if it has none
    warmup      steps of the linear rise to the full rate: from 1 / scale of it if a larger batch scales the rate
                (Goyal et al.), else from one step above 0
    scale       none, linear (k) or sqrt (√k), where k = batch size / batch size that the rate was tuned for
    batch_size  the global batch size that the rate was tuned for; None: the task's
    milestones  for step: the fractions of all steps at which the rate is multiplied by `drop`
    floor       for linear and cosine: the fraction of the full rate at the end of the run
    Raises SettingError with all problems.
    """

    schedule: str | None = declare(
        None,
        choices=tuple(CURVES),
        help="the curve of the learning rate: " + ", ".join(CURVES),
        default_text="the task's",
        word={"is_optional": False},
    )
    warmup: int = declare(
        0, minimum=0, attempt="warmup = 100", help="steps in which the learning rate rises to its full value"
    )
    scale: str = declare(
        "none",
        choices=tuple(SCALING_RULES),
        help="how the learning rate grows with the batch size: " + ", ".join(SCALING_RULES),
    )
    batch_size: int | None = declare(
        None,
        minimum=1,
        help="the batch size that the learning rate was tuned for",
        default_text="the task's",
        word={"is_optional": False},
    )
    milestones: tuple[float, ...] = declare(
        (1 / 3, 2 / 3, 8 / 9),
        check=_milestone_problems,
        help="lr_schedule=step: fractions of all steps at which the learning rate drops",
        default_text="1/3, 2/3, 8/9",
    )
    drop: float = declare(
        0.1,
        above=0,
        maximum=1,
        attempt="drop = 0.1",
        help="lr_schedule=step: factor of the learning rate at each milestone",
    )
    floor: float = declare(
        0.0,
        minimum=0,
        maximum=1,
        attempt="floor = 0.02",
        help="lr_schedule=linear, cosine: fraction of the learning rate left at the end",
    )

    def __post_init__(self) -> None:
        if problems := declared_problems(self):
            raise SettingError(problems, where="the learning rate schedule")
        for name, value in vars(self).items():
            object.__setattr__(self, name, to_builtin(value))

    def scaling_factor(self, batch_size: int | None, *, tuned_batch_size: int | None = None) -> float:
        """The factor for a global batch of `batch_size`.

        `tuned_batch_size`: what the rate was tuned for, unless this schedule has a `batch_size`. Raises SettingError if
        the rate must be scaled and one of the two sizes is unknown.
        """
        if self.scale == "none":
            return 1.0
        tuned_batch_size = self.batch_size or tuned_batch_size
        if batch_size is None or tuned_batch_size is None:
            got = (
                f"scale = {self.scale}, batch size {batch_size or 'unknown'}, tuned for {tuned_batch_size or 'unknown'}"
            )
            attempt = "LRSchedule(scale=…, batch_size=64).lr_lambda(steps=…, batch_size=512)"
            problem = Problem(got, "the batch size, and the one that the learning rate was tuned for", attempt)
            raise SettingError(problem, where="the learning rate schedule")
        return SCALING_RULES[self.scale](batch_size / tuned_batch_size)

    def lr_lambda(
        self,
        *,
        steps: int,
        batch_size: int | None = None,
        tuned_batch_size: int | None = None,
        task_schedule: LRLambda | None = None,
    ) -> LRLambda:
        """The factor of the tuned rate at each step 0 … steps − 1, for `torch.optim.lr_scheduler.LambdaLR`.

        Later steps have the factor of the end. `task_schedule` is the curve if this has no `schedule`. Raises
        SettingError if warm-up does not end before the run, or a batch size is missing (`scaling_factor`).
        """
        if self.warmup >= steps:
            problem = Problem(
                f"warmup = {self.warmup}, steps = {steps}",
                "warm-up that ends before the run",
                f"warmup = {steps // 20}",
            )
            raise SettingError(problem, where="the learning rate schedule")
        scale = self.scaling_factor(batch_size, tuned_batch_size=tuned_batch_size)
        curve = task_schedule if task_schedule is not None and self.schedule is None else None

        def factor(step: int) -> float:
            scheduled = CURVES[self.schedule or "constant"](self, step, steps) if curve is None else curve(step)
            return scale * self._warmup_factor(step, scale) * scheduled

        return factor

    def _warmup_factor(self, step: int, scale: float) -> float:
        if step >= self.warmup:
            return 1.0
        # Not from 0: the first step would change nothing. This line is 0 one step before the first.
        start = 1.0 / scale if scale > 1 else 1.0 / (self.warmup + 1)
        return start + (1.0 - start) * step / self.warmup

    def _progress(self, step: int, steps: int) -> float:
        """The fraction of the steps after warm-up that are done at `step`."""
        return min(max(0, step - self.warmup) / max(1, steps - self.warmup), 1.0)

    def describe(
        self,
        base_lrs: Sequence[float],
        *,
        batch_size: int,
        tuned_batch_size: int | None = None,
        has_task_schedule: bool = False,
    ) -> str:
        """`learning rate 0.003 × 8 (linear, batch 512, tuned for 64), 500 steps of warm-up, then cosine`.

        `base_lrs` are the learning rates of the optimizer's groups.
        """
        parts = ["learning rate " + ", ".join(f"{rate:g}" for rate in dict.fromkeys(base_lrs))]
        if self.scale != "none":
            scale = self.scaling_factor(batch_size, tuned_batch_size=tuned_batch_size)
            tuned = self.batch_size or tuned_batch_size
            parts[0] += f" × {scale:.4g} ({self.scale}, batch {batch_size}, tuned for {tuned})"
        if self.warmup:
            parts.append(f"{self.warmup} {'step' if self.warmup == 1 else 'steps'} of warm-up")
        curve = self.schedule or ("the task's own schedule" if has_task_schedule else "constant")
        return ", ".join([*parts, f"then {curve}" if self.warmup else curve])

    def non_default_fields(self) -> dict[str, Any]:
        """The fields that differ from their defaults."""
        pairs = ((field, getattr(self, field.name)) for field in dataclasses.fields(self))
        return {field.name: value for field, value in pairs if value != field.default}
