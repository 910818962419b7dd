"""Rates: the learning rate over a run, as factors of the rate that was tuned.

scale     what a batch larger than the one the rate was tuned for multiplies it by
warm-up   the first steps: a line from the tuned rate up to the scaled one
schedule  the curve after it: constant, linear, cosine or step
Law: a factor is a function of the step, the number of steps and the batch sizes alone: not of ranks, nor of the past.

Sources: linear scaling and gradual warm-up, Goyal et al. 2017 (arXiv 1706.02677), §2.1, §2.2; their steps, §5.1;
square root, Krizhevsky 2014 (arXiv 1404.5997), §5; cosine, Loshchilov and Hutter 2017 (arXiv 1608.03983), eq. 5.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from fourfold.words import argument_checks
from fourfold.words.errors import Problem, SettingError

LRLambda = Callable[[int], float]

SCALING_RULES: dict[str, Callable[[float], float]] = {"none": lambda k: 1.0, "linear": lambda k: k, "sqrt": math.sqrt}


@dataclass(frozen=True, kw_only=True)
class LRSchedule:
    """How the learning rate goes over a run. Every factor multiplies the rate that the optimizer was made with.

    schedule    constant, linear, cosine or step; None: the task's own, and constant where there is none
    warmup      steps of the line up to the full rate: from 1 / scale of it where a larger batch has scaled it
                (Goyal et al.), else from one step above 0
    scale       none, linear (k) or sqrt (√k), where k is the batch size / the one that the rate was tuned for
    batch_size  the global batch size that the rate was tuned for; None: the task's
    milestones  of step: shares of all steps at which the rate is multiplied by `drop`
    floor       of linear and cosine: the share of the full rate that is left when the run has ended
    Raises SettingError with all problems.
    """

    schedule: str | None = None
    warmup: int = 0
    scale: str = "none"
    batch_size: int | None = None
    milestones: tuple[float, ...] = (1 / 3, 2 / 3, 8 / 9)
    drop: float = 0.1
    floor: float = 0.0

    def __post_init__(self) -> None:
        problems = list(_problems(self))
        if problems:
            raise SettingError(problems, where="the rates")

    def scaling_factor(self, batch_size: int | None, *, tuned_batch_size: int | None = None) -> float:
        """What the rate is multiplied by at a global batch of `batch_size`; `tuned` where this has no `batch_size`.

        Raises SettingError where the rate is to be scaled and one of the two is not known.
        """
        if self.scale == "none":
            return 1.0
        tuned_batch_size = self.batch_size or tuned_batch_size
        if batch_size is None or tuned_batch_size is None:
            got = (
                f"scale = {self.scale}, batch size {batch_size or 'unknown'}, tuned for {tuned_batch_size or 'unknown'}"
            )
            attempt = "Rates(scale=…, batch_size=64).factors(steps=…, batch_size=512)"
            problem = Problem(got, "the batch size, and the one the rate was tuned for", attempt)
            raise SettingError(problem, where="the rates")
        return SCALING_RULES[self.scale](batch_size / tuned_batch_size)

    def lr_lambda(
        self,
        *,
        steps: int,
        batch_size: int | None = None,
        tuned_batch_size: int | None = None,
        task_schedule: LRLambda | None = None,
    ) -> LRLambda:
        """The factor of the tuned rate at each step of 0 .. steps - 1; later steps have that of the end.

        What `torch.optim.lr_scheduler.LambdaLR` takes. `own` is the curve where there is no `schedule`.
        Raises SettingError where warm-up does not end, or `multiple` does.
        """
        if self.warmup >= steps:
            problem = Problem(
                f"warmup = {self.warmup}, steps = {steps}",
                "warm-up that ends before the run",
                f"warmup = {steps // 20}",
            )
            raise SettingError(problem, where="the rates")
        multiple = self.scaling_factor(batch_size, tuned_batch_size=tuned_batch_size)
        curve = task_schedule if task_schedule is not None and self.schedule is None else None

        def factor(step: int) -> float:
            after = curve(step) if curve is not None else self._schedule_factor(step, steps)
            return multiple * self._warmup_factor(step, multiple) * after

        return factor

    def _warmup_factor(self, step: int, multiple: float) -> float:
        if step >= self.warmup:
            return 1.0
        # Not from 0: the first step would be for nothing. This line is 0 one step before it.
        start = 1.0 / multiple if multiple > 1 else 1.0 / (self.warmup + 1)
        return start + (1.0 - start) * step / self.warmup

    def _schedule_factor(self, step: int, steps: int) -> float:
        return CURVES[self.schedule or "constant"](self, step, steps)

    def _progress(self, step: int, steps: int) -> float:
        """The share of the steps after warm-up that lies behind `step`."""
        return min(max(0, step - self.warmup) / max(1, steps - self.warmup), 1.0)

    def describe(
        self,
        base_lrs: Sequence[float],
        *,
        batch_size: int,
        tuned_batch_size: int | None = None,
        has_task_schedule: bool = False,
    ) -> str:
        """`rate 0.003 × 8 (linear, batch 512 of 64), 500 steps of warm-up, then cosine`.

        `rates` are those of the optimizer's groups; `own`: there is a curve of the task's.
        """
        parts = ["rate " + ", ".join(f"{rate:g}" for rate in dict.fromkeys(base_lrs))]
        if self.scale != "none":
            multiple = self.scaling_factor(batch_size, tuned_batch_size=tuned_batch_size)
            parts[0] += f" × {multiple:.4g} ({self.scale}, batch {batch_size} of {self.batch_size or tuned_batch_size})"
        if self.warmup:
            parts.append(f"{self.warmup} {'step' if self.warmup == 1 else 'steps'} of warm-up")
        curve = self.schedule or ("the task's own schedule" if has_task_schedule else "constant")
        return ", ".join([*parts, f"then {curve}" if self.warmup else curve])

    def non_default_fields(self) -> dict[str, Any]:
        """What differs from the defaults."""
        pairs = ((field, getattr(self, field.name)) for field in dataclasses.fields(self))
        return {field.name: value for field, value in pairs if value != field.default}


def _constant(rates: LRSchedule, step: int, steps: int) -> float:
    return 1.0


def _linear(rates: LRSchedule, step: int, steps: int) -> float:
    return rates.floor + (1.0 - rates.floor) * (1.0 - rates._progress(step, steps))


def _cosine(rates: LRSchedule, step: int, steps: int) -> float:
    return rates.floor + (1.0 - rates.floor) * 0.5 * (1.0 + math.cos(math.pi * rates._progress(step, steps)))


def _step(rates: LRSchedule, step: int, steps: int) -> float:
    # Counted from the first step, warm-up included, as Goyal et al. count their epochs; 1e-9: 2/3 of 90 is 60.
    return rates.drop ** sum(step >= milestone * steps - 1e-9 for milestone in rates.milestones)


CURVES: dict[str, Callable[[LRSchedule, int, int], float]] = {
    "constant": _constant,
    "linear": _linear,
    "cosine": _cosine,
    "step": _step,
}


def _problems(rates: LRSchedule) -> Iterable[Problem]:
    for name, choices in {"schedule": CURVES, "scale": SCALING_RULES}.items():
        value = getattr(rates, name)
        # A list is no key of a dict.
        if not (isinstance(value, str) and value in choices) and not (name == "schedule" and value is None):
            yield Problem(f"{name} = {value!r}", "one of " + ", ".join(choices))
    if type(rates.warmup) is not int or rates.warmup < 0:
        yield Problem(f"warmup = {rates.warmup!r}", "a number of steps, 0 or more", "warmup = 100")
    if rates.batch_size is not None and (type(rates.batch_size) is not int or rates.batch_size < 1):
        yield Problem(f"batch_size = {rates.batch_size!r}", "a number of samples, at least 1")
    shares = rates.milestones
    if not _is_increasing(shares):
        listed = ", ".join(f"{share}" for share in shares) if isinstance(shares, tuple | list) else f"{shares!r}"
        need = "rising shares of the steps, between 0 and 1"
        yield Problem(f"milestones = {listed}", need, "milestones = (0.5, 0.75)")
    if not (argument_checks.is_real(rates.drop) and 0 < rates.drop <= 1):
        yield Problem(f"drop = {rates.drop!r}", "more than 0, at most 1", "drop = 0.1")
    if not (argument_checks.is_real(rates.floor) and 0 <= rates.floor <= 1):
        yield Problem(f"floor = {rates.floor!r}", "0 or more, at most 1", "floor = 0.02")


def _is_increasing(shares: Any) -> bool:
    """Whether these are numbers between 0 and 1, each above the one before it."""
    if not isinstance(shares, tuple | list) or not all(map(argument_checks.is_real, shares)):
        return False
    return all(0 < share < 1 for share in shares) and list(shares) == sorted(set(shares))
